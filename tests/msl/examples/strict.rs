//! Prints the unit that `strict/check.sh` gives to clang: `strict FILE...`, headers first.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut files = Vec::new();
    for path in std::env::args().skip(1) {
        let text = std::fs::read_to_string(&path).map_err(|e| format!("{path}: {e}"))?;
        let name = Path::new(&path)
            .file_name()
            .ok_or("a path without a name")?;
        files.push((name.to_string_lossy().into_owned(), text));
    }
    let files: Vec<(&str, &str)> = files
        .iter()
        .map(|(n, t)| (n.as_str(), t.as_str()))
        .collect();
    print!("{}", msl::address_space_check_unit(&files)?);
    Ok(())
}
