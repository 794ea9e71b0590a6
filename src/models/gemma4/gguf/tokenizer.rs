//! The tokenizer of a GGUF file as a `tokenizer.json`.

use super::config::Keys;
use super::header::{shown, Value};
use candle::{bail, Result};
use serde_json::{json, Map};
use std::collections::BTreeMap;

const CONTROL: i128 = 3;
const USER_DEFINED: i128 = 4;
/// How llama.cpp's converter writes a space inside a token of a merge, whose two tokens a space divides.
const SPACE_IN_MERGE: &str = "\u{120}";

pub(super) fn json(keys: Keys, bos: u32) -> Result<String> {
    match keys.text("tokenizer.ggml.model")? {
        Some("gemma4") => {}
        other => bail!("`tokenizer.ggml.model` is {other:?}, want \"gemma4\""),
    }
    let tokens = texts(keys, "tokenizer.ggml.tokens")?;
    let merges = texts(keys, "tokenizer.ggml.merges")?;
    let types = match keys.get("tokenizer.ggml.token_type") {
        Some(Value::Array(types)) if types.len() == tokens.len() => types,
        Some(Value::Array(types)) => bail!(
            "`tokenizer.ggml.token_type` has {} entries, want one for each of the {} tokens",
            types.len(),
            tokens.len()
        ),
        _ => bail!("`tokenizer.ggml.token_type` is missing"),
    };
    let mut ids = BTreeMap::new();
    let (mut vocab, mut added) = (Map::new(), Vec::new());
    for (id, (token, kind)) in tokens.iter().zip(types).enumerate() {
        if let Some(first) = ids.insert(*token, id) {
            bail!("`tokenizer.ggml.tokens` has {token:?} at {first} and at {id}");
        }
        vocab.insert(token.to_string(), json!(id));
        let Value::Integer(kind) = kind else {
            bail!(
                "`tokenizer.ggml.token_type` has {} at {id}, want integers",
                shown(kind)
            );
        };
        if matches!(*kind, CONTROL | USER_DEFINED) {
            // The converter makes control tokens that a chat parser should see user-defined.
            let special = *kind == CONTROL || token.starts_with("<|") || token.ends_with("|>");
            added.push(json!({
                "id": id, "content": token, "special": special,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
            }));
        }
    }
    let mut pairs = Vec::with_capacity(merges.len());
    for (i, merge) in merges.iter().enumerate() {
        let Some((left, right)) = merge.split_once(' ') else {
            bail!(
                "`tokenizer.ggml.merges` has {merge:?} at {i}, want two tokens and a space between"
            );
        };
        let known = |part: &str| match ids.contains_key(part) {
            true => part.to_string(),
            false => part.replace(SPACE_IN_MERGE, " "),
        };
        let (left, right) = (known(left), known(right));
        let whole = format!("{left}{right}");
        for part in [&left, &right, &whole] {
            if !ids.contains_key(part.as_str()) {
                bail!("`tokenizer.ggml.merges` has {merge:?} at {i}, but {part:?} is no token");
            }
        }
        pairs.push(json!([left, right]));
    }
    let text_of = |id: u32, key: &str| match tokens.get(id as usize) {
        Some(token) => Ok(token.to_string()),
        None => bail!("`{key}` is {id}, want a token below {}", tokens.len()),
    };
    let unk_key = "tokenizer.ggml.unknown_token_id";
    let unk = keys.token_id(unk_key)?;
    let unk = unk.map(|id| text_of(id, unk_key)).transpose()?;
    let bos_text = text_of(bos, "tokenizer.ggml.bos_token_id")?;
    // Exactly one BOS is the caller's to ensure; a file's `add_bos_token` is false where old converters wrote it so.
    let first = json!({"SpecialToken": {"id": bos_text, "type_id": 0}});
    let pair = json!([first, {"Sequence": {"id": "A", "type_id": 0}}, first, {"Sequence": {"id": "B", "type_id": 0}}]);
    let tokenizer = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"},
        "pre_tokenizer": null,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [first, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": pair,
            "special_tokens": {bos_text.as_str(): {"id": bos_text, "ids": [bos], "tokens": [bos_text]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": unk, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": pairs,
        },
    });
    Ok(tokenizer.to_string())
}

fn texts<'a>(keys: Keys<'a>, key: &str) -> Result<Vec<&'a str>> {
    let Some(Value::Array(values)) = keys.get(key) else {
        bail!("`{key}` is missing or no array");
    };
    let texts = values.iter().enumerate().map(|(i, value)| match value {
        Value::Text(text) => Ok(text.as_str()),
        other => bail!("`{key}` has {} at {i}, want strings", shown(other)),
    });
    texts.collect()
}
