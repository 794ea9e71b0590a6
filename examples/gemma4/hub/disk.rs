//! Room on a disk.

use crate::memory::human;
use anyhow::{bail, Result};
use std::path::Path;

/// Fails if the disk of `folder` has not the `bytes` left that `what` needs, where the system tells; `mend` says what helps.
pub fn check_room(what: &str, bytes: u64, folder: &Path, mend: &str) -> Result<()> {
    match free(folder) {
        Some(free) if free < bytes => bail!(
            "{what} needs {} more, {} has {} free: {mend}",
            human(bytes),
            folder.display(),
            human(free)
        ),
        _ => Ok(()),
    }
}

#[cfg(unix)]
fn free(folder: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(folder).ok()?;
    Some(stat.f_bavail.saturating_mul(stat.f_frsize))
}

#[cfg(not(unix))]
fn free(_: &Path) -> Option<u64> {
    None
}
