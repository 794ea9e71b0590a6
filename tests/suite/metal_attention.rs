//! The Metal kernels of attention_d512, from their text, on the plans that Metal would be given.

use crate::attention_support::{bits, flat, inputs, max_error, normal, oracle, SCALE};
use crate::metal_support::Call;
use candle::{DType, Device, Tensor};
use gem::attention::gpu::{Route, Tiling};
use gem::attention::reference::{self, Visible};
use gem::AttentionD512;
use msl::Mode;

fn fused(tokens: u32, heads: u32, stage: bool) -> Route {
    Route::Fused(Tiling {
        tokens,
        heads,
        stage,
    })
}

pub fn routes() -> [Route; 8] {
    [
        fused(4, 1, true),
        fused(4, 1, false),
        fused(8, 1, true),
        fused(8, 1, false),
        fused(4, 2, true),
        fused(4, 2, false),
        Route::Matrix,
        Route::Staged,
    ]
}

fn call<'a>(qkv: &'a [Tensor; 3], partitions: usize, route: Route) -> Call<'a> {
    Call {
        qkv: qkv.each_ref(),
        scale: SCALE,
        partitions,
        causal: true,
        route,
    }
}

/// Error against the f64 oracle at most twice that of the unfused f32 path, as it is for the op on the CPU.
/// Returns the two errors; `None` for what the route refuses.
fn assert_right(
    qkv: &[Tensor; 3],
    partitions: usize,
    route: Route,
    mode: Mode,
) -> Option<(f64, f64)> {
    let [q, k, v] = qkv;
    let call = call(qkv, partitions, route);
    // Matrices want whole blocks of keys, and that is said before any work.
    if route == Route::Matrix
        && (k.dim(2).unwrap().div_ceil(partitions) < 8 || q.dim(2).unwrap() > 1)
    {
        assert!(call.plan().is_err());
        return None;
    }
    let got = call.run(mode).unwrap().out;
    let want = oracle(q, k, v, SCALE as f64, true).unwrap();
    let (q_len, kv_len) = (q.dim(2).unwrap(), k.dim(2).unwrap());
    let visible = Visible::Causal {
        first_query: kv_len - q_len,
        first_key: 0,
        window: None,
    };
    let unfused = reference::attention(q, k, v, SCALE, visible).unwrap();
    let (error, bound) = (
        max_error(&got, &want).unwrap(),
        max_error(&unfused, &want).unwrap(),
    );
    assert!(
        error <= 2.0 * bound + 1e-9,
        "{route:?}, {:?} {:?}, {partitions} partitions: off by {error:e}, the unfused path by {bound:e}",
        q.shape(),
        k.shape()
    );
    Some((error, bound))
}

#[test]
fn every_route_is_right_at_short_lengths_with_any_number_of_partitions() {
    for kv_len in [1, 3, 4, 5, 31, 32, 33] {
        let qkv = inputs(1, (1, 8, 1, 1, kv_len)).unwrap();
        for partitions in [1, 2, 7, 31, 32, 33, 64] {
            // Faults of access do not depend on the number of partitions beyond few and more than keys.
            let mode = if [2, 33].contains(&partitions) {
                Mode::Checked
            } else {
                Mode::Fast
            };
            for route in routes() {
                assert_right(&qkv, partitions, route, mode);
            }
        }
    }
}

#[test]
fn every_route_is_right_for_every_group_of_heads() {
    for group in [1, 2, 3, 4, 6, 8, 12, 16] {
        let qkv = inputs(2, (2, 2 * group, 2, 1, 70)).unwrap();
        for route in routes() {
            assert_right(&qkv, 3, route, Mode::Checked);
        }
    }
}

#[test]
fn several_query_rows_see_the_keys_up_to_their_own_position() {
    for (q_len, kv_len) in [(2, 2), (3, 40), (9, 33), (17, 17)] {
        let qkv = inputs(3, (1, 4, 2, q_len, kv_len)).unwrap();
        for route in routes() {
            assert_right(&qkv, 2, route, Mode::Checked);
        }
    }
}

#[test]
fn every_route_is_right_at_the_lengths_around_powers_of_two() {
    for kv_len in [511, 512, 513, 1023, 1024, 1025, 8191, 8192, 8193] {
        let qkv = inputs(4, (1, 8, 1, 1, kv_len)).unwrap();
        for route in routes() {
            assert_right(&qkv, 32, route, Mode::Fast);
        }
    }
}

/// `cargo test --release -- --ignored --nocapture metal_attention::every_route_is_right_at_65536_keys`
#[test]
#[ignore = "takes a minute"]
fn every_route_is_right_at_65536_keys() {
    let qkv = inputs(5, (1, 8, 1, 1, 65_536)).unwrap();
    for route in routes() {
        let (error, unfused) = assert_right(&qkv, 32, route, Mode::Fast).unwrap();
        println!("| {route:?} | {error:.2e} | {unfused:.2e} |");
    }
}

