//! Text to ids, where control tokens count only in what a template writes.

use anyhow::{anyhow, Result};
use gem::models::gemma4::with_one_bos;
use std::collections::HashMap;
use tokenizers::Tokenizer;

/// A part of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Written by the template: control tokens in it count.
    Template(String),
    /// Written by a person or the model: control tokens in it are plain text.
    Content(String),
}

/// A tokenizer that takes all it is given for plain text, and its control tokens.
pub struct Encoder {
    tokenizer: Tokenizer,
    /// By first character, longest first.
    controls: HashMap<char, Vec<(String, u32)>>,
}

impl Encoder {
    pub fn new(mut tokenizer: Tokenizer) -> Self {
        tokenizer.set_encode_special_tokens(true);
        let mut controls: HashMap<char, Vec<(String, u32)>> = HashMap::new();
        for (id, token) in tokenizer.get_added_tokens_decoder() {
            if let (true, Some(first)) = (token.special, token.content.chars().next()) {
                controls.entry(first).or_default().push((token.content, id));
            }
        }
        for tokens in controls.values_mut() {
            tokens.sort_by_key(|(text, _)| std::cmp::Reverse(text.len()));
        }
        Self {
            tokenizer,
            controls,
        }
    }

    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The id of a control token.
    pub fn id(&self, control: &str) -> Option<u32> {
        let tokens = self.controls.get(&control.chars().next()?)?;
        let found = tokens.iter().find(|(text, _)| text == control);
        found.map(|(_, id)| *id)
    }

    /// The text of a token.
    pub fn name(&self, id: u32) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }

    /// The first control token in `text`.
    pub fn first_control(&self, text: &str) -> Option<u32> {
        self.next_control(text).map(|(_, _, id)| id)
    }

    /// The ids of `pieces` with exactly one `bos` at the front. Text that no control token divides is one text to the
    /// tokenizer, whoever wrote it.
    pub fn encode(&self, pieces: &[Piece], bos: u32) -> Result<Vec<u32>> {
        let mut ids = Vec::new();
        let mut plain = String::new();
        for piece in pieces {
            match piece {
                Piece::Content(text) => plain += text,
                Piece::Template(text) => {
                    let mut rest = text.as_str();
                    while let Some((start, end, id)) = self.next_control(rest) {
                        plain += &rest[..start];
                        self.encode_plain(&plain, &mut ids)?;
                        plain.clear();
                        ids.push(id);
                        rest = &rest[end..];
                    }
                    plain += rest;
                }
            }
        }
        self.encode_plain(&plain, &mut ids)?;
        Ok(with_one_bos(&ids, bos))
    }

    fn encode_plain(&self, text: &str, ids: &mut Vec<u32>) -> Result<()> {
        if !text.is_empty() {
            let encoding = self
                .tokenizer
                .encode_fast(text, false)
                .map_err(|e| anyhow!("the prompt: {e}"))?;
            ids.extend_from_slice(encoding.get_ids());
        }
        Ok(())
    }

    /// Where the first control token of `text` starts and ends, and its id.
    fn next_control(&self, text: &str) -> Option<(usize, usize, u32)> {
        text.char_indices().find_map(|(at, first)| {
            let tokens = self.controls.get(&first)?;
            let (token, id) = tokens
                .iter()
                .find(|(token, _)| text[at..].starts_with(token.as_str()))?;
            Some((at, at + token.len(), *id))
        })
    }
}
