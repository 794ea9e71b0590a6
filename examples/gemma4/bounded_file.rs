//! Text files that are read whole, and files that may be replaced.

use anyhow::{bail, Context, Result};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Bytes of a tokenizer or of what configures one; Gemma's has 32 MiB.
pub const LARGEST: u64 = 512 << 20;

/// The text of a file of at most `largest` bytes, `None` if there is none. Links are followed; what they lead to must be a regular
/// file, since a device need not end and a pipe need not begin.
pub fn read(path: &Path, largest: u64) -> Result<Option<String>> {
    let place = || path.display().to_string();
    match std::fs::metadata(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(e).with_context(place),
        Ok(file) if !file.is_file() => bail!("{}: is no regular file", place()),
        Ok(file) if file.len() > largest => {
            bail!(
                "{}: has {} bytes, want at most {largest}",
                place(),
                file.len()
            )
        }
        Ok(_) => {}
    }
    let bytes = std::fs::read(path).with_context(place)?;
    String::from_utf8(bytes).map(Some).with_context(place)
}

/// Where a file that goes by the name `path` is to be written: what a link leads to, if there is one.
///
/// # Errors
///
/// A name that no file can have, a folder that is not there, something there that is no regular file.
pub fn target(path: &Path) -> Result<PathBuf> {
    let place = || path.display().to_string();
    // A path that ends in a slash has the name of the folder before it.
    let slash = path.as_os_str().as_encoded_bytes().ends_with(b"/");
    if path.file_name().is_none() || slash {
        bail!("{}: want the name of a file", place());
    }
    match std::fs::metadata(path) {
        Ok(file) if !file.is_file() => bail!("{}: is there and no regular file", place()),
        Ok(_) => std::fs::canonicalize(path).with_context(place),
        Err(e) if e.kind() == ErrorKind::NotFound => {
            let folder = path.parent().filter(|folder| *folder != Path::new(""));
            let folder = folder.unwrap_or(Path::new("."));
            match folder.is_dir() {
                true => Ok(path.to_path_buf()),
                false => bail!("{}: there is no folder {}", place(), folder.display()),
            }
        }
        Err(e) => Err(e).with_context(place),
    }
}
