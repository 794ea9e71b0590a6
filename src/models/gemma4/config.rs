//! What a Gemma 4 text decoder is made of, resolved: every layer states its own numbers.

use super::{dialect, file};
use candle::{bail, Result};

/// No real model comes near these. Without a bound, bytes summed over layers and tokens would pass 64 bits.
const WIDEST: usize = 1 << 20;
const MOST_TOKENS: usize = 1 << 24;

/// Far from these a number is damage: in f32, in which it is used, it would vanish or swallow what it is added to.
const EPS: (f64, f64) = (1e-12, 0.1);
const CAP: (f64, f64) = (1e-2, 1e6);
const THETA: (f64, f64) = (1.0, 1e12);
const FACTOR: (f64, f64) = (1e-3, 1e6);

/// What a layer may look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerKind {
    /// The last `window` tokens, the current one included.
    Sliding {
        /// In tokens.
        window: usize,
    },
    /// Every token so far.
    Full,
}

/// Rotary embedding of one layer kind: which pairs turn, and how fast.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// The first so many of the `head_dim / 2` pairs turn, the others keep their values.
    pub rotated_pairs: usize,
    /// Divides every frequency.
    pub factor: f64,
}

/// One decoder layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerConfig {
    /// What it may look at.
    pub kind: LayerKind,
    /// Width of a query, key or value head.
    pub head_dim: usize,
    /// KV heads; each serves `num_attention_heads / num_key_value_heads` query heads.
    pub num_key_value_heads: usize,
    /// The layer has no `v_proj`: the values are the raw output of `k_proj`.
    pub value_is_key: bool,
    /// Rotary embedding of queries and keys.
    pub rope: RopeConfig,
}

/// A Gemma 4 text decoder that [`Model`](super::Model) implements exactly.
///
/// A configuration that asks for anything else (per-layer inputs, shared KV layers, experts, biases) is refused by name.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Tokens; the rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP.
    pub intermediate_size: usize,
    /// Query heads, the same in every layer.
    pub num_attention_heads: usize,
    /// Added to the mean square in every norm.
    pub rms_norm_eps: f64,
    /// Logits become `cap * tanh(logits / cap)`.
    pub final_logit_softcapping: Option<f64>,
    /// Longest context that the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// The head is the embedding; else the checkpoint has its own `lm_head`.
    pub tie_word_embeddings: bool,
    /// The layers from the first to the last, which is a full one.
    pub layers: Vec<LayerConfig>,
    /// The token that every prompt begins with.
    pub bos_token_id: u32,
    /// Every id that the file declares as an end of sequence; see [`StopTokens`](super::StopTokens).
    pub eos_token_ids: Vec<u32>,
}

impl Config {
    /// Reads a `config.json`.
    pub fn from_file(path: impl AsRef<std::path::Path>) -> Result<Self> {
        let path = path.as_ref();
        if let Some(fault) = file::fault(path, file::LARGEST_CONFIG) {
            bail!("gemma4 config: {}: {fault}", path.display());
        }
        match std::fs::read_to_string(path) {
            Ok(text) => Self::from_json(&text).map_err(|e| e.context(path.display().to_string())),
            Err(e) => bail!("gemma4 config: {}: {e}", path.display()),
        }
    }

    /// Parses the text of a `config.json`.
    ///
    /// # Errors
    ///
    /// Names the key, the value and what is wanted, for a malformed value as for a variant that is not implemented.
    pub fn from_json(text: &str) -> Result<Self> {
        dialect::parse(text)
    }

    /// Itself, or what in it is of no real model; each number of a file has been bounded before.
    pub(super) fn of_real_size(self) -> std::result::Result<Self, String> {
        let head_dim = self.layers.iter().map(|layer| layer.head_dim).max();
        let (heads, head_dim) = (self.num_attention_heads, head_dim.unwrap_or(0));
        for (what, size, most) in [
            ("vocab_size", self.vocab_size, MOST_TOKENS),
            ("hidden_size", self.hidden_size, WIDEST),
            ("intermediate_size", self.intermediate_size, WIDEST),
            ("num_attention_heads * head_dim", heads * head_dim, WIDEST),
        ] {
            if size > most {
                return Err(format!("{what} is {size}, want at most {most}"));
            }
        }
        let ropes = self.layers.iter().flat_map(|layer| {
            let RopeConfig { theta, factor, .. } = layer.rope;
            [
                ("the base of rotary frequencies", theta, THETA),
                ("the factor of rotary frequencies", factor, FACTOR),
            ]
        });
        let cap = self.final_logit_softcapping;
        let cap = cap.map(|cap| ("final_logit_softcapping", cap, CAP));
        let eps = [("rms_norm_eps", self.rms_norm_eps, EPS)];
        for (what, got, (least, most)) in ropes.chain(cap).chain(eps) {
            if !(least..=most).contains(&got) {
                return Err(format!("{what} is {got:?}, want {least:?} to {most:?}"));
            }
        }
        let eos = self.eos_token_ids.iter();
        let ids = eos.map(|id| ("eos_token_id", *id));
        for (what, id) in ids.chain([("bos_token_id", self.bos_token_id)]) {
            self.check_id(what, id)?;
        }
        Ok(self)
    }

    pub(super) fn check_id(&self, what: &str, id: u32) -> std::result::Result<(), String> {
        match (id as usize) < self.vocab_size {
            true => Ok(()),
            false => Err(format!(
                "{what} is {id}, want one below the vocabulary of {}",
                self.vocab_size
            )),
        }
    }

    /// The shape of every weight of the model, by name as after the checkpoint's text prefix.
    pub fn tensor_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let (hidden, inter) = (self.hidden_size, self.intermediate_size);
        let mut shapes = vec![
            (
                "embed_tokens.weight".to_string(),
                vec![self.vocab_size, hidden],
            ),
            ("norm.weight".to_string(), vec![hidden]),
        ];
        if !self.tie_word_embeddings {
            shapes.push(("lm_head.weight".to_string(), vec![self.vocab_size, hidden]));
        }
        for (i, layer) in self.layers.iter().enumerate() {
            let d = layer.head_dim;
            let (q_rows, kv_rows) = (self.num_attention_heads * d, layer.num_key_value_heads * d);
            let mut put =
                |name: &str, shape: Vec<usize>| shapes.push((format!("layers.{i}.{name}"), shape));
            put("self_attn.q_proj.weight", vec![q_rows, hidden]);
            put("self_attn.k_proj.weight", vec![kv_rows, hidden]);
            if !layer.value_is_key {
                put("self_attn.v_proj.weight", vec![kv_rows, hidden]);
            }
            put("self_attn.o_proj.weight", vec![hidden, q_rows]);
            put("self_attn.q_norm.weight", vec![d]);
            put("self_attn.k_norm.weight", vec![d]);
            put("mlp.gate_proj.weight", vec![inter, hidden]);
            put("mlp.up_proj.weight", vec![inter, hidden]);
            put("mlp.down_proj.weight", vec![hidden, inter]);
            for norm in [
                "input",
                "post_attention",
                "pre_feedforward",
                "post_feedforward",
            ] {
                put(&format!("{norm}_layernorm.weight"), vec![hidden]);
            }
            put("layer_scalar", vec![1]);
        }
        shapes
    }
}
