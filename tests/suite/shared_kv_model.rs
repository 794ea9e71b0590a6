//! The decoder on a cache of values alone.

use crate::common::golden::{golden_tensors, Golden};
use crate::common::model::{config, fed_in, ids, model, text_weights};
use crate::common::numeric::{max_abs_diff, rms_diff};
use crate::common::{message, trained_model};
use candle::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use gem::attention::RotaryTables;
use gem::models::gemma4::{
    AttentionPath, Cache, Config, LayerCache, LayerKind, Model, Rope, Weights,
};

const D512: &str = "tiny-gemma4-d512";

fn trained(dtype: DType) -> Model {
    let config = Config::from_file(trained_model().join("config.json")).unwrap();
    let weights = Weights::open_dir(trained_model()).unwrap();
    Model::new(&config, weights.var_builder(dtype, &Device::Cpu)).unwrap()
}

/// `v = rms(x)` and `k = rotate(w * v)` take the same steps in the same order, whether `k` is stored or not.
#[test]
fn f32_logits_have_the_bits_of_the_fused_path() {
    let golden = Golden::load(D512);
    let fixture = model(D512, DType::F32);
    for prompt in &golden.prompts {
        let n = prompt.length;
        for chunks in [vec![n], vec![1; n], vec![n.div_ceil(2), n / 2]] {
            let chunks: Vec<_> = chunks.into_iter().filter(|&c| c > 0).collect();
            let logits = [AttentionPath::Fused, AttentionPath::FusedSharedKv]
                .map(|path| fed_in(&fixture, path, &prompt.input_ids, &chunks));
            let difference = max_abs_diff(&logits[0], &logits[1]).unwrap();
            assert_eq!(difference, 0.0, "{n} tokens in {chunks:?}");
        }
    }
    let trained = trained(DType::F32);
    let tokens: Vec<u32> = (0..700).map(|i| 300 + i * 37 % 3000).collect();
    for chunks in [vec![700], vec![512, 188], vec![699, 1]] {
        let logits = [AttentionPath::Fused, AttentionPath::FusedSharedKv]
            .map(|path| fed_in(&trained, path, &tokens, &chunks));
        assert_eq!(
            max_abs_diff(&logits[0], &logits[1]).unwrap(),
            0.0,
            "{chunks:?}"
        );
    }
}

/// A key is rounded once on both paths: as a key, or as the value that it is rebuilt from.
#[test]
fn half_precision_logits_are_as_near_to_f32_as_on_the_fused_path() {
    let tensors = golden_tensors(D512);
    for dtype in [DType::BF16, DType::F16] {
        let model = model(D512, dtype);
        let mut squares = [0.0; 2];
        for prompt in Golden::load(D512)
            .prompts
            .iter()
            .filter(|p| p.length != 300)
        {
            let want = &tensors[&format!("logits/{}", prompt.length)];
            for (i, path) in [AttentionPath::Fused, AttentionPath::FusedSharedKv]
                .into_iter()
                .enumerate()
            {
                let logits = fed_in(&model, path, &prompt.input_ids, &[prompt.length]);
                let rms = rms_diff(&logits, want).unwrap();
                squares[i] += rms * rms * prompt.length as f64;
            }
        }
        let [stored, rebuilt] = squares.map(f64::sqrt);
        println!("{dtype:?}: rms of the fused path {stored:.4}, of fused-kv {rebuilt:.4}");
        assert!(
            rebuilt <= 1.25 * stored,
            "{dtype:?}: {rebuilt}, fused {stored}"
        );
    }
}

#[test]
fn full_layers_take_exactly_half_of_the_bytes_and_sliding_layers_the_same() {
    for dtype in [DType::F32, DType::BF16] {
        let model = model(D512, dtype);
        let held = |path, reserve: Option<usize>, tokens: usize| {
            let mut cache = model.new_cache(path).unwrap();
            reserve.into_iter().for_each(|n| cache.reserve(n));
            model.forward(&ids(&vec![5; tokens]), &mut cache).unwrap();
            (cache.bytes(), cache.table_bytes())
        };
        for (reserve, tokens) in [(None, 1), (None, 300), (None, 700), (Some(900), 3)] {
            let (fused, none) = held(AttentionPath::Fused, reserve, tokens);
            let (shared, tables) = held(AttentionPath::FusedSharedKv, reserve, tokens);
            assert_eq!(fused.0, shared.0);
            assert_eq!(fused.1, 2 * shared.1);
            assert_eq!(none, 0);
            let context = reserve.unwrap_or(tokens);
            let planned = |path| Cache::planned_bytes(model.config(), path, context, dtype);
            assert_eq!(planned(AttentionPath::Fused), fused);
            assert_eq!(planned(AttentionPath::FusedSharedKv), shared);
            let planned = |path| Cache::planned_table_bytes(model.config(), path, context);
            assert_eq!(planned(AttentionPath::FusedSharedKv), tables);
            assert_eq!(planned(AttentionPath::Fused), 0);
        }
    }
}

/// 10 full layers of 4 KV heads in bf16: 21.5 GB become 10.7, and the angles of 64 pairs are 1.25 % of that.
#[test]
fn a_31b_plans_half_of_its_full_caches_at_262144_tokens() {
    let mut config = config(D512);
    config.max_position_embeddings = 262_144;
    let full = config
        .layers
        .iter()
        .position(|l| l.kind == LayerKind::Full)
        .unwrap();
    let mut layer = config.layers[full].clone();
    layer.num_key_value_heads = 4;
    config.layers = vec![layer; 10];
    let planned = |path| Cache::planned_bytes(&config, path, 262_144, DType::BF16).1;
    assert_eq!(planned(AttentionPath::Fused), 21_474_836_480);
    assert_eq!(planned(AttentionPath::FusedSharedKv), 10_737_418_240);
    let tables = Cache::planned_table_bytes(&config, AttentionPath::FusedSharedKv, 262_144);
    assert_eq!(tables, 134_217_728);
}

