//! The metadata of a GGUF file as a [`Config`]; what the graph does not compute is refused by its key.

use super::header::{shown, Header, TensorEntry, Value};
use super::names::ROPE_FREQS;
use crate::models::gemma4::{Config, LayerConfig, LayerKind, RopeConfig};
use candle::{bail, Result};

const MOST_LAYERS: usize = 4096;
/// No dimension of a real model comes near this.
const LARGEST_DIM: usize = 1 << 24;
/// llama.cpp writes 1e30 for a pair that does not turn: at any position the angle is no angle in f32.
const STANDS_STILL: f32 = 1e20;
/// Tokens that end an answer of Gemma 4 whatever the file declares.
const ENDS: [&str; 3] = ["<eos>", "<turn|>", "<|tool_response>"];

/// Values of the metadata by key, with errors that say which.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a>(pub(super) &'a Header);

impl<'a> Keys<'a> {
    pub(super) fn get(self, key: &str) -> Option<&'a Value> {
        self.0.metadata.get(key)
    }

    fn require(self, key: &str) -> Result<&'a Value> {
        match self.get(key) {
            Some(value) => Ok(value),
            None => bail!("`{key}` is missing"),
        }
    }

    pub(super) fn text(self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(other) => bail!("`{key}` is {}, want a string", shown(other)),
        }
    }

    pub(super) fn integer(self, key: &str) -> Result<Option<i128>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Integer(n)) => Ok(Some(*n)),
            Some(other) => bail!("`{key}` is {}, want an integer", shown(other)),
        }
    }

    pub(super) fn token_id(self, key: &str) -> Result<Option<u32>> {
        match self.integer(key)?.map(u32::try_from) {
            None => Ok(None),
            Some(Ok(id)) => Ok(Some(id)),
            Some(Err(_)) => bail!("`{key}` is no token id"),
        }
    }

    fn dim(self, key: &str) -> Result<usize> {
        dim(key, self.require(key)?)
    }

    fn dim_or(self, key: &str, default: usize) -> Result<usize> {
        self.get(key).map_or(Ok(default), |value| dim(key, value))
    }

    /// One number for every layer, from a scalar or from an array of one a layer.
    fn per_layer(self, key: &str, layers: usize) -> Result<Vec<usize>> {
        match self.require(key)? {
            Value::Array(values) if values.len() == layers => {
                let numbers = values.iter().enumerate();
                numbers
                    .map(|(i, value)| dim(&format!("{key}[{i}]"), value))
                    .collect()
            }
            Value::Array(values) => bail!(
                "`{key}` has {} entries, want one for each of the {layers} layers",
                values.len()
            ),
            value => Ok(vec![dim(key, value)?; layers]),
        }
    }

    /// As `per_layer`, the same in all of them.
    fn uniform(self, key: &str, layers: usize) -> Result<usize> {
        let all = self.per_layer(key, layers)?;
        match all.iter().find(|n| **n != all[0]) {
            None => Ok(all[0]),
            Some(other) => bail!(
                "`{key}` is {} and {other} in different layers: want the same in all",
                all[0]
            ),
        }
    }

    fn positive(self, key: &str) -> Result<f64> {
        match self.require(key)? {
            Value::Float(x) if x.is_finite() && *x > 0.0 => Ok(*x),
            other => bail!("`{key}` is {}, want a positive number", shown(other)),
        }
    }

    /// Refuses a feature that is switched on.
    fn want_zero(self, key: &str, what: &str) -> Result<()> {
        let on = match self.get(key) {
            None | Some(Value::Integer(0)) => return Ok(()),
            Some(Value::Array(values)) if values.iter().all(|v| *v == Value::Integer(0)) => {
                return Ok(())
            }
            Some(on) => on,
        };
        bail!("`{key}` is {}: {what} not implemented, want 0", shown(on))
    }
}

fn dim(key: &str, value: &Value) -> Result<usize> {
    match value {
        Value::Integer(n) if (1..=LARGEST_DIM as i128).contains(n) => Ok(*n as usize),
        other => bail!("`{key}` is {}, want 1 to {LARGEST_DIM}", shown(other)),
    }
}

