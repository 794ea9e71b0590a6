//! The golden outputs of a fixture, as transformers computed them (CPU, f32, eager attention).

use super::fixture::fixture;
use candle::{Device, Tensor};
use serde::Deserialize;
use std::collections::HashMap;

#[derive(Deserialize)]
pub struct Golden {
    pub seed_text: String,
    /// Of the checkpoint that the goldens were made with.
    pub model_sha256: String,
    pub prompts: Vec<GoldenPrompt>,
}

#[derive(Deserialize)]
pub struct GoldenPrompt {
    pub length: usize,
    pub input_ids: Vec<u32>,
    /// All logits of the last position.
    pub last_logits: Vec<f32>,
    pub positions: Vec<LogitDigest>,
    /// At the first, the middle and the last position.
    pub hidden: Vec<HiddenDigest>,
    pub greedy: Greedy,
}

#[derive(Deserialize)]
pub struct LogitDigest {
    pub pos: usize,
    /// Token and logit, best first.
    pub top5: Vec<(u32, f32)>,
    pub l2: f64,
    pub sum: f64,
}

#[derive(Deserialize)]
pub struct HiddenDigest {
    pub pos: usize,
    pub embed: Digest,
    /// The stream after each layer, its scalar applied.
    pub layers: Vec<Digest>,
    pub final_norm: Digest,
}

#[derive(Deserialize)]
pub struct Digest {
    pub l2: f64,
    pub sum: f64,
    pub first8: Vec<f64>,
}

#[derive(Deserialize)]
pub struct Greedy {
    pub tokens: Vec<u32>,
    pub top_logit: Vec<f32>,
    /// Logit of the best token less that of the second best.
    pub margin: Vec<f32>,
}

impl Golden {
    pub fn load(name: &str) -> Self {
        let text = std::fs::read(fixture(name).join("golden.json")).unwrap();
        serde_json::from_slice(&text).unwrap()
    }
}

/// The f32 tensors of `golden.safetensors`. For N = 1, 5, 17, 40 tokens: `logits/N` (N, vocabulary) and `hidden/N`
/// (layers + 2, N, hidden: embedding, layers, final norm). For layers 0 and 5 of the 17 tokens, under
/// `attn/17/layer0/` and `attn/17/layer5/`: `k` and `v` (KV heads, 17, head dim), ready for attention; `q` (query
/// heads, 4, head dim) and `out` (4, query heads, head dim) at the positions 0, 8, 15 and 16.
pub fn golden_tensors(name: &str) -> HashMap<String, Tensor> {
    candle::safetensors::load(fixture(name).join("golden.safetensors"), &Device::Cpu).unwrap()
}
