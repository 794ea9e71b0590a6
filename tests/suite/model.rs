//! What the decoder promises beyond its numbers: paths, batches, caches that are reused, input that is refused.

use crate::common::golden::Golden;
use crate::common::message;
use crate::common::model::{config, fed_in, ids, model, model_with, paths, text_weights};
use crate::common::numeric::{max_abs_diff, rms_diff};
use candle::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use gem::models::gemma4::{AttentionPath, Cache, Model};

/// Between ways of computing the same f32 logits.
const TOLERANCE: f64 = 5e-4;

/// Two paths that agree to the last bit would be one.
#[test]
fn the_fused_path_runs_other_ops_than_the_reference() {
    let (model, golden) = (
        model("tiny-gemma4-d512", DType::F32),
        Golden::load("tiny-gemma4-d512"),
    );
    let tokens = &golden.prompts[3].input_ids;
    for chunks in [vec![40], vec![39, 1]] {
        let paths = [AttentionPath::Reference, AttentionPath::Fused];
        let logits = paths.map(|path| fed_in(&model, path, tokens, &chunks));
        let difference = max_abs_diff(
            &logits[0].narrow(0, 39, 1).unwrap(),
            &logits[1].narrow(0, 39, 1).unwrap(),
        );
        let difference = difference.unwrap();
        assert!(
            difference > 0.0 && difference <= TOLERANCE,
            "{chunks:?}: {difference:e}"
        );
    }
}

#[test]
fn a_cache_of_another_model_is_refused() {
    let (small, other) = (
        model("tiny-gemma4-d512", DType::F32),
        model("tiny-gemma4-d64", DType::F32),
    );
    let mut cache = other.new_cache(AttentionPath::Reference).unwrap();
    insta::assert_snapshot!(message(small.forward(&ids(&[2]), &mut cache).unwrap_err()), @"gemma4: the cache was made for 12 layers that are not those of this model (6), want one from its new_cache");
    assert!(cache.is_empty());
}

/// With a vocabulary of 20,000 the head is three blocks of rows in half precision.
#[test]
fn a_large_head_is_the_head_row_by_row() {
    const REPEATS: usize = 80;
    let mut config = config("tiny-gemma4-d512");
    config.vocab_size *= REPEATS;
    let tokens = &Golden::load("tiny-gemma4-d512").prompts[2].input_ids;
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let weights = text_weights("tiny-gemma4-d512", |name, tensor| match name {
            "embed_tokens.weight" => tensor.repeat((REPEATS, 1)),
            _ => Ok(tensor),
        });
        let large = Model::new(
            &config,
            VarBuilder::from_tensors(weights, dtype, &Device::Cpu),
        )
        .unwrap();
        let want = fed_in(
            &model("tiny-gemma4-d512", dtype),
            AttentionPath::Fused,
            tokens,
            &[17],
        );
        let got = fed_in(&large, AttentionPath::Fused, tokens, &[17]);
        for repeat in 0..REPEATS {
            let part = got.narrow(1, 256 * repeat, 256).unwrap();
            assert!(
                max_abs_diff(&part, &want).unwrap() <= 1e-4,
                "{dtype:?}, block {repeat}"
            );
        }
    }
}

#[test]
fn a_head_of_its_own_is_used_where_it_is_not_tied() {
    let mut config = config("tiny-gemma4-d512");
    config.tie_word_embeddings = false;
    let mut weights = text_weights("tiny-gemma4-d512", |_, tensor| Ok(tensor));
    let reversed: Vec<u32> = (0..256).rev().collect();
    let reversed = Tensor::new(reversed, &Device::Cpu).unwrap();
    let head = weights["embed_tokens.weight"]
        .index_select(&reversed, 0)
        .unwrap();
    weights.insert("lm_head.weight".into(), head);
    let untied = Model::new(
        &config,
        VarBuilder::from_tensors(weights, DType::F32, &Device::Cpu),
    )
    .unwrap();
    let tokens = &Golden::load("tiny-gemma4-d512").prompts[2].input_ids;
    let tied = fed_in(
        &model("tiny-gemma4-d512", DType::F32),
        AttentionPath::Fused,
        tokens,
        &[17],
    );
    let got = fed_in(&untied, AttentionPath::Fused, tokens, &[17]);
    assert_eq!(
        max_abs_diff(&got, &tied.index_select(&reversed, 1).unwrap()).unwrap(),
        0.0
    );
}

