//! A checkpoint's tokenizer, which must make the same tokens of a text every time, and of all of it.

#[path = "growth.rs"]
mod growth;

use crate::guard::guarded;
use anyhow::{anyhow, bail, Result};
use serde::de::{Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashSet;
use std::fmt;
use tokenizers::{Encoding, Model as _, ModelWrapper, Token, Tokenizer};

/// A `tokenizer.json` by its keys, each of which may be there once. A key that is not known might mean other tokens.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File<Part, Added, Vocab, Merges> {
    #[serde(rename = "version")]
    _version: Option<Part>,
    truncation: Option<Part>,
    padding: Option<Part>,
    added_tokens: Option<Added>,
    normalizer: Option<Part>,
    pre_tokenizer: Option<Part>,
    #[serde(rename = "post_processor")]
    _post_processor: Option<Part>,
    decoder: Option<Part>,
    model: Bpe<Part, Vocab, Merges>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Bpe<Part, Vocab, Merges> {
    #[serde(rename = "type")]
    kind: Option<Part>,
    dropout: Option<Part>,
    #[serde(rename = "unk_token")]
    _unk_token: Option<Part>,
    #[serde(rename = "continuing_subword_prefix")]
    _continuing_subword_prefix: Option<Part>,
    #[serde(rename = "end_of_word_suffix")]
    _end_of_word_suffix: Option<Part>,
    #[serde(rename = "fuse_unk")]
    _fuse_unk: Option<Part>,
    #[serde(rename = "byte_fallback")]
    _byte_fallback: Option<Part>,
    #[serde(rename = "ignore_merges")]
    _ignore_merges: Option<Part>,
    #[serde(rename = "vocab")]
    _vocab: Option<Vocab>,
    #[serde(rename = "merges")]
    _merges: Option<Merges>,
}

/// The tokenizers crate holds a hundred bytes and more for a value of two. Gemma's file has 262,144 tokens, 514,906 merges of
/// three values each and some thousand added tokens of eight.
type Bounded = File<Count<4096>, Count<{ 1 << 18 }>, Count<{ 1 << 19 }>, Count<{ 3 << 20 }>>;
type Told = File<Value, Vec<Added>, IgnoredAny, IgnoredAny>;

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
}

/// Reads the bytes of a `tokenizer.json`.
///
/// # Errors
///
/// What the tokenizers crate refuses or panics at; a model other than Gemma's BPE; truncation, padding or dropout, which would
/// change a prompt without a word, as would an added token that is not at its id, or a character that no token stands for; parts
/// that may make a text much longer; keys that are there twice.
pub fn read_tokenizer(json: &[u8]) -> Result<Tokenizer> {
    // Errors may show what they are about, be it as long as the file.
    read(json).map_err(|e| anyhow!("{}", shown(&format!("{e:#}"))))
}

fn read(json: &[u8]) -> Result<Tokenizer> {
    serde_json::from_slice::<Bounded>(json)?;
    let told = serde_json::from_slice::<Told>(json)?;
    check_told(&told)?;
    let tokenizer = guarded(|| Tokenizer::from_bytes(json).map_err(|e| anyhow!("{e}")))?;
    check_tokens(&tokenizer, &told.added_tokens.unwrap_or_default())?;
    Ok(tokenizer)
}

fn check_told(told: &Told) -> Result<()> {
    match &told.model.kind {
        Some(kind) if kind == "BPE" => {}
        Some(kind) => bail!("the tokenizer's model is of type {kind}, want \"BPE\""),
        None => bail!("the tokenizer's model has no `type`, want \"BPE\""),
    }
    for (key, part) in [("truncation", &told.truncation), ("padding", &told.padding)] {
        if part.is_some() {
            bail!("the tokenizer has `{key}`, want null");
        }
    }
    match &told.model.dropout {
        Some(dropout) if dropout.as_f64() != Some(0.0) => bail!("the tokenizer's model has `dropout` {dropout}, want null: the same text would get other tokens each time"),
        _ => {}
    }
    for (place, part) in [
        (growth::NORMALIZER, &told.normalizer),
        (growth::PRE_TOKENIZER, &told.pre_tokenizer),
        (growth::DECODER, &told.decoder),
    ] {
        if let Some(part) = part {
            place.check(part)?;
        }
    }
    Ok(())
}

