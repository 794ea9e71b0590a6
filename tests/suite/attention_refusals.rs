//! What the op refuses, and in which words.

use candle::{DType, Device, Result, Tensor};
use gem::attention::geometry::RowView;
use gem::attention::plan::{Partitions, ScratchBytes};
use gem::AttentionD512;

use crate::attention_support::refusal;

fn zeros(shape: impl Into<candle::Shape>) -> Result<Tensor> {
    Tensor::zeros(shape, DType::F32, &Device::Cpu)
}

fn refused(q: &Tensor, k: &Tensor, v: &Tensor) -> String {
    let op = AttentionD512::new(1.0);
    let error = refusal(op.check(q, k, v));
    assert_eq!(refusal(op.forward(q, k, v)), error);
    assert_eq!(refusal(op.partials(q, k, v)), error);
    error
}

#[test]
fn a_shape_that_does_not_fit_is_named_with_what_it_should_be() -> Result<()> {
    let q = zeros((2, 8, 1, 512))?;
    let kv = zeros((2, 2, 9, 512))?;
    insta::assert_snapshot!(refused(&zeros((8, 1, 512))?, &kv, &kv), @"attention_d512: q has shape [8, 1, 512], want (batch, q_heads, q_len, 512)");
    insta::assert_snapshot!(refused(&zeros((2, 8, 1, 256))?, &kv, &kv), @"attention_d512: q has shape [2, 8, 1, 256], want (batch, q_heads, q_len, 512)");
    insta::assert_snapshot!(refused(&q, &zeros((2, 2, 9, 256))?, &kv), @"attention_d512: k has shape [2, 2, 9, 256], want (batch, kv_heads, kv_len, 512)");
    insta::assert_snapshot!(refused(&q, &kv, &zeros((2, 2, 9, 64))?), @"attention_d512: v has shape [2, 2, 9, 64], want (batch, kv_heads, kv_len, 512)");
    insta::assert_snapshot!(refused(&q, &kv, &zeros((2, 2, 10, 512))?), @"attention_d512: k and v must have one shape, got k [2, 2, 9, 512] and v [2, 2, 10, 512]");
    let other = zeros((1, 2, 9, 512))?;
    insta::assert_snapshot!(refused(&q, &other, &other), @"attention_d512: q has batch 2, k and v have batch 1, want the same");
    let three = zeros((2, 3, 9, 512))?;
    insta::assert_snapshot!(refused(&q, &three, &three), @"attention_d512: 8 query heads cannot be shared out to 3 KV heads, want a multiple");
    Ok(())
}

#[test]
fn empty_inputs_and_rows_without_a_key_are_refused() -> Result<()> {
    let q = zeros((1, 4, 3, 512))?;
    let none = zeros((1, 2, 0, 512))?;
    insta::assert_snapshot!(refused(&q, &none, &none), @"attention_d512: k and v of shape [1, 2, 0, 512] are empty, want at least one key");
    let kv = zeros((1, 2, 2, 512))?;
    insta::assert_snapshot!(refused(&zeros((1, 4, 0, 512))?, &kv, &kv), @"attention_d512: q of shape [1, 4, 0, 512] is empty");
    insta::assert_snapshot!(refused(&q, &kv, &kv), @"attention_d512: 3 causal query rows over 2 keys leave the first 1 without a key, want kv_len >= q_len");
    Ok(())
}

#[test]
fn strides_and_dtypes_are_refused_by_tensor() -> Result<()> {
    let q = zeros((1, 4, 1, 512))?;
    let kv = zeros((1, 2, 5, 512))?;
    let strided = zeros((1, 2, 512, 5))?.transpose(2, 3)?;
    insta::assert_snapshot!(refused(&q, &strided, &kv), @"attention_d512: the last dimension of k must be contiguous, want stride 1, got strides [5120, 2560, 1, 5] for shape [1, 2, 5, 512]");
    insta::assert_snapshot!(refused(&q, &kv, &strided), @"attention_d512: the last dimension of v must be contiguous, want stride 1, got strides [5120, 2560, 1, 5] for shape [1, 2, 5, 512]");
    insta::assert_snapshot!(refused(&q.to_dtype(DType::F64)?, &kv, &kv), @"attention_d512: q has dtype F64, want f32, f16 or bf16");
    insta::assert_snapshot!(refused(&q, &kv, &kv.to_dtype(DType::U8)?), @"attention_d512: v has dtype U8, want f32, f16 or bf16");
    Ok(())
}

