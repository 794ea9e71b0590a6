//! What llama.cpp's converter says of a Gemma 4 in the metadata.

use super::write::Meta;
use anyhow::{bail, Result};
use gem::models::gemma4::{Config, LayerConfig, LayerKind};

/// llama.cpp's divisor for a pair that does not turn.
const STANDS_STILL: f32 = 1e30;

/// Everything but the tokenizer. `file_type` is llama.cpp's number for the type of most tensors.
pub fn of_model(config: &Config, name: &str, file_type: u32) -> Result<Vec<(String, Meta)>> {
    let (full, sliding) = kinds(config)?;
    let LayerKind::Sliding { window } = sliding.kind else {
        bail!("no layer of the model slides");
    };
    let layers = &config.layers;
    let is_sliding = |layer: &LayerConfig| layer.kind != LayerKind::Full;
    let kv_heads = layers.iter().map(|l| l.num_key_value_heads as i32);
    let count = |n: usize| Meta::U32(n as u32);
    let text = |s: &str| Meta::Text(s.into());
    let mut metadata: Vec<(String, Meta)> = vec![
        ("general.architecture".into(), text("gemma4")),
        ("general.type".into(), text("model")),
        ("general.name".into(), text(name)),
        ("general.file_type".into(), Meta::U32(file_type)),
        ("general.quantization_version".into(), Meta::U32(2)),
    ];
    for (key, value) in [
        ("block_count", count(layers.len())),
        ("context_length", count(config.max_position_embeddings)),
        ("embedding_length", count(config.hidden_size)),
        ("feed_forward_length", count(config.intermediate_size)),
        ("attention.head_count", count(config.num_attention_heads)),
        ("attention.head_count_kv", Meta::I32s(kv_heads.collect())),
        ("attention.key_length", count(full.head_dim)),
        ("attention.value_length", count(full.head_dim)),
        ("attention.key_length_swa", count(sliding.head_dim)),
        ("attention.value_length_swa", count(sliding.head_dim)),
        ("attention.sliding_window", count(window)),
        (
            "attention.sliding_window_pattern",
            Meta::Bools(layers.iter().map(is_sliding).collect()),
        ),
        ("attention.shared_kv_layers", count(0)),
        (
            "attention.layer_norm_rms_epsilon",
            Meta::F32(config.rms_norm_eps as f32),
        ),
        ("embedding_length_per_layer_input", count(0)),
        ("rope.freq_base", Meta::F32(full.rope.theta as f32)),
        ("rope.freq_base_swa", Meta::F32(sliding.rope.theta as f32)),
        ("rope.dimension_count", count(full.head_dim)),
        ("rope.dimension_count_swa", count(sliding.head_dim)),
        (
            "final_logit_softcapping",
            Meta::F32(config.final_logit_softcapping.unwrap_or(0.0) as f32),
        ),
    ] {
        metadata.push((format!("gemma4.{key}"), value));
    }
    Ok(metadata)
}

/// The divisors of `rope_freqs.weight`.
pub fn rope_freqs(config: &Config) -> Result<Vec<f32>> {
    let (full, _) = kinds(config)?;
    let divisor = |pair| match pair < full.rope.rotated_pairs {
        true => full.rope.factor as f32,
        false => STANDS_STILL,
    };
    Ok((0..full.head_dim / 2).map(divisor).collect())
}

/// The full layers and the sliding ones, of which the format has room for one kind each.
fn kinds(config: &Config) -> Result<(&LayerConfig, &LayerConfig)> {
    let first = |full: bool| {
        let mut layers = config.layers.iter();
        layers.find(|layer| (layer.kind == LayerKind::Full) == full)
    };
    let (Some(full), Some(sliding)) = (first(true), first(false)) else {
        bail!("the model has no full or no sliding layers, want both");
    };
    for (i, layer) in config.layers.iter().enumerate() {
        let like = if layer.kind == LayerKind::Full {
            full
        } else {
            sliding
        };
        if (layer.kind, layer.head_dim, layer.rope) != (like.kind, like.head_dim, like.rope) {
            bail!("layer {i} differs from other {:?} layers in head_dim or rotary embedding, for which the format has no room", like.kind);
        }
    }
    let turns_whole = 2 * sliding.rope.rotated_pairs == sliding.head_dim;
    if !turns_whole || sliding.rope.factor != 1.0 {
        bail!("sliding layers turn {} pairs, divided by {}, want all of them by 1: the format has no room for more", sliding.rope.rotated_pairs, sliding.rope.factor);
    }
    Ok((full, sliding))
}
