//! Text that is read whole.

use anyhow::{bail, Context, Result};
use std::io::ErrorKind;
use std::path::Path;

/// Bytes of a tokenizer; Gemma's has 32 MiB.
pub const LARGEST: u64 = 128 << 20;
/// Bytes of a `generation_config.json`; published ones have a few hundred.
#[allow(dead_code, reason = "not every test target reads one")]
pub const LARGEST_SETTINGS: u64 = 1 << 20;

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
