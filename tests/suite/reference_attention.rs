//! Attention in plain candle ops is attention: it is what the fused ops are compared with, so it gets its own proof.

use crate::common::numeric::{max_abs_diff, normal};
use crate::common::{message, oracle};
use candle::{DType, Device, Tensor};
use gem::attention::reference::{attention, Visible};

fn qkv(
    seed: u64,
    q_heads: usize,
    kv_heads: usize,
    q_len: usize,
    kv_len: usize,
    dim: usize,
) -> (Tensor, Tensor, Tensor) {
    let q = (normal(seed, (2, q_heads, q_len, dim), DType::F32).unwrap() / (dim as f64).sqrt())
        .unwrap();
    let k = normal(seed + 1, (2, kv_heads, kv_len, dim), DType::F32).unwrap();
    let v = normal(seed + 2, (2, kv_heads, kv_len, dim), DType::F32).unwrap();
    (q, k, v)
}

fn assert_near(got: &Tensor, want: &Tensor, bound: f64, what: &str) {
    let error = max_abs_diff(got, want).unwrap();
    assert!(error <= bound, "{what}: off by {error:e}");
}

#[test]
fn it_is_the_definition_for_every_group_of_heads() {
    for (q_heads, kv_heads) in [(1, 1), (4, 4), (4, 2), (6, 1), (16, 2)] {
        for dim in [8, 512] {
            let (q, k, v) = qkv(1, q_heads, kv_heads, 1, 37, dim);
            let got = attention(&q, &k, &v, 1.5, Visible::All).unwrap();
            let want = oracle::attention(&q, &k, &v, 1.5, |_, _| true);
            assert_near(
                &got,
                &want,
                5e-6,
                &format!("{q_heads} query heads, {kv_heads} KV heads, {dim} wide"),
            );
        }
    }
}

/// 700 queries are three blocks; the first key is at position 100.
#[test]
fn causality_and_windows_hold_across_blocks_of_queries() {
    let (q, k, v) = qkv(4, 4, 2, 700, 900, 16);
    for window in [None, Some(1), Some(7), Some(300), Some(5000)] {
        let visible = Visible::Causal {
            first_query: 300,
            first_key: 100,
            window,
        };
        let got = attention(&q, &k, &v, 1.0, visible).unwrap();
        let want = oracle::attention(&q, &k, &v, 1.0, |i, t| {
            let (query, key) = (300 + i, 100 + t);
            key <= query && window.is_none_or(|w| query - key < w)
        });
        assert_near(&got, &want, 2e-6, &format!("window {window:?}"));
    }
}

#[test]
fn rows_beyond_a_narrowed_cache_view_never_reach_the_output() {
    let (q, k, v) = qkv(7, 8, 2, 5, 40, 32);
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let cast = |t: &Tensor| t.to_dtype(dtype).unwrap();
        let in_a_cache = |t: &Tensor| {
            let cache = Tensor::full(f32::NAN, (2, 2, 64, 32), &Device::Cpu)
                .unwrap()
                .to_dtype(dtype)
                .unwrap();
            cache.slice_set(&cast(t), 2, 3).unwrap();
            cache.narrow(2, 3, 40).unwrap()
        };
        let visible = Visible::Causal {
            first_query: 35,
            first_key: 0,
            window: None,
        };
        let plain = attention(&cast(&q), &cast(&k), &cast(&v), 1.0, visible).unwrap();
        let viewed = attention(&cast(&q), &in_a_cache(&k), &in_a_cache(&v), 1.0, visible).unwrap();
        assert_eq!(max_abs_diff(&viewed, &plain).unwrap(), 0.0, "{dtype:?}");
        let by_token = |t: &Tensor| {
            cast(t)
                .transpose(1, 2)
                .unwrap()
                .contiguous()
                .unwrap()
                .transpose(1, 2)
                .unwrap()
        };
        let transposed =
            attention(&by_token(&q), &by_token(&k), &by_token(&v), 1.0, visible).unwrap();
        assert_near(&transposed, &plain, 1e-6, &format!("{dtype:?} transposed"));
    }
}

