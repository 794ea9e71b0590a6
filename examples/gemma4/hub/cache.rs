//! The folder that every Hugging Face library shares: `blobs/` by digest, `refs/` from revision to commit, `snapshots/` of links.

use super::disk;
use crate::replace::Replacement;
use anyhow::{bail, Context, Result};
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

pub struct Cache {
    /// Of all models.
    root: PathBuf,
    /// Of this one.
    folder: PathBuf,
    model_id: String,
}

impl Cache {
    pub fn new(model_id: &str) -> Result<Self> {
        let root = match variable("HF_HUB_CACHE") {
            Some(folder) => PathBuf::from(folder),
            None => home()?.join("hub"),
        };
        let name = format!("models--{}", model_id.replace('/', "--"));
        Ok(Self {
            folder: root.join(name),
            root,
            model_id: model_id.to_string(),
        })
    }

    pub fn model_id(&self) -> &str {
        &self.model_id
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    /// As huggingface_hub names it, so that neither downloads what the other does.
    pub fn lock(&self, etag: &str) -> PathBuf {
        let name = self.folder.file_name().unwrap_or_default();
        self.root
            .join(".locks")
            .join(name)
            .join(format!("{etag}.lock"))
    }

    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    pub fn has(&self, commit: &str, file: &str) -> bool {
        // Follows the link: one without its blob is not there.
        self.snapshot(commit).join(file).is_file()
    }

    /// Whether the repository was once found to have no such file.
    pub fn knows_none(&self, commit: &str, file: &str) -> bool {
        self.no_exist(commit, file).is_file()
    }

    /// Remembers that the repository has no such file.
    pub fn set_none(&self, commit: &str, file: &str) -> Result<()> {
        let mark = self.no_exist(commit, file);
        create_parent(&mark)?;
        fs::write(&mark, "").with_context(|| mark.display().to_string())
    }

    /// As huggingface_hub names it.
    fn no_exist(&self, commit: &str, file: &str) -> PathBuf {
        self.folder.join(".no_exist").join(commit).join(file)
    }

    /// The commit that a revision was last known to be, or that it is itself.
    pub fn commit_of(&self, revision: &str) -> Option<String> {
        if let Ok(commit) = fs::read_to_string(self.folder.join("refs").join(revision)) {
            let commit = commit.trim();
            return is_name(commit).then(|| commit.to_string());
        }
        self.snapshot(revision)
            .is_dir()
            .then(|| revision.to_string())
    }

    pub fn set_commit(&self, revision: &str, commit: &str) -> Result<()> {
        if revision == commit {
            return Ok(());
        }
        let file = self.folder.join("refs").join(revision);
        create_parent(&file)?;
        let mut file = Replacement::of(&file, "revision", |_| true)?;
        file.write_all(commit.as_bytes())?;
        file.put()
    }

    /// Puts a blob into a snapshot under its name.
    pub fn link(&self, commit: &str, file: &str, etag: &str) -> Result<()> {
        let link = self.snapshot(commit).join(file);
        create_parent(&link)?;
        if fs::symlink_metadata(&link).is_ok() {
            fs::remove_file(&link).with_context(|| link.display().to_string())?;
        }
        let up = "../".repeat(2 + file.matches('/').count());
        place(&format!("{up}blobs/{etag}"), &self.blob(etag), &link)
            .with_context(|| link.display().to_string())
    }

    /// Fails if the disk has not `bytes` left, where the system tells.
    pub fn check_room(&self, bytes: u64) -> Result<()> {
        let blobs = self.folder.join("blobs");
        fs::create_dir_all(&blobs).with_context(|| blobs.display().to_string())?;
        let what = format!("hub: {}", self.model_id);
        let mend = "make room, or set HF_HOME to a folder on another disk";
        disk::check_room(&what, bytes, &blobs, mend)
    }
}

/// Where tokens and models of the hub are.
pub fn home() -> Result<PathBuf> {
    if let Some(home) = variable("HF_HOME") {
        return Ok(PathBuf::from(home));
    }
    if let Some(cache) = variable("XDG_CACHE_HOME") {
        return Ok(Path::new(&cache).join("huggingface"));
    }
    match std::env::home_dir() {
        Some(home) => Ok(home.join(".cache/huggingface")),
        None => bail!("hub: no home folder is known, set HF_HOME to the folder for models"),
    }
}

pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Whether a commit or a digest is a plain name: servers choose them, and they become paths.
pub fn is_name(name: &str) -> bool {
    let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    !name.is_empty() && name.len() <= 128 && name.chars().all(known)
}

pub fn create_parent(file: &Path) -> Result<()> {
    let parent = file.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(parent).with_context(|| parent.display().to_string())
}

#[cfg(unix)]
fn place(target: &str, _: &Path, link: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

/// Links need rights there: the file itself, as huggingface_hub does.
#[cfg(not(unix))]
fn place(_: &str, blob: &Path, link: &Path) -> std::io::Result<()> {
    fs::copy(blob, link).map(drop)
}