/// Reusing a prefix, forks and chunked prompts are tested for every path; this is what only tables can get wrong.
#[test]
fn tables_reach_to_the_context_limit_and_follow_every_way_back() {
    let model = model(D512, DType::F32);
    let tokens = &Golden::load(D512).prompts[4].input_ids;
    let path = AttentionPath::FusedSharedKv;
    let want = fed_in(&model, AttentionPath::Fused, tokens, &[300]);
    let mut cache = model
        .new_cache(path)
        .unwrap()
        .with_max_context(300)
        .unwrap();
    model.forward(&ids(&tokens[..10]), &mut cache).unwrap();
    let mut fork = cache.fork().unwrap();
    cache.truncate(7).unwrap();
    for (cache, from) in [(&mut cache, 7), (&mut fork, 10)] {
        model.prefill(&ids(&tokens[from..200]), 64, cache).unwrap();
        let rest = model.forward_all(&ids(&tokens[200..]), cache).unwrap();
        let difference = max_abs_diff(
            &rest.squeeze(0).unwrap(),
            &want.narrow(0, 200, 100).unwrap(),
        );
        assert!(difference.unwrap() <= 5e-4);
        assert_eq!(cache.len(), 300);
        let frequencies = Rope::new(&model.config().layers[5].rope, 512);
        let row = RotaryTables::row_bytes(frequencies.inv_freq());
        assert_eq!(cache.table_bytes(), 300 * row, "no row past the limit");
        assert!(model.forward(&ids(&[5]), cache).is_err());
    }
    cache.clear();
    assert_eq!(cache.table_bytes(), 0);
    let again = model
        .forward_all(&ids(tokens), &mut cache)
        .unwrap()
        .squeeze(0)
        .unwrap();
    assert_eq!(max_abs_diff(&again, &want).unwrap(), 0.0);
}

/// The fixture with a value projection in its full layers.
fn with_v_proj() -> Model {
    let mut config = config(D512);
    let mut weights = text_weights(D512, |_, tensor| Ok(tensor));
    for (i, layer) in config.layers.iter_mut().enumerate() {
        if layer.value_is_key {
            layer.value_is_key = false;
            let name = |part: &str| format!("layers.{i}.self_attn.{part}_proj.weight");
            let v = (weights[&name("k")].clone() * 0.5).unwrap();
            weights.insert(name("v"), v);
        }
    }
    Model::new(
        &config,
        VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu),
    )
    .unwrap()
}

#[test]
fn a_model_whose_keys_do_not_follow_from_its_values_is_refused() {
    let path = AttentionPath::FusedSharedKv;
    let apart = with_v_proj();
    insta::assert_snapshot!(message(apart.new_cache(path).unwrap_err()), @"gemma4: the fused-kv path rebuilds keys from values, full-attention layer 5 projects its values apart; want the fused path");
    let narrow = model("tiny-gemma4-d64", DType::F32);
    insta::assert_snapshot!(message(narrow.new_cache(path).unwrap_err()), @"gemma4: the fused-kv path has ops for head_dim 512, full-attention layer 5 has 64; want the reference path");
    // The layers look alike to a cache, so it brings its path along.
    let mut cache = model(D512, DType::F32).new_cache(path).unwrap();
    insta::assert_snapshot!(message(apart.forward(&ids(&[2]), &mut cache).unwrap_err()), @"gemma4: the fused-kv path rebuilds keys from values, full-attention layer 5 projects its values apart; want the fused path");
    assert!(cache.is_empty());
}

#[test]
fn keys_do_not_fit_into_a_cache_of_values_and_it_keeps_its_kind() {
    let row = Tensor::ones((1, 1, 1, 4), DType::F32, &Device::Cpu).unwrap();
    let wide = Tensor::ones((1, 2, 1, 4), DType::F32, &Device::Cpu).unwrap();
    let mut values = LayerCache::values_only();
    let mut both = LayerCache::new(LayerKind::Full);
    let refused = |cache: &mut LayerCache| {
        let texts = [
            cache.append(&row, &row).map(|_| ()),
            cache.append_values(&row).map(|_| ()),
        ];
        texts
            .into_iter()
            .filter_map(|t| t.err())
            .map(message)
            .collect::<Vec<_>>()
            .join("\n")
    };
    insta::assert_snapshot!(refused(&mut values), @"kv cache: it holds values alone, got keys too");
    insta::assert_snapshot!(refused(&mut both), @"kv cache: it holds keys and values, got values alone");
    insta::assert_snapshot!(message(values.append_values(&wide).unwrap_err()), @"kv cache: v is [1, 2, 1, 4] F32, want (1, 1, tokens, 4) F32 as what is held");
    assert_eq!((values.len(), both.len()), (1, 1));
    assert_eq!(both.bytes(), 2 * values.bytes());
    let mut fork = values.fork().unwrap();
    assert_eq!(fork.append_values(&row).unwrap().dims(), [1, 1, 2, 4]);
    values.clear();
    assert!(values.holds_values_only() && values.is_empty());
    assert_eq!(values.append_values(&row).unwrap().dims(), [1, 1, 1, 4]);
}
