//! The decoder against transformers, on two small models that share what is special about the 31B: head groups of 8 and 2,
//! K = V layers, layer scalars, both rotary embeddings, a window, soft-capped tied logits.

use crate::common::fixture::{fixture, fixture_weights, FIXTURES};
use crate::common::golden::{golden_tensors, Golden};
use crate::common::message;
use crate::common::numeric::{max_abs_diff, rms_diff};
use candle::{DType, Device, Result, Tensor};
use candle_nn::VarBuilder;
use gem::attention::reference::{self, Visible};
use gem::models::gemma4::{AttentionPath, Cache, Config, Model};
use std::collections::HashMap;

/// Largest error of a logit in f32; transformers' own two attentions differ by 9e-5, the smallest mistake moves 2.9e-3.
const TOLERANCE: f64 = 5e-4;

fn model(name: &str, dtype: DType) -> Model {
    let config = Config::from_file(fixture(name).join("config.json")).unwrap();
    let text = |name: String| match name.strip_prefix("model.language_model.") {
        Some(rest) => rest.to_string(),
        None => name.strip_prefix("model.").unwrap().to_string(),
    };
    let weights: HashMap<_, _> = fixture_weights(name)
        .into_iter()
        .map(|(name, t)| (text(name), t))
        .collect();
    Model::new(
        &config,
        VarBuilder::from_tensors(weights, dtype, &Device::Cpu),
    )
    .unwrap()
}

/// The paths that the model can run on: a 64-wide head has no fused op.
fn paths(model: &Model) -> Vec<AttentionPath> {
    AttentionPath::ALL
        .into_iter()
        .filter(|path| path.check(model.config()).is_ok())
        .collect()
}

fn ids(tokens: &[u32]) -> Tensor {
    Tensor::new(tokens, &Device::Cpu)
        .unwrap()
        .unsqueeze(0)
        .unwrap()
}