#[test]
fn half_precision_keys_and_queries_equal_the_cpu_op_up_to_the_rounding_of_the_result() {
    for (q_type, kv_type) in [
        (DType::F16, DType::F16),
        (DType::BF16, DType::BF16),
        (DType::F32, DType::BF16),
        (DType::BF16, DType::F32),
        (DType::F32, DType::F16),
    ] {
        let [q, k, v] = inputs(6, (1, 8, 1, 1, 77)).unwrap();
        let cast = |t: &Tensor, dtype| t.to_dtype(dtype).unwrap();
        let qkv = [cast(&q, q_type), cast(&k, kv_type), cast(&v, kv_type)];
        let want = AttentionD512::new(SCALE)
            .partitions(3)
            .forward(&qkv[0], &qkv[1], &qkv[2])
            .unwrap();
        let step = match q_type {
            DType::BF16 => 1.0 / 128.0,
            DType::F16 => 1.0 / 1024.0,
            _ => 2e-5,
        };
        for route in routes() {
            let got = call(&qkv, 3, route).run(Mode::Checked).unwrap().out;
            assert_eq!(got.dtype(), q_type);
            for (got, want) in flat(&got).unwrap().iter().zip(flat(&want).unwrap()) {
                // One unit in the last place of the result's type.
                assert!(
                    (got - want).abs() <= step * want.abs().max(0.05),
                    "{route:?} {q_type:?} {kv_type:?}: {got}, want {want}"
                );
            }
        }
    }
}

#[test]
fn staging_does_not_change_a_bit() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let qkv = inputs(7, (2, 16, 2, 1, 333))
            .unwrap()
            .map(|t| t.to_dtype(dtype).unwrap());
        for (tokens, heads) in [(4, 1), (8, 1), (4, 2)] {
            let run = |stage| {
                bits(
                    &call(&qkv, 7, fused(tokens, heads, stage))
                        .run(Mode::Fast)
                        .unwrap()
                        .out,
                )
                .unwrap()
            };
            assert_eq!(
                run(true),
                run(false),
                "{dtype:?}, tiles of {tokens}, {heads} heads"
            );
        }
        let heads = |heads| {
            bits(
                &call(&qkv, 7, fused(4, heads, true))
                    .run(Mode::Fast)
                    .unwrap()
                    .out,
            )
            .unwrap()
        };
        assert_eq!(heads(1), heads(2), "{dtype:?}: heads served together");
    }
}

#[test]
fn a_cache_view_gives_the_bits_of_a_contiguous_copy_and_nan_beyond_it_never_arrives() {
    let [q, k, v] = inputs(8, (2, 16, 2, 1, 45)).unwrap();
    let in_a_cache = |t: &Tensor| {
        let cache = Tensor::full(f32::NAN, (2, 2, 64, 512), &Device::Cpu).unwrap();
        cache.slice_set(t, 2, 9).unwrap();
        cache.narrow(2, 9, 45).unwrap()
    };
    let by_token = |t: &Tensor| {
        t.transpose(1, 2)
            .unwrap()
            .contiguous()
            .unwrap()
            .transpose(1, 2)
            .unwrap()
    };
    let plain = [q.clone(), k.clone(), v.clone()];
    for views in [
        [q.clone(), in_a_cache(&k), in_a_cache(&v)],
        [by_token(&q), by_token(&k), by_token(&v)],
    ] {
        for route in routes() {
            let want = call(&plain, 4, route).run(Mode::Checked).unwrap().out;
            let got = call(&views, 4, route).run(Mode::Checked).unwrap().out;
            assert_eq!(bits(&got).unwrap(), bits(&want).unwrap(), "{route:?}");
        }
    }
}

#[test]
fn a_hidden_row_of_nan_does_not_reach_the_rows_that_cannot_see_it() {
    let [q, k, v] = inputs(9, (1, 8, 1, 3, 20)).unwrap();
    let last = normal(10, (1, 1, 1, 512), DType::F32).unwrap();
    let nan = (last * f64::NAN).unwrap();
    let poisoned = |t: &Tensor| Tensor::cat(&[&t.narrow(2, 0, 19).unwrap(), &nan], 2).unwrap();
    let (clean, dirty) = (
        [q.clone(), k.clone(), v.clone()],
        [q, poisoned(&k), poisoned(&v)],
    );
    for route in [
        fused(4, 1, true),
        fused(8, 1, false),
        fused(4, 2, true),
        Route::Staged,
    ] {
        let want = call(&clean, 3, route).run(Mode::Checked).unwrap().out;
        let got = call(&dirty, 3, route).run(Mode::Checked).unwrap().out;
        let seen = |t: &Tensor| bits(&t.narrow(2, 0, 2).unwrap()).unwrap();
        assert_eq!(
            seen(&got),
            seen(&want),
            "{route:?}: rows that do not see the last key"
        );
        let last = flat(&got.narrow(2, 2, 1).unwrap()).unwrap();
        assert!(
            last.iter().all(|x| x.is_nan()),
            "{route:?}: the row that sees it"
        );
    }
}