#[test]
fn settings_without_a_meaning_are_refused() -> Result<()> {
    let q = zeros((1, 4, 1, 512))?;
    let kv = zeros((1, 2, 5, 512))?;
    let check = |op: AttentionD512| refusal(op.check(&q, &kv, &kv));
    insta::assert_snapshot!(check(AttentionD512::new(f32::NAN)), @"attention_d512: got a softmax_scale of NaN, want a finite one");
    insta::assert_snapshot!(check(AttentionD512::new(f32::INFINITY)), @"attention_d512: got a softmax_scale of inf, want a finite one");
    insta::assert_snapshot!(check(AttentionD512::new(1.0).partitions(0)), @"attention_d512: got 0 partitions, want at least 1");
    insta::assert_snapshot!(check(AttentionD512::new(1.0).partitions(usize::MAX)), @"attention_d512: scratch for 4 query rows of 512 in 18446744073709551615 partitions passes 64 bits");
    let states = AttentionD512::new(1.0)
        .partitions(1 << 50)
        .partials(&q, &kv, &kv);
    insta::assert_snapshot!(refusal(states), @"attention_d512: got 1125899906842624 partitions, want at most 65535 where their states are kept");
    Ok(())
}

#[test]
fn scratch_of_the_production_shape_is_the_published_table() -> Result<()> {
    for (partitions, states, numerators, total) in [
        (32, 4_096, 2_097_152, 2_105_344),
        (64, 8_192, 4_194_304, 4_210_688),
        (128, 16_384, 8_388_608, 8_421_376),
        (256, 32_768, 16_777_216, 16_842_752),
    ] {
        let want = ScratchBytes {
            maxima: states,
            denominators: states,
            numerators,
            total,
        };
        assert_eq!(ScratchBytes::new(32, partitions, 512)?, want);
    }
    insta::assert_snapshot!(refusal(ScratchBytes::new(1 << 40, 1 << 20, 512)), @"attention_d512: scratch for 1099511627776 query rows of 512 in 1048576 partitions passes 64 bits");
    Ok(())
}

#[test]
fn partitions_are_equal_contiguous_and_cover_every_key_once() -> Result<()> {
    for len in [1, 2, 31, 32, 33, 1000, 8191] {
        for count in [1, 2, 3, 7, 31, 32, 33, 64, 10_000] {
            let partitions = Partitions::new(len, count)?;
            let mut next = 0;
            for p in 0..count {
                let range = partitions.range(p);
                assert_eq!(range.start, next);
                assert!(range.len() <= len.div_ceil(count));
                next = range.end;
            }
            assert_eq!(next, len, "{len} in {count}");
        }
    }
    Ok(())
}

#[test]
fn the_default_partitions_are_32_for_a_long_decode_and_shrink_with_short_keys_and_many_rows() {
    for (kv_len, rows, want) in [
        (131_072, 8, 32),
        (8_192, 8, 32),
        (2_048, 8, 8),
        (1_024, 8, 4),
        (256, 8, 1),
        (1, 8, 1),
        (131_072, 128, 16),
        (131_072, 8 * 131_072, 1),
    ] {
        assert_eq!(
            Partitions::default_count(kv_len, rows),
            want,
            "{kv_len} {rows}"
        );
    }
}

#[test]
fn check_returns_the_geometry_that_runs() -> Result<()> {
    let q = zeros((2, 16, 3, 512))?;
    let kv = zeros((2, 8, 2, 512))?.transpose(1, 2)?;
    let geometry =
        AttentionD512::new(1.0)
            .causal(false)
            .check(&q, &kv, &kv.to_dtype(DType::BF16)?)?;
    assert_eq!((geometry.group, geometry.kv_len), (8, 8));
    let want = RowView {
        dtype: DType::F32,
        start: 0,
        batch_stride: 2 * 8 * 512,
        head_stride: 512,
        row_stride: 2 * 512,
        end: 2 * 2 * 8 * 512,
    };
    assert_eq!(geometry.k, want);
    Ok(())
}
