//! Where a checkpoint has its chat template.

use crate::bounded_file;
use anyhow::{bail, Context, Result};
use serde_json::Value;
use std::path::Path;

/// Bytes of a file that may hold a template.
const LARGEST: u64 = 4 << 20;

/// The template and where it is from: `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`.
pub fn of_checkpoint(folder: &Path) -> Result<Option<(String, String)>> {
    let path = folder.join("chat_template.jinja");
    if let Some(text) = read(&path)? {
        return Ok(Some((text, path.display().to_string())));
    }
    let path = folder.join("tokenizer_config.json");
    let Some(text) = read(&path)? else {
        return Ok(None);
    };
    let origin = path.display().to_string();
    let config: Value = serde_json::from_str(&text).with_context(|| origin.clone())?;
    let source = match &config["chat_template"] {
        Value::Null => return Ok(None),
        Value::String(source) => source,
        Value::Array(named) => match default_of(named) {
            Some(source) => source,
            None => bail!(
                "{origin}: chat_template is a list of {} without one that is named default",
                named.len()
            ),
        },
        _ => bail!("{origin}: chat_template is neither a text nor a list of named ones"),
    };
    Ok(Some((source.clone(), origin)))
}

fn default_of(named: &[Value]) -> Option<&String> {
    let default = named.iter().find(|t| t["name"] == "default");
    match &default.or(named.first().filter(|_| named.len() == 1))?["template"] {
        Value::String(source) => Some(source),
        _ => None,
    }
}

/// The text of a file, `None` if there is none.
pub fn read(path: &Path) -> Result<Option<String>> {
    bounded_file::read(path, LARGEST)
}