/// `divisors` are the values of `rope_freqs.weight`.
pub(super) fn resolve(header: &Header, divisors: &[f32]) -> Result<Config> {
    let keys = Keys(header);
    match keys.text("general.architecture")? {
        Some("gemma4") => {}
        other => bail!("`general.architecture` is {other:?}, want \"gemma4\""),
    }
    if let Some(parts) = keys.integer("split.count")?.filter(|n| *n > 1) {
        bail!("the file is one of {parts} parts of a model, want one file: `llama-gguf-split --merge FIRST-PART OUT.gguf` joins them");
    }
    let key = |name: &str| format!("gemma4.{name}");
    keys.want_zero(
        &key("attention.shared_kv_layers"),
        "layers that share their KV cache are",
    )?;
    keys.want_zero(
        &key("embedding_length_per_layer_input"),
        "per-layer inputs (E2B, E4B) are",
    )?;
    keys.want_zero(&key("expert_count"), "mixture-of-experts layers are")?;
    match keys.text(&key("rope.scaling.type"))? {
        None | Some("none") => {}
        Some(other) => bail!("`gemma4.rope.scaling.type` is {other:?}, want \"none\""),
    }
    let layers = keys.dim(&key("block_count"))?;
    if layers > MOST_LAYERS {
        bail!("`gemma4.block_count` is {layers}, want 1 to {MOST_LAYERS}");
    }
    let tensor = |name: &str| header.tensors.get(name);
    let Some([vocab_size, _]) = tensor("token_embd.weight").map(|t| t.shape.as_slice()) else {
        bail!("tensor token_embd.weight is missing or no matrix");
    };
    let token_texts = match keys.get("tokenizer.ggml.tokens") {
        Some(Value::Array(tokens)) if tokens.len() != *vocab_size => bail!(
            "`tokenizer.ggml.tokens` has {} entries, token_embd.weight {vocab_size} rows",
            tokens.len()
        ),
        Some(Value::Array(tokens)) => tokens.as_slice(),
        _ => &[],
    };
    let num_attention_heads = keys.uniform(&key("attention.head_count"), layers)?;
    let config = Config {
        vocab_size: *vocab_size,
        hidden_size: keys.dim(&key("embedding_length"))?,
        intermediate_size: keys.uniform(&key("feed_forward_length"), layers)?,
        num_attention_heads,
        // As the f32 that the file holds was written: 1e-6, not the f64 nearest to it.
        rms_norm_eps: decimal(keys.positive(&key("attention.layer_norm_rms_epsilon"))?),
        final_logit_softcapping: match keys.require(&key("final_logit_softcapping"))? {
            Value::Float(0.0) => None,
            _ => Some(keys.positive(&key("final_logit_softcapping"))?),
        },
        max_position_embeddings: keys.dim(&key("context_length"))?,
        tie_word_embeddings: tensor("output.weight").is_none(),
        layers: resolve_layers(keys, layers, num_attention_heads, divisors)?,
        bos_token_id: keys.token_id("tokenizer.ggml.bos_token_id")?.unwrap_or(2),
        eos_token_ids: eos_token_ids(keys, token_texts)?,
    };
    match config.of_real_size() {
        Ok(config) => Ok(config),
        Err(fault) => bail!("{fault}"),
    }
}

/// The f64 whose shortest decimal is that of the f32.
fn decimal(x: f64) -> f64 {
    (x as f32).to_string().parse().unwrap_or(x)
}

fn eos_token_ids(keys: Keys, texts: &[Value]) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    for name in ["eos", "eot", "eom"] {
        ids.extend(keys.token_id(&format!("tokenizer.ggml.{name}_token_id"))?);
    }
    for (id, text) in texts.iter().enumerate() {
        if matches!(text, Value::Text(text) if ENDS.contains(&text.as_str())) {
            ids.push(id as u32);
        }
    }
    if ids.is_empty() {
        ids.push(1);
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
}