/// Logits `(tokens, vocab)` of every position, fed in chunks of these sizes.
fn fed_in(model: &Model, path: AttentionPath, tokens: &[u32], chunks: &[usize]) -> Tensor {
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

fn greedy(model: &Model, path: AttentionPath, prompt: &[u32], steps: usize) -> Vec<u32> {
    let mut cache = model.new_cache(path).unwrap();
    let mut logits = model.forward(&ids(prompt), &mut cache).unwrap();
    let mut tokens = vec![];
    for _ in 0..steps {
        let token = logits
            .squeeze(0)
            .unwrap()
            .argmax(0)
            .unwrap()
            .to_scalar::<u32>()
            .unwrap();
        tokens.push(token);
        logits = model.forward(&ids(&[token]), &mut cache).unwrap();
    }
    tokens
}

#[test]
fn f32_logits_and_greedy_tokens_are_those_of_transformers() {
    for name in FIXTURES {
        let (model, golden, tensors) = (
            model(name, DType::F32),
            Golden::load(name),
            golden_tensors(name),
        );
        for path in paths(&model) {
            for prompt in &golden.prompts {
                let logits = fed_in(&model, path, &prompt.input_ids, &[prompt.length]);
                let last = Tensor::new(prompt.last_logits.as_slice(), &Device::Cpu).unwrap();
                let error = max_abs_diff(&logits.get(prompt.length - 1).unwrap(), &last).unwrap();
                assert!(
                    error <= TOLERANCE,
                    "{name} {path}, {} tokens: last logits off by {error:e}",
                    prompt.length
                );
                if let Some(all) = tensors.get(&format!("logits/{}", prompt.length)) {
                    let error = max_abs_diff(&logits, all).unwrap();
                    assert!(
                        error <= TOLERANCE,
                        "{name} {path}, {} tokens: logits off by {error:e}",
                        prompt.length
                    );
                }
                for digest in &prompt.positions {
                    let row: Vec<f32> = logits.get(digest.pos).unwrap().to_vec1().unwrap();
                    let l2 = row.iter().map(|&x| (x as f64).powi(2)).sum::<f64>().sqrt();
                    assert!(
                        (l2 - digest.l2).abs() <= 1e-2,
                        "{name} {path}: l2 {l2}, want {}",
                        digest.l2
                    );
                    for &(id, logit) in &digest.top5 {
                        let error = (row[id as usize] - logit).abs() as f64;
                        assert!(
                            error <= TOLERANCE,
                            "{name} {path}, position {}: off by {error:e}",
                            digest.pos
                        );
                    }
                }
                let tokens = greedy(&model, path, &prompt.input_ids, prompt.greedy.tokens.len());
                assert_eq!(
                    tokens, prompt.greedy.tokens,
                    "{name} {path}, {} tokens",
                    prompt.length
                );
            }
        }
    }
}

#[test]
fn every_way_of_feeding_a_prompt_gives_the_same_logits() {
    let splits: HashMap<usize, Vec<Vec<usize>>> = HashMap::from([
        (1, vec![vec![1]]),
        (5, vec![vec![1; 5], vec![2, 3]]),
        (17, vec![vec![1; 17], vec![16, 1], vec![9, 8]]),
        (
            40,
            vec![
                vec![1; 40],
                vec![5, 35],
                vec![16, 24],
                vec![17, 23],
                vec![20, 1, 19],
                vec![39, 1],
                vec![10; 4],
            ],
        ),
        (
            300,
            vec![
                vec![1; 300],
                vec![299, 1],
                [vec![64; 4], vec![44]].concat(),
                vec![15, 1, 16, 17, 200, 51],
                [vec![7; 42], vec![6]].concat(),
            ],
        ),
    ]);
    for name in FIXTURES {
        let (model, golden) = (model(name, DType::F32), Golden::load(name));
        for path in paths(&model) {
            for prompt in &golden.prompts {
                let whole = fed_in(&model, path, &prompt.input_ids, &[prompt.length]);
                for chunks in &splits[&prompt.length] {
                    let logits = fed_in(&model, path, &prompt.input_ids, chunks);
                    let error = max_abs_diff(&logits, &whole).unwrap();
                    assert!(
                        error <= TOLERANCE,
                        "{name} {path}, {chunks:?}: off by {error:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn prefill_in_chunks_is_one_forward_pass() {
    let (model, golden) = (
        model("tiny-gemma4-d512", DType::F32),
        Golden::load("tiny-gemma4-d512"),
    );
    let prompt = &golden.prompts[4];
    let want = Tensor::new(prompt.last_logits.as_slice(), &Device::Cpu).unwrap();
    for chunk in [1, 7, 256, 300, 1024] {
        let mut cache = model.new_cache(AttentionPath::Fused).unwrap();
        let logits = model
            .prefill(&ids(&prompt.input_ids), chunk, &mut cache)
            .unwrap()
            .squeeze(0)
            .unwrap();
        assert!(
            max_abs_diff(&logits, &want).unwrap() <= TOLERANCE,
            "chunks of {chunk}"
        );
        assert_eq!(cache.len(), 300);
    }
}

#[test]
fn every_layer_gives_the_hidden_states_of_transformers() {
    for name in FIXTURES {
        let (model, tensors) = (model(name, DType::F32), golden_tensors(name));
        for prompt in Golden::load(name)
            .prompts
            .iter()
            .filter(|p| p.length != 300)
        {
            let want = &tensors[&format!("hidden/{}", prompt.length)];
            let mut cache = model.new_cache(AttentionPath::Reference).unwrap();
            let states = model
                .hidden_states(&ids(&prompt.input_ids), &mut cache)
                .unwrap();
            assert_eq!(states.len(), want.dim(0).unwrap());
            for (i, state) in states.iter().enumerate() {
                let error =
                    max_abs_diff(&state.squeeze(0).unwrap(), &want.get(i).unwrap()).unwrap();
                assert!(
                    error <= 5e-4,
                    "{name}, {} tokens, state {i}: off by {error:e}",
                    prompt.length
                );
            }
        }
        for prompt in &Golden::load(name).prompts {
            let mut cache = model.new_cache(AttentionPath::Reference).unwrap();
            let states = model
                .hidden_states(&ids(&prompt.input_ids), &mut cache)
                .unwrap();
            for digest in &prompt.hidden {
                let layers = std::iter::once(&digest.embed)
                    .chain(&digest.layers)
                    .chain([&digest.final_norm]);
                for (i, (state, want)) in states.iter().zip(layers).enumerate() {
                    let row: Vec<f32> = state
                        .get(0)
                        .unwrap()
                        .get(digest.pos)
                        .unwrap()
                        .to_vec1()
                        .unwrap();
                    for (got, want) in row.iter().zip(&want.first8) {
                        let error = (*got as f64 - want).abs();
                        assert!(
                            error <= 5e-4,
                            "{name}, position {}, state {i}: off by {error:e}",
                            digest.pos
                        );
                    }
                }
            }
        }
    }
}

/// Half-precision weights are exact here, so the error is that of the arithmetic; transformers' own bf16 run is off by an
/// rms of 0.28 and 0.14.
#[test]
fn half_precision_logits_stay_near_those_of_f32() {
    for name in FIXTURES {
        for (dtype, rms_bound, max_bound) in [(DType::BF16, 0.6, 4.0), (DType::F16, 0.06, 0.5)] {
            let (model, tensors) = (model(name, dtype), golden_tensors(name));
            for path in paths(&model) {
                for prompt in Golden::load(name).prompts.iter() {
                    let logits = fed_in(&model, path, &prompt.input_ids, &[prompt.length]);
                    let stepped = fed_in(&model, path, &prompt.input_ids, &vec![1; prompt.length]);
                    assert_eq!(logits.dtype(), DType::F32);
                    for logits in [logits, stepped] {
                        let (got, want) = match tensors.get(&format!("logits/{}", prompt.length)) {
                            Some(all) => (logits, all.clone()),
                            None => {
                                let last = Tensor::new(prompt.last_logits.as_slice(), &Device::Cpu)
                                    .unwrap();
                                (logits.get(prompt.length - 1).unwrap(), last)
                            }
                        };
                        let (rms, max) = (
                            rms_diff(&got, &want).unwrap(),
                            max_abs_diff(&got, &want).unwrap(),
                        );
                        assert!(
                            rms <= rms_bound && max <= max_bound,
                            "{name} {dtype:?} {path}, {} tokens: rms {rms:.3}, max {max:.3}",
                            prompt.length
                        );
                    }
                }
            }
        }
    }
}

/// Queries at positions 0, 8, 15 and 16 of 17 tokens, scale 1.0, head groups of 2 (sliding) and 8 (full).
#[test]
fn attention_itself_is_that_of_transformers() {
    for name in FIXTURES {
        let tensors = golden_tensors(name);
        for (layer, window) in [(0, Some(16)), (5, None)] {
            let tensor = |part: &str| tensors[&format!("attn/17/layer{layer}/{part}")].clone();
            let (q, out) = (tensor("q").unsqueeze(0).unwrap(), tensor("out"));
            let (k, v) = (
                tensor("k").unsqueeze(0).unwrap(),
                tensor("v").unsqueeze(0).unwrap(),
            );
            for (row, position) in [0, 8, 15, 16].into_iter().enumerate() {
                let q = q.narrow(2, row, 1).unwrap();
                let want = out.get(row).unwrap();
                let visible = Visible::Causal {
                    first_query: position,
                    first_key: 0,
                    window,
                };
                let got = reference::attention(&q, &k, &v, 1.0, visible).unwrap();
                let got = got.squeeze(0).unwrap().squeeze(1).unwrap();
                let error = max_abs_diff(&got, &want).unwrap();
                assert!(
                    error <= 1e-5,
                    "{name} layer {layer}, position {position}: off by {error:e}"
                );
                if q.dim(3).unwrap() == 512 {
                    let seen = |t: &Tensor| t.narrow(2, 0, position + 1).unwrap();
                    let got = gem::attention_d512(&q, &seen(&k), &seen(&v), 1.0).unwrap();
                    let error =
                        max_abs_diff(&got.squeeze(0).unwrap().squeeze(1).unwrap(), &want).unwrap();
                    assert!(
                        error <= 1e-5,
                        "{name} fused, position {position}: off by {error:e}"
                    );
                }
            }
        }
    }
}

#[test]
fn the_rows_of_a_batch_are_their_own_sequences() {
    let (model, golden) = (
        model("tiny-gemma4-d512", DType::F32),
        Golden::load("tiny-gemma4-d512"),
    );
    let (a, b) = (
        &golden.prompts[3].input_ids,
        &golden.prompts[4].input_ids[..40],
    );
    for path in paths(&model) {
        let alone = [
            fed_in(&model, path, a, &[30, 1, 9]),
            fed_in(&model, path, b, &[30, 1, 9]),
        ];
        let mut cache = model.new_cache(path).unwrap();
        let both = Tensor::cat(&[ids(a), ids(b)], 0).unwrap();
        let mut parts = vec![];
        for (start, len) in [(0, 30), (30, 1), (31, 9)] {
            parts.push(
                model
                    .forward_all(&both.narrow(1, start, len).unwrap(), &mut cache)
                    .unwrap(),
            );
        }
        let both = Tensor::cat(&parts, 1).unwrap();
        for (row, alone) in alone.iter().enumerate() {
            let error = max_abs_diff(&both.get(row).unwrap(), alone).unwrap();
            assert!(error <= TOLERANCE, "{path}, row {row}: off by {error:e}");
        }
    }
}

#[test]
fn a_path_without_an_op_for_the_model_is_refused_with_the_reason() {
    let model = model("tiny-gemma4-d64", DType::F32);
    insta::assert_snapshot!(message(model.new_cache(AttentionPath::Fused).unwrap_err()), @"gemma4: the fused path has ops for head_dim 512, full-attention layer 5 has 64; want the reference path");
}

#[test]
fn bad_input_is_refused_before_the_cache_changes() {
    let model = model("tiny-gemma4-d512", DType::F32);
    let mut cache = model
        .new_cache(AttentionPath::Fused)
        .unwrap()
        .with_max_context(20)
        .unwrap();
    let good = ids(&[2, 5, 7]);
    let before = model.forward(&good, &mut cache).unwrap();
    let bad = [
        ids(&[5, 256]),
        ids(&[0; 18]),
        ids(&[]),
        ids(&[5]).squeeze(0).unwrap(),
        ids(&[5]).to_dtype(DType::I64).unwrap(),
    ];
    let errors: Vec<_> = bad
        .iter()
        .map(|input| message(model.forward(input, &mut cache).unwrap_err()))
        .collect();
    insta::assert_snapshot!(errors.join("\n"), @r"
    gemma4: token 1 of input_ids is 256, want an id below the vocabulary of 256
    gemma4: context full: 3 tokens held and 18 more given, want at most 20 in all
    gemma4: input_ids is (1, 0), want at least one token
    gemma4: input_ids is [1] U32, want (batch, tokens) U32
    gemma4: input_ids is [1, 1] I64, want (batch, tokens) U32
    ");
    assert_eq!(cache.len(), 3);
    cache.truncate(0).unwrap();
    let after = model.forward(&good, &mut cache).unwrap();
    assert_eq!(max_abs_diff(&before, &after).unwrap(), 0.0);
    // Exactly full is allowed, one more is not.
    model.forward(&ids(&[9; 17]), &mut cache).unwrap();
    assert!(model.forward(&ids(&[9]), &mut cache).is_err());
    assert_eq!(cache.len(), 20);
    let limits = [0, 1025].map(|limit| {
        message(
            model
                .new_cache(AttentionPath::Fused)
                .unwrap()
                .with_max_context(limit)
                .unwrap_err(),
        )
    });
    insta::assert_snapshot!(limits.join("\n"), @r"
    gemma4: max context is 0, want 1 to 1024
    gemma4: max context is 1025, want 1 to 1024
    ");
}

/// Blaizzy/mlx-vlm#1748: a new turn that reuses a prefix.
#[test]
fn a_reused_prefix_continues_as_a_cold_run_or_is_refused() {
    let (model, golden) = (
        model("tiny-gemma4-d512", DType::F32),
        Golden::load("tiny-gemma4-d512"),
    );
    let tokens = &golden.prompts[3].input_ids;
    for path in paths(&model) {
        let cold = |tokens: &[u32]| fed_in(&model, path, tokens, &[tokens.len()]);
        let mut cache = model.new_cache(path).unwrap();
        model.forward(&ids(&tokens[..14]), &mut cache).unwrap();
        cache.truncate(9).unwrap();
        let warm = model
            .forward_all(&ids(&tokens[20..40]), &mut cache)
            .unwrap()
            .squeeze(0)
            .unwrap();
        let prompt = [&tokens[..9], &tokens[20..40]].concat();
        let want = cold(&prompt).narrow(0, 9, 20).unwrap();
        assert!(max_abs_diff(&warm, &want).unwrap() <= TOLERANCE, "{path}");
        // The window of 16 has now been overwritten.
        assert!(!cache.can_truncate(9));
        let error = message(cache.truncate(9).unwrap_err());
        assert!(
            error.starts_with("gemma4: can't go back to 9 of 29 tokens"),
            "{error}"
        );
        assert_eq!(cache.len(), 29);
        // A cleared cache is a new one, bit for bit.
        cache.clear();
        let again = model
            .forward_all(&ids(tokens), &mut cache)
            .unwrap()
            .squeeze(0)
            .unwrap();
        assert_eq!(max_abs_diff(&again, &cold(tokens)).unwrap(), 0.0, "{path}");
    }
}

#[test]
fn a_forked_cache_goes_its_own_way() {
    let (model, golden) = (
        model("tiny-gemma4-d512", DType::F32),
        Golden::load("tiny-gemma4-d512"),
    );
    let tokens = &golden.prompts[3].input_ids;
    for path in paths(&model) {
        let mut cache = model.new_cache(path).unwrap();
        model.forward(&ids(&tokens[..20]), &mut cache).unwrap();
        let mut fork: Cache = cache.fork().unwrap();
        model.forward(&ids(&[9; 11]), &mut fork).unwrap();
        let on = model
            .forward_all(&ids(&tokens[20..]), &mut cache)
            .unwrap()
            .squeeze(0)
            .unwrap();
        let want = fed_in(&model, path, tokens, &[20, 20])
            .narrow(0, 20, 20)
            .unwrap();
        assert_eq!(max_abs_diff(&on, &want).unwrap(), 0.0, "{path}");
    }
}

/// ml-explore/mlx-swift-lm#231: in a K = V layer V is the raw projection, before the key's norm and rotation.
#[test]
fn values_of_a_shared_projection_ignore_the_key_norm_and_the_position() {
    let golden = Golden::load("tiny-gemma4-d512");
    let tensors = golden_tensors("tiny-gemma4-d512");
    // Every value row has a mean square of 1, which a value taken after the norm or the rotation by k_norm has not.
    let v = &tensors["attn/17/layer5/v"];
    let mean_square = v
        .sqr()
        .unwrap()
        .mean(2)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1::<f32>()
        .unwrap();
    assert!(mean_square.iter().all(|m| (m - 1.0).abs() < 1e-3));
    let name = "tiny-gemma4-d512";
    let config = Config::from_file(fixture(name).join("config.json")).unwrap();
    let weights = |scale: f64| -> Result<Model> {
        let mut weights = HashMap::new();
        for (name, tensor) in fixture_weights(name) {
            let name = name
                .strip_prefix("model.language_model.")
                .unwrap()
                .to_string();
            let tensor = match name.as_str() {
                // Halving q and doubling k leaves every score as it was, if v does not move with k.
                "layers.5.self_attn.k_norm.weight" => (tensor * scale)?,
                "layers.5.self_attn.q_norm.weight" => (tensor / scale)?,
                _ => tensor,
            };
            weights.insert(name, tensor);
        }
        Model::new(
            &config,
            VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu),
        )
    };
    let (plain, scaled) = (weights(1.0).unwrap(), weights(2.0).unwrap());
    let tokens = &golden.prompts[2].input_ids;
    for path in AttentionPath::ALL {
        let (a, b) = (
            fed_in(&plain, path, tokens, &[16, 1]),
            fed_in(&scaled, path, tokens, &[16, 1]),
        );
        assert!(max_abs_diff(&a, &b).unwrap() <= 1e-4, "{path}");
    }
}
