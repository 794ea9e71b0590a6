//! What was said so far, and its file.

use crate::bounded_file;
use anyhow::{bail, Context, Result};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};

/// Bytes of a saved conversation.
const LARGEST: u64 = 64 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    User,
    Model,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Turn {
    pub role: Role,
    /// Of the model's turns without its thoughts: they are not part of what it reads later.
    pub content: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Conversation {
    #[serde(default)]
    pub system: Option<String>,
    #[serde(default)]
    pub think: bool,
    pub turns: Vec<Turn>,
}

impl Conversation {
    /// Adds a turn; space around a content is not part of it.
    pub fn push(&mut self, role: Role, content: &str) {
        let content = content.trim().to_string();
        self.turns.push(Turn { role, content });
    }

    /// Writes the whole file beside `path` first, so that a failed or killed save leaves the old one. Who may read the old one may
    /// read the new one.
    pub fn save(&self, path: &Path) -> Result<()> {
        let path = &bounded_file::target(path)?;
        let old = std::fs::metadata(path).map(|file| file.permissions());
        let mut name = path.file_name().unwrap_or_default().to_os_string();
        name.push(format!(".{}.part", std::process::id()));
        let part: PathBuf = path.with_file_name(name);
        let written = write(&part, &serde_json::to_vec_pretty(self)?)
            .with_context(|| part.display().to_string())
            .and_then(|()| {
                if let Ok(permissions) = old {
                    std::fs::set_permissions(&part, permissions)?;
                }
                std::fs::rename(&part, path).with_context(|| path.display().to_string())
            });
        if written.is_err() {
            // The error that is told is the first one.
            std::fs::remove_file(&part).ok();
        }
        written
    }

    /// A saved conversation: turns of user and model in alternation, the model's last.
    pub fn load(path: &Path) -> Result<Self> {
        let text = bounded_file::read(path, LARGEST)?;
        let text = text.with_context(|| format!("{}: there is no such file", path.display()))?;
        let conversation: Self =
            serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        let roles = [Role::User, Role::Model].into_iter().cycle();
        for (i, (turn, role)) in conversation.turns.iter().zip(roles).enumerate() {
            if turn.role != role {
                bail!(
                    "{}: turn {i} is of {:?}, want {role:?}",
                    path.display(),
                    turn.role
                );
            }
        }
        if conversation.turns.len() % 2 == 1 {
            bail!("{}: the last turn has no answer", path.display());
        }
        Ok(conversation)
    }
}

fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = std::fs::File::create(path)?;
    file.write_all(bytes)?;
    file.write_all(b"\n")?;
    file.sync_all()
}