fn resolve_layers(
    keys: Keys,
    layers: usize,
    num_attention_heads: usize,
    divisors: &[f32],
) -> Result<Vec<LayerConfig>> {
    let key = |name: &str| format!("gemma4.{name}");
    let sliding = sliding_layers(keys, layers)?;
    let window = keys.dim(&key("attention.sliding_window"))?;
    let kv_heads = keys.per_layer(&key("attention.head_count_kv"), layers)?;
    let full_dim = keys.dim(&key("attention.key_length"))?;
    let sliding_dim = keys.dim_or(&key("attention.key_length_swa"), full_dim)?;
    for (name, want) in [
        ("attention.value_length", full_dim),
        ("attention.value_length_swa", sliding_dim),
        ("rope.dimension_count", full_dim),
        ("rope.dimension_count_swa", sliding_dim),
    ] {
        let got = keys.dim_or(&key(name), want)?;
        if got != want {
            bail!("`gemma4.{name}` is {got}, want {want} as the key length of these layers");
        }
    }
    let full_rope = proportional(keys.positive(&key("rope.freq_base"))?, full_dim, divisors)?;
    let sliding_rope = RopeConfig {
        theta: keys.positive(&key("rope.freq_base_swa"))?,
        rotated_pairs: sliding_dim / 2,
        factor: 1.0,
    };
    let mut resolved = Vec::with_capacity(layers);
    for (i, (&sliding, &num_key_value_heads)) in sliding.iter().zip(&kv_heads).enumerate() {
        if !num_attention_heads.is_multiple_of(num_key_value_heads) {
            bail!("`gemma4.attention.head_count` is {num_attention_heads} and `gemma4.attention.head_count_kv` of layer {i} is {num_key_value_heads}, want a multiple");
        }
        let (kind, head_dim, rope) = match sliding {
            true => (LayerKind::Sliding { window }, sliding_dim, sliding_rope),
            false => (LayerKind::Full, full_dim, full_rope),
        };
        if head_dim % 2 != 0 {
            bail!("the key length of layer {i} is {head_dim}, want an even number");
        }
        let value_is_key = !keys
            .0
            .tensors
            .contains_key(&format!("blk.{i}.attn_v.weight"));
        if value_is_key && sliding {
            bail!("tensor blk.{i}.attn_v.weight is missing: only in full layers may the keys be the values");
        }
        resolved.push(LayerConfig {
            kind,
            head_dim,
            num_key_value_heads,
            value_is_key,
            rope,
        });
    }
    Ok(resolved)
}

/// Which layers slide: one bool a layer, or every how many layers one is full.
fn sliding_layers(keys: Keys, layers: usize) -> Result<Vec<bool>> {
    let key = "gemma4.attention.sliding_window_pattern";
    let pattern: Vec<bool> = match keys.require(key)? {
        Value::Array(values) if values.len() == layers => {
            let bools = values.iter().map(|value| match value {
                Value::Bool(b) => Ok(*b),
                Value::Integer(n @ 0..=1) => Ok(*n == 1),
                other => bail!("`{key}` holds {}, want bools", shown(other)),
            });
            bools.collect::<Result<_>>()?
        }
        Value::Array(values) => bail!(
            "`{key}` has {} entries, want one for each of the {layers} layers",
            values.len()
        ),
        value => {
            let period = dim(key, value)?;
            (1..=layers).map(|i| i % period != 0).collect()
        }
    };
    match pattern.last() {
        Some(false) => Ok(pattern),
        _ => bail!("`{key}` says that the last layer slides, want a full one"),
    }
}

/// The rule that the divisors follow: the first pairs turn, all slowed alike, the others stand still.
fn proportional(theta: f64, head_dim: usize, divisors: &[f32]) -> Result<RopeConfig> {
    if divisors.len() != head_dim / 2 {
        bail!(
            "tensor {ROPE_FREQS} has {} values, want {} for the key length {head_dim}",
            divisors.len(),
            head_dim / 2
        );
    }
    let rotated_pairs = divisors
        .iter()
        .position(|d| *d >= STANDS_STILL)
        .unwrap_or(divisors.len());
    let (turning, still) = divisors.split_at(rotated_pairs);
    let factor = turning.first().copied().unwrap_or(1.0);
    let fault = |d: &f32| !d.is_finite() || *d <= 0.0 || *d != factor;
    if let Some(at) = turning.iter().position(fault) {
        bail!("tensor {ROPE_FREQS} has {} at pair {at}, want {factor} as at pair 0: frequencies that are divided one by one are not implemented", turning[at]);
    }
    // A NaN is no stillness either.
    if let Some(at) = still.iter().position(|d| d.is_nan() || *d < STANDS_STILL) {
        bail!("tensor {ROPE_FREQS} has {} at pair {}, after pair {rotated_pairs} that stands still: want one block of pairs that turn", still[at], rotated_pairs + at);
    }
    Ok(RopeConfig {
        theta,
        rotated_pairs,
        factor: factor.into(),
    })
}

/// What the divisors are read from.
pub(super) fn rope_freqs(header: &Header) -> Result<&TensorEntry> {
    match header.tensors.get(ROPE_FREQS) {
        Some(entry) if entry.type_id == 0 && entry.shape.len() == 1 && entry.shape[0] <= 4096 => {
            Ok(entry)
        }
        Some(entry) => bail!(
            "tensor {ROPE_FREQS} has shape {:?} and type {}, want (key length / 2) F32",
            entry.shape,
            entry.type_id
        ),
        None => bail!("tensor {ROPE_FREQS} is missing: it says which pairs of full layers turn"),
    }
}
