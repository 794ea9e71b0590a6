//! Values of a JSON file by name, with errors that say which name, what it holds and what is wanted.

use super::strict::Strict;
use candle::{bail, Result};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// No dimension of a real checkpoint comes near this; a larger one is damage, and would overflow a shape.
const LARGEST_DIM: usize = 1 << 24;

pub(super) fn object(text: &str) -> Result<Map<String, Value>> {
    match serde_json::from_str(text) {
        Ok(Strict(Value::Object(root))) => Ok(root),
        Ok(Strict(other)) => bail!("gemma4 config: want a JSON object, got {}", shown(&other)),
        Err(e) if e.is_data() => bail!("gemma4 config: {e}"),
        Err(e) => bail!("gemma4 config: not JSON: {e}"),
    }
}

/// A JSON object whose values are taken by name, with errors that say which name.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a>(pub(super) &'a Map<String, Value>);

impl<'a> Fields<'a> {
    pub(super) fn value(self, key: &str) -> Option<&'a Value> {
        self.0.get(key)
    }

    pub(super) fn present(self, key: &str) -> bool {
        self.value(key).is_some_and(|v| !v.is_null())
    }

    pub(super) fn shown(self, key: &str) -> String {
        self.value(key).map_or("missing".into(), shown)
    }

    /// The value of `key`; `None` if it is absent or null.
    pub(super) fn get<T: DeserializeOwned>(self, key: &str) -> Result<Option<T>> {
        match self.value(key) {
            None | Some(Value::Null) => Ok(None),
            Some(v) => match serde_json::from_value(v.clone()) {
                Ok(v) => Ok(Some(v)),
                Err(e) => bail!("gemma4 config: `{key}` is {}: {e}", shown(v)),
            },
        }
    }

    pub(super) fn one_of(self, key: &str, wanted: &[&str]) -> Result<()> {
        match self.get::<String>(key)? {
            Some(found) if wanted.contains(&found.as_str()) => Ok(()),
            _ => bail!(
                "gemma4 config: `{key}` is {}, want one of {wanted:?}",
                self.shown(key)
            ),
        }
    }

    /// Token ids: a number, a list of numbers, or nothing.
    pub(super) fn token_ids(self, key: &str) -> Result<Vec<u32>> {
        match self.value(key) {
            Some(Value::Array(_)) => Ok(self.get(key)?.unwrap_or_default()),
            _ => Ok(self.get(key)?.into_iter().collect()),
        }
    }

    pub(super) fn opt_dim(self, key: &str) -> Result<Option<usize>> {
        match self.get::<usize>(key)? {
            Some(n) if n == 0 || n > LARGEST_DIM => {
                bail!("gemma4 config: `{key}` is {n}, want 1 to {LARGEST_DIM}")
            }
            other => Ok(other),
        }
    }

    pub(super) fn dim(self, key: &str) -> Result<usize> {
        match self.opt_dim(key)? {
            Some(n) => Ok(n),
            None => bail!("gemma4 config: `{key}` is missing, want 1 to {LARGEST_DIM}"),
        }
    }

    pub(super) fn dim_or(self, key: &str, default: usize) -> Result<usize> {
        Ok(self.opt_dim(key)?.unwrap_or(default))
    }

    pub(super) fn positive(self, key: &str) -> Result<Option<f64>> {
        match self.get::<f64>(key)? {
            Some(x) if !(x.is_finite() && x > 0.0) => {
                bail!("gemma4 config: `{key}` is {x}, want a positive number")
            }
            other => Ok(other),
        }
    }

    pub(super) fn positive_or(self, key: &str, default: f64) -> Result<f64> {
        Ok(self.positive(key)?.unwrap_or(default))
    }
}

/// A value as an error shows it: short, whatever the file holds.
pub(super) fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        None => text,
        Some((at, _)) => format!("{}...", &text[..at]),
    }
}
