//! Faults that were reported against other implementations of this model.

use crate::common::fixture::{fixture, fixture_weights, save};
use crate::common::message_in;
use crate::common::model::{fed_in, ids, model_with, paths};
use crate::common::numeric::{max_abs_diff, normal};
use candle::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use gem::models::gemma4::{Config, Model, Weights};
use std::collections::HashMap;

const NAME: &str = "tiny-gemma4-d512";

/// vllm-project/vllm#41253: a loader invented a v where there is none.
#[test]
fn a_full_layer_has_no_v_and_a_sliding_layer_must_have_one() {
    let config = Config::from_file(fixture(NAME).join("config.json")).unwrap();
    let shapes = config.tensor_shapes();
    let v_proj = |layer: usize| format!("layers.{layer}.self_attn.v_proj.weight");
    assert!(config.layers[5].value_is_key && !config.layers[0].value_is_key);
    assert!(!shapes.iter().any(|(name, _)| *name == v_proj(5)));
    let checked = |change: &dyn Fn(&mut HashMap<String, Tensor>)| {
        let (dir, mut tensors) = (tempfile::tempdir().unwrap(), fixture_weights(NAME));
        change(&mut tensors);
        save(&tensors, &dir.path().join("model.safetensors"));
        let weights = Weights::open_dir(dir.path()).unwrap();
        let checked = weights.check(&shapes);
        checked.map_err(|e| message_in(dir.path(), e))
    };
    let named = |layer| format!("model.language_model.{}", v_proj(layer));
    checked(&|_| ()).unwrap();
    let error = checked(&|tensors| drop(tensors.remove(&named(0)))).unwrap_err();
    assert_eq!(
        error,
        format!(
            "weights: {}: missing from [dir]/model.safetensors",
            named(0)
        )
    );
    let copied = |tensors: &mut HashMap<String, Tensor>| {
        let k = named(5).replace("v_proj", "k_proj");
        tensors.insert(named(5), tensors[&k].clone());
    };
    let error = checked(&copied).unwrap_err();
    assert_eq!(
        error,
        format!(
            "weights: {} in [dir]/model.safetensors: not a tensor of this model",
            named(5)
        )
    );
}

/// Two full layers and no other, small weights.
fn full_layers_alone() -> Model {
    let text = std::fs::read_to_string(fixture(NAME).join("config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
    let fields = config["text_config"].as_object_mut().unwrap();
    fields.insert("num_hidden_layers".into(), 2.into());
    fields.insert("layer_types".into(), vec!["full_attention"; 2].into());
    let config = Config::from_json(&config.to_string()).unwrap();
    let weights = config.tensor_shapes().into_iter().enumerate();
    let weights = weights.map(|(i, (name, shape))| {
        let values = normal(i as u64, shape, DType::F32).unwrap();
        (name, (values * 0.1).unwrap())
    });
    let weights: HashMap<_, _> = weights.collect();
    Model::new(
        &config,
        VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu),
    )
    .unwrap()
}

/// ml-explore/mlx-swift-lm#231: values that were taken from keys after their rotation turn with the position. Of one token
/// again and again, the values are all alike, and so is every average of them.
#[test]
fn values_of_a_shared_projection_are_the_same_at_every_position() {
    let model = full_layers_alone();
    for path in paths(&model) {
        let mut cache = model.new_cache(path).unwrap();
        let first = model.forward(&ids(&[9]), &mut cache).unwrap();
        model.prefill(&ids(&[9; 999]), 200, &mut cache).unwrap();
        let last = model.forward(&ids(&[9]), &mut cache).unwrap();
        let error = max_abs_diff(&first, &last).unwrap();
        assert!(error <= 1e-4, "{path}: off by {error:e}");
        // Another token before it is seen.
        let mut other = model.new_cache(path).unwrap();
        let differs = model.forward(&ids(&[5, 9]), &mut other).unwrap();
        assert!(max_abs_diff(&first, &differs).unwrap() > 1e-2, "{path}");
    }
}

/// The same report: as many tokens as KV heads, so that swapped dimensions fit.
#[test]
fn as_many_tokens_as_kv_heads_are_not_taken_for_heads() {
    let model = full_layers_alone();
    assert_eq!(model.config().layers[0].num_key_value_heads, 2);
    let tokens: Vec<u32> = (10..26).collect();
    for path in paths(&model) {
        let pairs = fed_in(&model, path, &tokens, &[2; 8]);
        let single = fed_in(&model, path, &tokens, &[1; 16]);
        let error = max_abs_diff(&pairs, &single).unwrap();
        assert!(error <= 1e-4, "{path}: off by {error:e}");
    }
}

/// The same report: without their norm, the values of one head would outweigh those of the others.
#[test]
fn values_of_a_shared_projection_are_normed_head_by_head() {
    let larger_first_head = |name: &str, tensor: Tensor| match name {
        "layers.5.self_attn.k_proj.weight" => {
            let first = (tensor.narrow(0, 0, 512)? * 8.0)?;
            Tensor::cat(&[&first, &tensor.narrow(0, 512, 512)?], 0)
        }
        _ => Ok(tensor),
    };
    let plain = model_with(NAME, DType::F32, |_, tensor| Ok(tensor));
    let scaled = model_with(NAME, DType::F32, larger_first_head);
    let tokens: Vec<u32> = (10..30).collect();
    for path in paths(&plain) {
        let (a, b) = (
            fed_in(&plain, path, &tokens, &[20]),
            fed_in(&scaled, path, &tokens, &[20]),
        );
        let error = max_abs_diff(&a, &b).unwrap();
        assert!(error <= 1e-3, "{path}: off by {error:e}");
    }
}
