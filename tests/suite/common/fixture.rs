//! The two small models whose weights follow a recipe; `tests/fixtures/generate.py` is its other half.

use super::golden::Golden;
use candle::{Device, Result, Tensor};
use half::bf16;
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Names of the fixtures: a flat text-only export, and the layout of the published 31B.
pub const FIXTURES: [&str; 2] = ["tiny-gemma4-d64", "tiny-gemma4-d512"];

/// The folder of a fixture: config and goldens, but no weights.
pub fn fixture(name: &str) -> PathBuf {
    super::repository().join("tests/fixtures").join(name)
}

/// The fixture's weights in bf16 on the CPU, under the names of its checkpoint.
pub fn fixture_weights(name: &str) -> HashMap<String, Tensor> {
    let config = std::fs::read(fixture(name).join("config.json")).unwrap();
    let config: Value = serde_json::from_slice(&config).unwrap();
    let (config, prefix) = match config.get("text_config") {
        Some(text) => (text, "model.language_model."),
        None => (&config, "model."),
    };
    let seed = Golden::load(name).seed_text;
    weight_specs(config)
        .into_iter()
        .map(|spec| {
            let tensor = spec.generate(&seed).unwrap();
            (format!("{prefix}{}", spec.name), tensor)
        })
        .collect()
}

/// Writes the fixture as a checkpoint, config included, into a folder that lives as long as the result.
pub fn fixture_checkpoint(name: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    save(
        &fixture_weights(name),
        &dir.path().join("model.safetensors"),
    );
    let config = fixture(name).join("config.json");
    std::fs::copy(config, dir.path().join("config.json")).unwrap();
    dir
}

/// Writes a safetensors file, byte for byte as Python's `save_file` does for transformers.
pub fn save(tensors: &HashMap<String, Tensor>, path: &Path) {
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    safetensors::serialize_to_file(tensors, Some(metadata), path).unwrap();
}

struct WeightSpec {
    name: String,
    shape: Vec<usize>,
    mean: f64,
    std: f64,
}

impl WeightSpec {
    fn generate(&self, seed: &str) -> Result<Tensor> {
        let key = fnv1a64(&format!("{seed}/{}", self.name));
        let step = self.std * 1.732_050_807_568_877_2;
        let values: Vec<bf16> = (1..=self.shape.iter().product::<usize>() as u64)
            .map(|i| {
                let word = splitmix64(key.wrapping_add(i.wrapping_mul(0x9E37_79B9_7F4A_7C15)));
                let lanes: u64 = (0..4).map(|lane| (word >> (16 * lane)) & 0xFFFF).sum();
                let value = self.mean + step * (lanes as f64 / 65536.0 - 2.0);
                bf16::from_f32(value as f32)
            })
            .collect();
        Tensor::from_vec(values, self.shape.as_slice(), &Device::Cpu)
    }
}

fn weight_specs(config: &Value) -> Vec<WeightSpec> {
    let number = |key: &str| config[key].as_u64().unwrap() as usize;
    let (hidden, inter) = (number("hidden_size"), number("intermediate_size"));
    let heads = number("num_attention_heads");
    let root = |n: usize| (n as f64).powf(-0.5);
    let mut specs = Vec::new();
    let mut put = |name: String, shape: &[usize], std: f64, mean: f64| {
        let shape = shape.to_vec();
        specs.push(WeightSpec {
            name,
            shape,
            mean,
            std,
        })
    };
    let embedding = [number("vocab_size"), hidden];
    put("embed_tokens.weight".into(), &embedding, root(hidden), 0.0);
    let layers = config["layer_types"].as_array().unwrap();
    for (i, kind) in layers.iter().enumerate() {
        let full = kind == "full_attention";
        let (dim, kv) = match full {
            true => (
                number("global_head_dim"),
                number("num_global_key_value_heads"),
            ),
            false => (number("head_dim"), number("num_key_value_heads")),
        };
        let mut put = |name: &str, shape: &[usize], std: f64, mean: f64| {
            put(format!("layers.{i}.{name}"), shape, std, mean)
        };
        let kv_shape = [kv * dim, hidden];
        let q_shape = [heads * dim, hidden];
        let o_shape = [hidden, heads * dim];
        put("self_attn.q_proj.weight", &q_shape, root(hidden), 0.0);
        put("self_attn.k_proj.weight", &kv_shape, root(hidden), 0.0);
        if !full {
            put("self_attn.v_proj.weight", &kv_shape, root(hidden), 0.0);
        }
        put("self_attn.o_proj.weight", &o_shape, root(heads * dim), 0.0);
        put("self_attn.q_norm.weight", &[dim], 0.2, 1.0);
        let k_norm = (0.4 * root(dim), 2.0 * root(dim));
        put("self_attn.k_norm.weight", &[dim], k_norm.0, k_norm.1);
        put("mlp.gate_proj.weight", &[inter, hidden], root(hidden), 0.0);
        put("mlp.up_proj.weight", &[inter, hidden], root(hidden), 0.0);
        put("mlp.down_proj.weight", &[hidden, inter], root(inter), 0.0);
        put("input_layernorm.weight", &[hidden], 0.25, 1.0);
        put("post_attention_layernorm.weight", &[hidden], 0.1, 0.35);
        put("pre_feedforward_layernorm.weight", &[hidden], 0.25, 1.0);
        put("post_feedforward_layernorm.weight", &[hidden], 0.1, 0.35);
        put("layer_scalar", &[1], 0.12, 0.9);
    }
    put("norm.weight".into(), &[hidden], 8.0, 0.0);
    specs
}

fn fnv1a64(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01B3)
    })
}

fn splitmix64(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}
