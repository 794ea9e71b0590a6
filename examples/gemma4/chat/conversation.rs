//! What was said so far, and its file.

use crate::bounded_file;
use crate::replace::Replacement;
use anyhow::{bail, Context, Result};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::Path;

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

    /// Writes it in place of nothing or of another conversation; a failed or killed save leaves that one.
    pub fn save(&self, path: &Path) -> Result<()> {
        let is_own = |old: &Path| Self::load(old).is_ok();
        let mut file = Replacement::of(path, "saved conversation", is_own)?;
        serde_json::to_writer_pretty(&mut file, self)
            .map_err(std::io::Error::from)
            .and_then(|()| file.write_all(b"\n"))?;
        file.put()
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
