//! The tokenizer of a checkpoint in the metadata.

use super::write::Meta;
use anyhow::{bail, Context, Result};
use gem::models::gemma4::{Config, StopTokens};
use serde_json::{json, Value};
use std::collections::BTreeMap;

const NORMAL: i32 = 1;
const UNKNOWN: i32 = 2;
const CONTROL: i32 = 3;
const USER_DEFINED: i32 = 4;
const UNUSED: i32 = 5;
const BYTE: i32 = 6;
/// The converter makes these user-defined, so that a chat parser sees them in the text.
const VISIBLE: [&str; 7] = [
    "<|channel>",
    "<channel|>",
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<tool_response|>",
    "<|\"|>",
];

/// Metadata by key.
pub type Entries = Vec<(String, Meta)>;

/// From the text of a `tokenizer.json`; refuses what the format can't say, and gives a note on what it leaves out. `stop` is all
/// that ends an answer.
pub fn of_tokenizer(
    text: &str,
    config: &Config,
    stop: &StopTokens,
) -> Result<(Entries, Vec<String>)> {
    let json: Value = serde_json::from_str(text)?;
    let model = &json["model"];
    for (key, want) in [
        ("/model/type", json!("BPE")),
        ("/model/byte_fallback", json!(true)),
        (
            "/normalizer",
            json!({"type": "Replace", "pattern": {"String": " "}, "content": "\u{2581}"}),
        ),
    ] {
        let got = json.pointer(key).unwrap_or(&Value::Null);
        if *got != want {
            bail!("{key} is {got}, want {want} as in the tokenizer of Gemma 4");
        }
    }
    let mut notes = Vec::new();
    let split = &json["pre_tokenizer"];
    // After the normalizer there is no space to split at.
    if !split.is_null() && split["pattern"] != json!({"String": " "}) {
        notes.push("GGUF has no room for the pre_tokenizer: merges apply across its splits".into());
    }
    let vocab = model["vocab"]
        .as_object()
        .context("model.vocab is missing")?;
    let mut tokens: Vec<Option<&str>> = vec![None; config.vocab_size];
    let mut ids = BTreeMap::new();
    let added = json["added_tokens"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    let listed = added
        .iter()
        .map(|token| (token["content"].as_str(), &token["id"]));
    for (token, id) in vocab
        .iter()
        .map(|(token, id)| (Some(token.as_str()), id))
        .chain(listed)
    {
        let (Some(token), Some(id)) = (token, id.as_u64()) else {
            bail!("a token has no text or no id");
        };
        match tokens.get_mut(id as usize) {
            None => bail!(
                "token {token:?} has the id {id}, want one below the vocabulary of {}",
                config.vocab_size
            ),
            Some(Some(other)) if *other != token => {
                bail!("{other:?} and {token:?} both have the id {id}")
            }
            Some(place) => *place = Some(token),
        }
        ids.insert(token, id as u32);
    }
    let mut types = vec![NORMAL; tokens.len()];
    let mut texts = Vec::with_capacity(tokens.len());
    for (id, token) in tokens.iter().enumerate() {
        let Some(token) = token else {
            types[id] = UNUSED;
            texts.push(format!("[PAD{id}]"));
            continue;
        };
        if token.len() == 6 && token.starts_with("<0x") && token.ends_with('>') {
            types[id] = BYTE;
        }
        texts.push(token.to_string());
    }
    for token in added {
        let (Some(text), Some(id)) = (token["content"].as_str(), token["id"].as_u64()) else {
            continue;
        };
        types[id as usize] = match token["special"] == json!(true) && !VISIBLE.contains(&text) {
            true => CONTROL,
            false => USER_DEFINED,
        };
    }
    let unk = model["unk_token"]
        .as_str()
        .and_then(|text| ids.get(text).copied());
    // As control tokens the others; `<unk>` is one of the added tokens too.
    if let Some(unk) = unk.filter(|id| types[*id as usize] == NORMAL) {
        types[unk as usize] = UNKNOWN;
    }
    let merges = merges(model)?;
    let mut metadata = vec![
        ("model", Meta::Text("gemma4".into())),
        ("tokens", Meta::Texts(texts)),
        ("scores", Meta::F32s(vec![-1000.0; tokens.len()])),
        ("token_type", Meta::I32s(types)),
        ("merges", Meta::Texts(merges)),
        ("bos_token_id", Meta::U32(config.bos_token_id)),
    ];
    let token = |name| ids.get(name).copied();
    let (eos, eot) = (
        token("<eos>").or(stop.ids().first().copied()),
        token("<turn|>"),
    );
    // Readers of the format know the last of these three by its name.
    let known = [eos, eot, token("<|tool_response>")];
    let mut more = stop.ids().iter().filter(|id| !known.contains(&Some(**id)));
    let others = [
        ("eos_token_id", eos),
        ("eot_token_id", eot),
        ("eom_token_id", more.next().copied()),
        ("unknown_token_id", unk),
        ("padding_token_id", token("<pad>")),
        ("mask_token_id", token("<mask>")),
    ];
    let others = others
        .into_iter()
        .filter_map(|(key, id)| Some((key, Meta::U32(id?))));
    metadata.extend(others);
    metadata.push(("add_bos_token", Meta::Bool(true)));
    metadata.push(("add_space_prefix", Meta::Bool(false)));
    notes.extend(more.map(|id| format!("GGUF has no room for the stop token {id}")));
    let named = |(key, value)| (format!("tokenizer.ggml.{key}"), value);
    Ok((metadata.into_iter().map(named).collect(), notes))
}

fn merges(model: &Value) -> Result<Vec<String>> {
    let merges = model["merges"]
        .as_array()
        .context("model.merges is missing")?;
    let texts = merges.iter().map(|merge| match merge {
        Value::String(text) => Ok(text.clone()),
        Value::Array(pair) => match pair.as_slice() {
            // A space divides the two, so one inside is written as another character.
            [Value::String(a), Value::String(b)] => Ok(format!(
                "{} {}",
                a.replace(' ', "\u{120}"),
                b.replace(' ', "\u{120}")
            )),
            _ => bail!("model.merges holds {merge}, want pairs of tokens"),
        },
        other => bail!("model.merges holds {other}, want pairs of tokens"),
    });
    texts.collect()
}