/// huggingface/candle#3727: a half-precision softmax sums to 2 over 4,096 equal scores. What is left is the rounding of the
/// probabilities and of the output to the half type.
#[test]
fn the_softmax_is_f32_in_half_precision() {
    for (dtype, keys) in [(DType::F16, 4096), (DType::BF16, 600), (DType::F16, 70_000)] {
        let q = Tensor::zeros((1, 2, 1, 8), dtype, &Device::Cpu).unwrap();
        let k = Tensor::zeros((1, 1, keys, 8), dtype, &Device::Cpu).unwrap();
        let v = Tensor::ones((1, 1, keys, 8), dtype, &Device::Cpu).unwrap();
        let out = attention(&q, &k, &v, 1.0, Visible::All).unwrap();
        assert_near(
            &out,
            &Tensor::ones((1, 2, 1, 8), DType::F32, &Device::Cpu).unwrap(),
            8e-3,
            &format!("{dtype:?}, {keys} keys"),
        );
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let t = |shape: (usize, usize, usize, usize)| {
        Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap()
    };
    let (q, kv) = (t((1, 4, 3, 8)), t((1, 2, 9, 8)));
    let causal = Visible::Causal {
        first_query: 2,
        first_key: 20,
        window: None,
    };
    let cases = [
        attention(&q, &t((1, 3, 9, 8)), &t((1, 3, 9, 8)), 1.0, Visible::All),
        attention(&q, &kv, &t((1, 2, 8, 8)), 1.0, Visible::All),
        attention(&q, &t((2, 2, 9, 8)), &t((2, 2, 9, 8)), 1.0, Visible::All),
        attention(&q, &t((1, 2, 9, 4)), &t((1, 2, 9, 4)), 1.0, Visible::All),
        attention(&q, &t((1, 2, 0, 8)), &t((1, 2, 0, 8)), 1.0, Visible::All),
        attention(&t((1, 4, 0, 8)), &kv, &kv, 1.0, Visible::All),
        attention(&q, &kv, &kv, 1.0, causal),
        attention(
            &t((0, 4, 3, 8)),
            &t((0, 2, 9, 8)),
            &t((0, 2, 9, 8)),
            1.0,
            Visible::All,
        ),
        // Only the first row sees nothing, and only the last one.
        attention(
            &q,
            &kv,
            &kv,
            1.0,
            Visible::Causal {
                first_query: 0,
                first_key: 1,
                window: None,
            },
        ),
        attention(
            &q,
            &kv,
            &kv,
            1.0,
            Visible::Causal {
                first_query: 7,
                first_key: 0,
                window: Some(1),
            },
        ),
        attention(
            &q,
            &kv,
            &kv,
            1.0,
            Visible::Causal {
                first_query: 6,
                first_key: 0,
                window: Some(0),
            },
        ),
    ];
    let errors: Vec<_> = cases
        .into_iter()
        .map(|case| message(case.unwrap_err()))
        .collect();
    insta::assert_snapshot!(errors.join("\n"));
}

#[test]
fn no_heads_no_dimension_and_positions_past_64_bits_are_refused() {
    let t = |shape: (usize, usize, usize, usize)| {
        Tensor::zeros(shape, DType::F32, &Device::Cpu).unwrap()
    };
    let (q, kv) = (t((1, 4, 3, 8)), t((1, 2, 9, 8)));
    let at = |first_query, first_key| {
        let visible = Visible::Causal {
            first_query,
            first_key,
            window: None,
        };
        message(attention(&q, &kv, &kv, 1.0, visible).unwrap_err())
    };
    let none = attention(&t((1, 0, 3, 8)), &kv, &kv, 1.0, Visible::All);
    insta::assert_snapshot!(message(none.unwrap_err()), @"reference attention: q is [1, 0, 3, 8], want a batch, a head and a dimension at least");
    let empty = t((1, 2, 3, 0));
    let none = attention(&empty, &empty, &empty, 1.0, Visible::All);
    insta::assert_snapshot!(message(none.unwrap_err()), @"reference attention: q is [1, 2, 3, 0], want a batch, a head and a dimension at least");
    insta::assert_snapshot!(at(usize::MAX - 2, 0), @"reference attention: 3 rows of q from position 18446744073709551613 on pass the 64-bit range");
    insta::assert_snapshot!(at(0, usize::MAX), @"reference attention: 9 rows of k from position 18446744073709551615 on pass the 64-bit range");
}
