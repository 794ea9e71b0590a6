//! Models of the fixtures, and ways to feed them.

use super::fixture::{fixture, fixture_weights};
use candle::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use gem::models::gemma4::{AttentionPath, Config, Model};
use std::collections::HashMap;

/// The configuration of a fixture.
pub fn config(name: &str) -> Config {
    Config::from_file(fixture(name).join("config.json")).unwrap()
}

pub fn model(name: &str, dtype: DType) -> Model {
    model_with(name, dtype, |_, tensor| Ok(tensor))
}

/// The fixture's model with weights that `change` has gone over, by name without prefix.
pub fn model_with(
    name: &str,
    dtype: DType,
    change: impl Fn(&str, Tensor) -> Result<Tensor>,
) -> Model {
    Model::new(
        &config(name),
        VarBuilder::from_tensors(text_weights(name, change), dtype, &Device::Cpu),
    )
    .unwrap()
}

/// The fixture's weights by name without prefix, in f32: every one is exact in it, and there is room for what `change` does.
pub fn text_weights(
    name: &str,
    change: impl Fn(&str, Tensor) -> Result<Tensor>,
) -> HashMap<String, Tensor> {
    let changed = |(name, tensor): (String, Tensor)| {
        let text = name
            .strip_prefix("model.language_model.")
            .or(name.strip_prefix("model."))
            .unwrap();
        (
            text.to_string(),
            change(text, tensor.to_dtype(DType::F32).unwrap()).unwrap(),
        )
    };
    fixture_weights(name).into_iter().map(changed).collect()
}

/// The paths that the model can run on: a 64-wide head has no fused op, a CPU no `sdpa`.
pub fn paths(model: &Model) -> Vec<AttentionPath> {
    AttentionPath::available(model.config(), model.dtype(), model.device())
}

pub fn ids(tokens: &[u32]) -> Tensor {
    Tensor::new(tokens, &Device::Cpu)
        .unwrap()
        .unsqueeze(0)
        .unwrap()
}

/// Logits `(tokens, vocab)` of every position, fed in chunks of these sizes.
pub fn fed_in(model: &Model, path: AttentionPath, tokens: &[u32], chunks: &[usize]) -> Tensor {
    let mut cache = model.new_cache(path).unwrap();
    let mut rest = tokens;
    let mut logits = vec![];
    for &size in chunks {
        let (chunk, after) = rest.split_at(size);
        logits.push(
            model
                .forward_all(&ids(chunk), &mut cache)
                .unwrap()
                .squeeze(0)
                .unwrap(),
        );
        rest = after;
    }
    assert!(rest.is_empty());
    assert_eq!(cache.len(), tokens.len());
    Tensor::cat(&logits, 0).unwrap()
}
