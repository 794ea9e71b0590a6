//! How much longer the parts of a tokenizer may make a text.

use anyhow::{bail, Context, Result};
use serde_json::Value;

/// Gemma's normalizer makes three bytes of one, each of a chain of a few more at most as many.
const MOST_TIMES: f64 = 64.0;
const MOST_ADDED: f64 = 4096.0;
const MOST_PARTS: usize = 64;

/// A place in a `tokenizer.json` for a part that rewrites text.
pub struct Place {
    pub name: &'static str,
    /// The key of the parts of a `Sequence`.
    list: &'static str,
    /// Into how many bytes each part without a say of its own turns a byte at most.
    kinds: &'static [(&'static str, f64)],
}

/// Factors of Unicode forms are those of its annex 15 for UTF-8.
pub const NORMALIZER: Place = Place {
    name: "normalizer",
    list: "normalizers",
    kinds: &[
        ("Strip", 1.0),
        ("StripAccents", 1.0),
        ("Nmt", 1.0),
        ("Lowercase", 2.0),
        ("NFC", 3.0),
        ("NFD", 3.0),
        ("NFKC", 11.0),
        ("NFKD", 11.0),
        ("ByteLevel", 2.0),
    ],
};

/// A prefix may stand before every piece, and a piece may be one byte.
pub const PRE_TOKENIZER: Place = Place {
    name: "pre_tokenizer",
    list: "pretokenizers",
    kinds: &[
        ("Split", 1.0),
        ("Digits", 1.0),
        ("Punctuation", 1.0),
        ("Whitespace", 1.0),
        ("WhitespaceSplit", 1.0),
        ("UnicodeScripts", 1.0),
        ("ByteLevel", 4.0),
        ("Metaspace", 8.0),
    ],
};

pub const DECODER: Place = Place {
    name: "decoder",
    list: "decoders",
    kinds: &[
        ("ByteFallback", 1.0),
        ("Fuse", 1.0),
        ("Strip", 1.0),
        ("Metaspace", 1.0),
        ("ByteLevel", 3.0),
    ],
};

/// `len` bytes become `times * len + added` at most.
struct Growth {
    times: f64,
    added: f64,
    parts: usize,
}

impl Place {
    /// Refuses a part that may make a text much longer, or of which that can't be told.
    pub fn check(&self, part: &Value) -> Result<()> {
        let growth = self.growth(part)?;
        for (got, most, what) in [
            (growth.parts as f64, MOST_PARTS as f64, "parts"),
            (growth.times, MOST_TIMES, "bytes for each of a text"),
            (growth.added, MOST_ADDED, "bytes before a text"),
        ] {
            if got > most {
                bail!(
                    "the tokenizer's {} has up to {got} {what}, want at most {most}",
                    self.name
                );
            }
        }
        Ok(())
    }

    fn growth(&self, part: &Value) -> Result<Growth> {
        let text = |key: &str| {
            let text = part[key].as_str();
            text.with_context(|| format!("the tokenizer's {} has no `{key}`", self.name))
        };
        let (times, added) = match text("type")? {
            "Sequence" => return self.growth_of_all(part),
            "Replace" if self.name != PRE_TOKENIZER.name => {
                (self.replace(&part["pattern"], text("content")?)?, 0.0)
            }
            "Prepend" if self.name == NORMALIZER.name => (1.0, text("prepend")?.len() as f64),
            // The crate counts down past the beginning of a token that is all of what is to be cut.
            "Strip" if self.name == DECODER.name && part["stop"] != 0 => bail!(
                "the tokenizer's decoder has a Strip with `stop` {}, want 0",
                part["stop"]
            ),
            kind => match self.kinds.iter().find(|(name, _)| *name == kind) {
                Some((_, times)) => (*times, 0.0),
                None => bail!("the tokenizer's {} has a {kind:?}, which is not implemented: how long it makes a text is not known", self.name),
            },
        };
        Ok(Growth {
            times,
            added,
            parts: 1,
        })
    }

    fn growth_of_all(&self, sequence: &Value) -> Result<Growth> {
        let Some(parts) = sequence[self.list].as_array() else {
            bail!(
                "the tokenizer's {} is a Sequence without `{}`",
                self.name,
                self.list
            );
        };
        let mut all = Growth {
            times: 1.0,
            added: 0.0,
            parts: 1,
        };
        for part in parts {
            let next = self.growth(part)?;
            all.times *= next.times;
            all.added = all.added * next.times + next.added;
            all.parts += next.parts;
        }
        Ok(all)
    }

    fn replace(&self, pattern: &Value, content: &str) -> Result<f64> {
        match pattern["String"].as_str() {
            Some("") => bail!(
                "the tokenizer's {} has a Replace of the pattern \"\", want one that is not empty",
                self.name
            ),
            Some(pattern) => Ok((content.len() as f64 / pattern.len() as f64).max(1.0)),
            // Whatever it matches becomes shorter.
            None if content.is_empty() => Ok(1.0),
            None => bail!("the tokenizer's {} has a Replace of the pattern {pattern} by text, want a String as pattern: a Regex may match nothing", self.name),
        }
    }
}
