//! Files that appear whole or not at all.

use anyhow::{bail, Context, Result};
use std::fs::{self, Metadata};
use std::io::{self, BufWriter, ErrorKind, IntoInnerError, Write};
use std::path::{Path, PathBuf};
use tempfile::{Builder, NamedTempFile};

/// A file that is written beside its place and put there when it is whole. Until then, and if that never happens, what was there
/// stays.
pub struct Replacement {
    part: BufWriter<NamedTempFile>,
    target: PathBuf,
}

impl Replacement {
    /// `path` may be taken, but by a `what` alone, which `is_own` tells, or by an empty file: a slip would cost a model or a letter.
    /// If it is a link, what it leads to is replaced. Who may read the old file may read the new one.
    ///
    /// # Errors
    ///
    /// A name that no file can have, a folder that is not there or can't be written, and something there that is no such file.
    pub fn of(path: &Path, what: &str, is_own: impl FnOnce(&Path) -> bool) -> Result<Self> {
        let target = target(path)?;
        let place = || path.display().to_string();
        let old = fs::metadata(&target).ok();
        if old.as_ref().is_some_and(|old| old.len() > 0) && !is_own(&target) {
            bail!(
                "{}: is there and no {what}, want a new file or one",
                place()
            );
        }
        let mut name = target.file_name().unwrap_or_default().to_os_string();
        name.push(".");
        let mut builder = Builder::new();
        builder.prefix(&name).suffix(".part");
        create_as(&mut builder, old.as_ref());
        let part = builder.tempfile_in(folder(&target)).with_context(place)?;
        if let Some(old) = old {
            let set = part.as_file().set_permissions(old.permissions());
            set.with_context(place)?;
        }
        let part = BufWriter::new(part);
        Ok(Self { part, target })
    }

    /// Puts what was written in its place.
    pub fn put(self) -> Result<()> {
        let place = || self.target.display().to_string();
        let part = self.part.into_inner().map_err(IntoInnerError::into_error);
        let part = part.with_context(place)?;
        part.as_file().sync_all().with_context(place)?;
        part.persist(&self.target).with_context(place)?;
        Ok(())
    }
}

/// Errors name the file.
impl Write for Replacement {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.part.write(bytes).map_err(|e| named(&self.target, e))
    }

    fn flush(&mut self) -> io::Result<()> {
        self.part.flush().map_err(|e| named(&self.target, e))
    }
}

fn named(file: &Path, error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", file.display()))
}

/// Where a file that goes by the name `path` is.
fn target(path: &Path) -> Result<PathBuf> {
    let place = || path.display().to_string();
    // A path that ends in a slash has the name of the folder before it.
    let slash = path.as_os_str().as_encoded_bytes().ends_with(b"/");
    if path.file_name().is_none() || slash {
        bail!("{}: want the name of a file", place());
    }
    match fs::metadata(path) {
        Ok(file) if !file.is_file() => bail!("{}: is there and no regular file", place()),
        Ok(_) => fs::canonicalize(path).with_context(place),
        Err(e) if e.kind() == ErrorKind::NotFound => {
            if fs::symlink_metadata(path).is_ok() {
                bail!("{}: is a link to what is not there", place());
            }
            match folder(path) {
                there if there.is_dir() => Ok(path.to_path_buf()),
                none => bail!("{}: there is no folder {}", place(), none.display()),
            }
        }
        Err(e) => Err(e).with_context(place),
    }
}

/// That a file is in.
pub fn folder(file: &Path) -> &Path {
    let parent = file.parent().filter(|parent| *parent != Path::new(""));
    parent.unwrap_or(Path::new("."))
}

/// Never more open than the file will be.
#[cfg(unix)]
fn create_as(builder: &mut Builder, old: Option<&Metadata>) {
    use std::os::unix::fs::PermissionsExt;
    // Of which the system takes what the user's mask takes from any new file.
    let new = fs::Permissions::from_mode(0o666);
    builder.permissions(old.map_or(new, |old| old.permissions()));
}

#[cfg(not(unix))]
fn create_as(_: &mut Builder, _: Option<&Metadata>) {}