/// The storage of each tensor begins elsewhere, and batches, heads and rows are apart by other strides.
#[test]
fn q_k_and_v_may_each_lie_in_their_own_way() {
    let [q, k, v] = inputs(11, (2, 4, 2, 2, 37)).unwrap();
    let padded = |t: &Tensor, dim, before, after| {
        let t = t.pad_with_zeros(dim, before, after).unwrap();
        t.narrow(dim, before, t.dim(dim).unwrap() - before - after)
            .unwrap()
    };
    let by_token = |t: &Tensor| {
        t.transpose(1, 2)
            .unwrap()
            .contiguous()
            .unwrap()
            .transpose(1, 2)
            .unwrap()
    };
    let views = [
        padded(&q, 2, 1, 3),
        k.clone(),
        padded(&by_token(&v), 1, 2, 1),
    ];
    for (view, plain) in views.iter().zip([&q, &k, &v]) {
        assert_eq!(bits(view).unwrap(), bits(plain).unwrap());
    }
    let others = [
        by_token(&padded(&q, 1, 1, 0)),
        padded(&k, 3, 4, 8),
        padded(&v, 2, 5, 0),
    ];
    let plain = [q, k, v];
    for route in routes().into_iter().filter(|route| *route != Route::Matrix) {
        let want = bits(&call(&plain, 3, route).run(Mode::Checked).unwrap().out).unwrap();
        for views in [&views, &others] {
            let got = call(views, 3, route).run(Mode::Checked).unwrap().out;
            assert_eq!(bits(&got).unwrap(), want, "{route:?}");
        }
    }
    let [q, k, v] = &plain;
    let one = |t: &Tensor| t.narrow(2, 1, 1).unwrap();
    let decode = [one(q), k.clone(), by_token(v)];
    let plain = [one(q).contiguous().unwrap(), k.clone(), v.clone()];
    assert_eq!(
        bits(
            &call(&decode, 3, Route::Matrix)
                .run(Mode::Checked)
                .unwrap()
                .out
        )
        .unwrap(),
        bits(
            &call(&plain, 3, Route::Matrix)
                .run(Mode::Checked)
                .unwrap()
                .out
        )
        .unwrap()
    );
}

#[test]
fn without_causality_every_row_sees_every_key() {
    for (q_len, kv_len) in [(3, 33), (9, 4)] {
        let qkv = inputs(12, (1, 4, 2, q_len, kv_len)).unwrap();
        let [q, k, v] = &qkv;
        let want = oracle(q, k, v, SCALE as f64, false).unwrap();
        for route in routes() {
            let call = Call {
                causal: false,
                ..call(&qkv, 2, route)
            };
            if route == Route::Matrix && kv_len < 16 {
                continue;
            }
            let out = call.run(Mode::Checked).unwrap().out;
            let error = max_error(&out, &want).unwrap();
            assert!(error < 2e-6, "{route:?}: {error:e}");
        }
    }
}

/// It may not even raise the maximum: the weights of the others would vanish.
#[test]
fn a_hidden_key_of_any_size_changes_no_bit() {
    let [q, k, v] = inputs(13, (1, 2, 1, 3, 11)).unwrap();
    let q = q.abs().unwrap();
    for size in [1e5, 1e30, f64::INFINITY] {
        // The first query row sees 9 keys, the second 10.
        let huge = (k.narrow(2, 9, 2).unwrap().ones_like().unwrap() * size).unwrap();
        let k = Tensor::cat(&[&k.narrow(2, 0, 9).unwrap(), &huge], 2).unwrap();
        let with = [q.clone(), k, v.clone()];
        let seen = |t: &Tensor, n| t.narrow(2, 0, n).unwrap();
        let without = [seen(&with[0], 1), seen(&with[1], 9), seen(&with[2], 9)];
        for route in routes().into_iter().filter(|route| *route != Route::Matrix) {
            let got = call(&with, 1, route).run(Mode::Checked).unwrap().out;
            let want = call(&without, 1, route).run(Mode::Checked).unwrap().out;
            assert_eq!(
                bits(&seen(&got, 1)).unwrap(),
                bits(&want).unwrap(),
                "{route:?}, {size:e}"
            );
        }
    }
}

/// Rows that do not exist fill a matrix up; what they would score must not matter.
#[test]
fn absent_rows_of_a_matrix_do_not_make_others_infinite() {
    let [q, k, v] = inputs(14, (1, 3, 1, 1, 70)).unwrap();
    let q = q.abs().unwrap();
    let (before, at, after) = (
        k.narrow(2, 0, 5).unwrap(),
        k.narrow(2, 5, 1).unwrap(),
        k.narrow(2, 6, 64).unwrap(),
    );
    let hidden = (at.ones_like().unwrap() * f64::NEG_INFINITY).unwrap();
    let k = Tensor::cat(&[&before, &hidden, &after], 2).unwrap();
    let out = call(&[q, k, v], 3, Route::Matrix)
        .run(Mode::Checked)
        .unwrap()
        .out;
    assert!(flat(&out).unwrap().iter().all(|x| x.is_finite()));
}
