//! What may be opened, and what may be read whole.

use std::path::Path;

/// Bytes of a configuration; published ones have a few thousand. A value of two bytes takes 32 and more once it is read.
pub(super) const LARGEST_CONFIG: u64 = 1 << 20;
/// Bytes of an index of shards; that of the 31B has a hundred thousand.
pub(super) const LARGEST_INDEX: u64 = 16 << 20;
/// Bytes of the header of a safetensors file; the format allows 100 million, the 832 tensors of the 31B take as many hundreds.
pub(super) const LARGEST_HEADER: u64 = 16 << 20;

/// What speaks against reading `path`. Links are followed, since hub caches are made of them; what they lead to must be a
/// regular file (a device need not end, a pipe need not begin) of at most `largest` bytes.
pub(super) fn fault(path: &Path, largest: u64) -> Option<String> {
    match std::fs::metadata(path) {
        Err(error) => Some(error.to_string()),
        Ok(file) if !file.is_file() => Some("is no regular file".into()),
        Ok(file) if file.len() > largest => {
            Some(format!("has {} bytes, want at most {largest}", file.len()))
        }
        Ok(_) => None,
    }
}
