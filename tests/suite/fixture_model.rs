//! The decoder against transformers, on two small models that share what is special about the 31B: head groups of 8 and 2,
//! K = V layers, layer scalars, both rotary embeddings, a window, soft-capped tied logits.

use crate::common::fixture::FIXTURES;
use crate::common::golden::{golden_tensors, Golden};
use crate::common::model::{fed_in, ids, model, model_with, paths};
use crate::common::numeric::{max_abs_diff, rms_diff};
use candle::{DType, Device, Tensor};
use gem::attention::reference::{self, Visible};
use gem::models::gemma4::{AttentionPath, Model};
use std::collections::HashMap;

/// Largest error of a logit in f32; transformers' own two attentions differ by 9e-5, the smallest mistake moves 2.9e-3.
const TOLERANCE: f64 = 5e-4;

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

/// ml-explore/mlx-swift-lm#231: in a K = V layer V is the raw projection, before the key's norm and rotation.
#[test]
fn values_of_a_shared_projection_ignore_the_key_norm_and_the_position() {
    let golden = Golden::load("tiny-gemma4-d512");
    let name = "tiny-gemma4-d512";
    let scaled = |scale: f64| {
        model_with(name, DType::F32, |name, tensor| match name {
            // Halving q and doubling k leaves every score as it was, if v does not move with k.
            "layers.5.self_attn.k_norm.weight" => tensor * scale,
            "layers.5.self_attn.q_norm.weight" => tensor / scale,
            _ => Ok(tensor),
        })
    };
    let (plain, scaled) = (scaled(1.0), scaled(2.0));
    let tokens = &golden.prompts[2].input_ids;
    for path in paths(&plain) {
        let (a, b) = (
            fed_in(&plain, path, tokens, &[16, 1]),
            fed_in(&scaled, path, tokens, &[16, 1]),
        );
        assert!(max_abs_diff(&a, &b).unwrap() <= 1e-4, "{path}");
    }
}