/// Gemma's stream passes 65,504, the largest f16.
#[test]
fn the_residual_stream_of_an_f16_model_is_f32() {
    let loud = |dtype| {
        model_with("tiny-gemma4-d512", dtype, |name, tensor| match name {
            "layers.0.post_feedforward_layernorm.weight" => tensor * 1e6,
            _ => Ok(tensor),
        })
    };
    let tokens = &Golden::load("tiny-gemma4-d512").prompts[2].input_ids;
    let (half, full) = (loud(DType::F16), loud(DType::F32));
    let mut cache = half.new_cache(AttentionPath::Fused).unwrap();
    let states = half.hidden_states(&ids(tokens), &mut cache).unwrap();
    let largest = states[1]
        .abs()
        .unwrap()
        .max_all()
        .unwrap()
        .to_scalar::<f32>()
        .unwrap();
    assert!(largest > 65_504.0 && largest.is_finite(), "{largest}");
    let logits = [half, full].map(|model| fed_in(&model, AttentionPath::Fused, tokens, &[17]));
    assert!(rms_diff(&logits[0], &logits[1]).unwrap() <= 0.06);
}

/// As transformers: the factor is rounded to the type of the weights before it multiplies.
#[test]
fn the_embedding_factor_has_the_type_of_the_weights() {
    for (dtype, factor) in [
        (DType::F32, 32f32.sqrt()),
        (DType::BF16, 5.65625),
        (DType::F16, 5.65625),
    ] {
        let model = model("tiny-gemma4-d512", dtype);
        let mut cache = model.new_cache(AttentionPath::Fused).unwrap();
        let states = model.hidden_states(&ids(&[7]), &mut cache).unwrap();
        let row = text_weights("tiny-gemma4-d512", |_, tensor| Ok(tensor))["embed_tokens.weight"]
            .get(7)
            .unwrap();
        let want = (row * factor as f64).unwrap();
        assert!(
            max_abs_diff(&states[0].flatten_all().unwrap(), &want).unwrap() <= 1e-6,
            "{dtype:?}"
        );
    }
}

#[test]
fn a_prompt_that_does_not_fit_is_refused_before_its_first_chunk() {
    let model = model("tiny-gemma4-d512", DType::F32);
    let mut cache = model
        .new_cache(AttentionPath::Fused)
        .unwrap()
        .with_max_context(10)
        .unwrap();
    for (tokens, chunk) in [(11, 4), (3, 0)] {
        assert!(model
            .prefill(&ids(&vec![5; tokens]), chunk, &mut cache)
            .is_err());
        assert!(cache.is_empty(), "{tokens} tokens in chunks of {chunk}");
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
fn candles_own_kernel_is_a_path_of_metal_alone() {
    let small = model("tiny-gemma4-d512", DType::F32);
    assert_eq!(
        paths(&small),
        ["reference", "fused", "fused-kv"].map(|name| name.parse().unwrap())
    );
    insta::assert_snapshot!(message(small.new_cache(AttentionPath::Sdpa).unwrap_err()), @"sdpa: not on this device: candle's kernel is for Metal, got Cpu");
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

/// Sliding layers have overwritten their window, full layers hold other tokens behind the mark.
#[test]
fn a_marked_prefix_continues_as_a_cold_run_bit_for_bit() {
    let (model, golden) = (
        model("tiny-gemma4-d512", DType::F32),
        Golden::load("tiny-gemma4-d512"),
    );
    let tokens = &golden.prompts[3].input_ids;
    for path in paths(&model) {
        let want = fed_in(&model, path, tokens, &[25, 15])
            .narrow(0, 25, 15)
            .unwrap();
        let mut cache = model.new_cache(path).unwrap();
        model.forward(&ids(&tokens[..25]), &mut cache).unwrap();
        let unmarked = cache.bytes();
        cache.mark().unwrap();
        assert!(cache.bytes().0 > unmarked.0 && cache.bytes().1 == unmarked.1);
        for turn in 0..3 {
            model.forward(&ids(&[9; 20]), &mut cache).unwrap();
            assert_eq!((cache.reusable(24), cache.reusable(31)), (0, 25), "{path}");
            assert_eq!(cache.reusable(99), cache.len());
            assert!(!cache.can_truncate(24) && !cache.can_truncate(31));
            cache.truncate(25).unwrap();
            let got = model
                .forward_all(&ids(&tokens[25..]), &mut cache)
                .unwrap()
                .squeeze(0)
                .unwrap();
            assert_eq!(
                max_abs_diff(&got, &want).unwrap(),
                0.0,
                "{path}, turn {turn}"
            );
        }
        assert!(
            !cache.fork().unwrap().can_truncate(25),
            "a fork has no mark"
        );
        cache.clear();
        assert_eq!((cache.reusable(25), cache.bytes()), (0, (0, 0)));
    }
}

#[test]
fn going_back_behind_a_mark_drops_it() {
    let model = model("tiny-gemma4-d512", DType::F32);
    for path in paths(&model) {
        let mut cache = model.new_cache(path).unwrap();
        model.forward(&ids(&[5; 10]), &mut cache).unwrap();
        cache.mark().unwrap();
        cache.truncate(8).unwrap();
        model.forward(&ids(&[9; 30]), &mut cache).unwrap();
        // Full layers no longer hold what was marked at 8 and 9.
        assert!(!cache.can_truncate(10), "{path}");
        assert_eq!(cache.reusable(10), 0, "{path}");
    }
}