/// A text as an error shows it: short, whatever the file holds.
pub fn shown(text: &str) -> String {
    match text.char_indices().nth(300) {
        None => text.to_string(),
        Some((at, _)) => format!("{}...", &text[..at]),
    }
}

/// That tokens have the ids of the file, and that each text has tokens.
fn check_tokens(tokenizer: &Tokenizer, added: &[Added]) -> Result<()> {
    for Added { id, content } in added {
        let got = tokenizer.token_to_id(content);
        if got != Some(*id) {
            bail!("the tokenizer's added token {content:?} is to be {id}, but the model makes it {got:?}");
        }
    }
    let mut taken = HashSet::new();
    for (token, id) in tokenizer.get_vocab(true) {
        if !taken.insert(id) {
            bail!("the tokenizer has two tokens of id {id}, one of them {token:?}");
        }
    }
    let ModelWrapper::BPE(model) = tokenizer.get_model() else {
        bail!("the tokenizer's model is of another type, want BPE");
    };
    let known = |token: &str| model.token_to_id(token).is_some();
    match &model.unk_token {
        Some(unknown) if !known(unknown) => {
            bail!("the tokenizer's `unk_token` is {unknown:?}, want a token")
        }
        Some(_) => {}
        None if model.byte_fallback && (0..=255).all(|byte| known(&format!("<0x{byte:02X}>"))) => {}
        None => bail!("the tokenizer has no `unk_token` and not a token for every byte: other characters would be left out"),
    }
    let one = Encoding::from_tokens(vec![Token::new(0, "a".into(), (0, 1))], 0);
    let made = guarded(|| {
        let made = tokenizer.post_process(one, None, false);
        made.map_err(|e| anyhow!("the tokenizer's post_processor: {e}"))
    })?;
    match made.get_ids() {
        [0] => Ok(()),
        ids => bail!(
            "the tokenizer's post_processor makes {} tokens of one, want only special ones added",
            ids.len()
        ),
    }
}

/// Any JSON of at most so many values, in which no key is there twice.
struct Count<const MOST: usize>(usize);

impl<const MOST: usize> Count<MOST> {
    fn add<E: Error>(&mut self, more: usize) -> Result<(), E> {
        self.0 += more;
        match self.0 > MOST {
            true => Err(E::custom(format!(
                "more than {MOST} values in one part of a tokenizer"
            ))),
            false => Ok(()),
        }
    }
}

impl<'de, const MOST: usize> Deserialize<'de> for Count<MOST> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Count(0))
    }
}

impl<'de, const MOST: usize> Visitor<'de> for Count<MOST> {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E: Error>(self, _: bool) -> Result<Self, E> {
        Ok(Self(1))
    }

    fn visit_i64<E: Error>(self, _: i64) -> Result<Self, E> {
        Ok(Self(1))
    }

    fn visit_u64<E: Error>(self, _: u64) -> Result<Self, E> {
        Ok(Self(1))
    }

    fn visit_f64<E: Error>(self, _: f64) -> Result<Self, E> {
        Ok(Self(1))
    }

    fn visit_str<E: Error>(self, _: &str) -> Result<Self, E> {
        Ok(Self(1))
    }

    fn visit_unit<E: Error>(self) -> Result<Self, E> {
        Ok(Self(1))
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut values: A) -> Result<Self, A::Error> {
        while let Some(Self(inner)) = values.next_element()? {
            self.add(inner)?;
        }
        self.add(1)?;
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut values: A) -> Result<Self, A::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = values.next_key::<String>()? {
            let Self(inner) = values.next_value()?;
            self.add(inner)?;
            if let Some(twin) = keys.replace(key) {
                return Err(A::Error::custom(format!("{twin:?} is there twice")));
            }
        }
        self.add(1)?;
        Ok(self)
    }
}
