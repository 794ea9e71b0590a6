//! The Metal kernels that rebuild keys from values, from their text, on the plans that Metal would be given.

use crate::attention_support::{bits, flat, inputs, max_error, refusal, SCALE};
use crate::metal_support::{compile, run, run_plan};
use crate::shared_kv_support::{turning, Turning};
use candle::{DType, Device, Tensor};
use gem::attention::gpu::{plan, plan_shared_kv, plan_shared_kv_states, Route, Tiling};
use gem::attention::plan::Partitions;
use gem::attention::reference::{self, Visible};
use gem::attention::{AttentionGeometry, RotaryKeys};
use gem::backend::plan::Plan;
use gem::AttentionD512;
use msl::{Mode, Stats};
use std::sync::Arc;

fn fused(tokens: u32, heads: u32, stage: bool) -> Route {
    Route::Fused(Tiling {
        tokens,
        heads,
        stage,
    })
}

fn routes() -> [Route; 6] {
    [
        fused(4, 1, true),
        fused(4, 1, false),
        fused(8, 1, true),
        fused(8, 1, false),
        fused(4, 2, true),
        fused(4, 2, false),
    ]
}

/// One call: everything but the route.
#[derive(Clone, Copy)]
struct Call<'a> {
    q: &'a Tensor,
    v: &'a Tensor,
    keys: &'a RotaryKeys,
    partitions: usize,
}

impl Call<'_> {
    fn plan(&self, route: Route) -> candle::Result<Plan> {
        let op = "attention_d512_shared_kv";
        let g = AttentionGeometry::new_shared_kv(op, self.q, self.v, true)?;
        let partitions = Partitions::new(g.kv_len, self.partitions)?;
        plan_shared_kv(&g, self.keys, &partitions, SCALE, route)
    }

    fn inputs(&self) -> [&Tensor; 4] {
        let tables = self.keys.tables().rows();
        [self.q, self.v, self.keys.weight(), tables]
    }

    fn run(&self, route: Route, mode: Mode) -> (Tensor, Vec<Stats>) {
        let (mut outputs, stats) = run(&self.plan(route).unwrap(), &self.inputs(), mode).unwrap();
        let out = outputs.remove(0).reshape(self.q.shape()).unwrap();
        (out, stats)
    }
}

/// Error against the f64 oracle at most twice that of the unfused f32 path on stored keys.
fn assert_right(turning: &Turning, (q, v): (&Tensor, &Tensor), partitions: usize, mode: Mode) {
    let (q_len, kv_len) = (q.dim(2).unwrap(), v.dim(2).unwrap());
    let keys = turning.keys(kv_len).unwrap();
    let want = turning.oracle(q, v, SCALE as f64, true).unwrap();
    let visible = Visible::Causal {
        first_query: kv_len - q_len,
        first_key: 0,
        window: None,
    };
    let k = turning.stored(v).unwrap();
    let unfused = reference::attention(q, &k, v, SCALE, visible).unwrap();
    let bound = max_error(&unfused, &want).unwrap();
    let call = Call {
        q,
        v,
        keys: &keys,
        partitions,
    };
    for route in routes() {
        let error = max_error(&call.run(route, mode).0, &want).unwrap();
        assert!(
            error <= 2.0 * bound + 1e-7,
            "{route:?}, {:?} {:?}, {partitions} partitions: off by {error:e}, the unfused path by {bound:e}",
            q.shape(),
            v.shape()
        );
    }
}

#[test]
fn every_tiling_is_right_at_short_lengths_with_any_number_of_partitions() {
    let turning = turning(1, 64, 7).unwrap();
    for kv_len in [1, 3, 4, 5, 8, 9, 31, 32, 33] {
        let [q, _, v] = inputs(1, (1, 8, 1, 1, kv_len)).unwrap();
        for partitions in [1, 2, 7, 33, 64] {
            let mode = if [2, 33].contains(&partitions) {
                Mode::Checked
            } else {
                Mode::Fast
            };
            assert_right(&turning, (&q, &v), partitions, mode);
        }
    }
}

#[test]
fn every_tiling_is_right_for_every_group_of_heads_and_number_of_pairs() {
    for (group, pairs) in [
        (1, 64),
        (2, 0),
        (3, 64),
        (4, 256),
        (6, 64),
        (8, 150),
        (8, 1),
        (12, 64),
        (16, 64),
    ] {
        let [q, _, v] = inputs(2, (2, 2 * group, 2, 1, 37)).unwrap();
        let turning = turning(2, pairs, 1000).unwrap();
        assert_right(&turning, (&q, &v), 3, Mode::Checked);
    }
}

#[test]
fn several_query_rows_see_the_keys_up_to_their_own_position() {
    for (q_len, kv_len) in [(2, 2), (3, 40), (9, 33), (17, 17)] {
        let [q, _, v] = inputs(3, (1, 4, 2, q_len, kv_len)).unwrap();
        assert_right(&turning(3, 64, 0).unwrap(), (&q, &v), 2, Mode::Checked);
    }
}

#[test]
fn every_tiling_is_right_at_the_lengths_around_powers_of_two() {
    for kv_len in [511, 512, 513, 1023, 1025, 8191, 8193] {
        let [q, _, v] = inputs(4, (1, 8, 1, 1, kv_len)).unwrap();
        assert_right(&turning(4, 64, 60_000).unwrap(), (&q, &v), 32, Mode::Fast);
    }
}

#[test]
fn half_types_equal_the_cpu_op_up_to_the_rounding_of_the_result() {
    for (q_type, v_type) in [
        (DType::F16, DType::F16),
        (DType::BF16, DType::BF16),
        (DType::F32, DType::BF16),
        (DType::BF16, DType::F32),
        (DType::F32, DType::F16),
    ] {
        let [q, _, v] = inputs(6, (1, 8, 1, 1, 77)).unwrap();
        let (q, v) = (q.to_dtype(q_type).unwrap(), v.to_dtype(v_type).unwrap());
        let keys = turning(6, 64, 33).unwrap().keys(77).unwrap();
        let want = AttentionD512::new(SCALE)
            .partitions(3)
            .forward_shared_kv(&q, &v, &keys)
            .unwrap();
        let step = match q_type {
            DType::BF16 => 1.0 / 128.0,
            DType::F16 => 1.0 / 1024.0,
            _ => 2e-5,
        };
        let call = Call {
            q: &q,
            v: &v,
            keys: &keys,
            partitions: 3,
        };
        for route in routes() {
            let (got, _) = call.run(route, Mode::Checked);
            assert_eq!(got.dtype(), q_type);
            for (got, want) in flat(&got).unwrap().iter().zip(flat(&want).unwrap()) {
                // One unit in the last place of the result's type.
                assert!(
                    (got - want).abs() <= step * want.abs().max(0.05),
                    "{route:?} {q_type:?} {v_type:?}: {got}, want {want}"
                );
            }
        }
    }
}

#[test]
fn staging_does_not_change_a_bit() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for pairs in [64, 256] {
            let [q, _, v] = inputs(7, (2, 16, 2, 1, 133)).unwrap();
            let (q, v) = (q.to_dtype(dtype).unwrap(), v.to_dtype(dtype).unwrap());
            let keys = turning(7, pairs, 5).unwrap().keys(133).unwrap();
            let call = Call {
                q: &q,
                v: &v,
                keys: &keys,
                partitions: 7,
            };
            let run = |route| bits(&call.run(route, Mode::Fast).0).unwrap();
            for (tokens, heads) in [(4, 1), (8, 1), (4, 2)] {
                assert_eq!(
                    run(fused(tokens, heads, true)),
                    run(fused(tokens, heads, false)),
                    "{dtype:?}, {pairs} pairs, tiles of {tokens}, {heads} heads"
                );
            }
            assert_eq!(run(fused(4, 1, true)), run(fused(4, 2, true)), "{dtype:?}");
        }
    }
}

#[test]
fn a_cache_view_gives_the_bits_of_a_contiguous_copy_and_nan_beyond_it_never_arrives() {
    let [q, _, v] = inputs(8, (2, 16, 2, 1, 45)).unwrap();
    let turning = turning(8, 64, 21).unwrap();
    let keys = turning.keys(45).unwrap();
    let nan = |shape: &[usize]| Tensor::full(f32::NAN, shape, &Device::Cpu).unwrap();
    let cache = nan(&[2, 2, 64, 512]);
    cache.slice_set(&v, 2, 9).unwrap();
    let by_token = |t: &Tensor| {
        let t = t.transpose(1, 2).unwrap().contiguous().unwrap();
        t.transpose(1, 2).unwrap()
    };
    // A weight that lies inside a larger tensor, too.
    let weights = Tensor::cat(&[&nan(&[7]), &turning.weight, &nan(&[3])], 0).unwrap();
    let inside = RotaryKeys::new(&weights.narrow(0, 7, 512).unwrap(), keys.tables())
        .unwrap()
        .at(21);
    for route in routes() {
        let run = |q: &Tensor, v: &Tensor, keys: &RotaryKeys| {
            let call = Call {
                q,
                v,
                keys,
                partitions: 4,
            };
            bits(&call.run(route, Mode::Checked).0).unwrap()
        };
        let want = run(&q, &v, &keys);
        let view = cache.narrow(2, 9, 45).unwrap();
        assert_eq!(run(&q, &view, &inside), want, "{route:?}");
        assert_eq!(run(&by_token(&q), &by_token(&v), &keys), want, "{route:?}");
    }
}

#[test]
fn a_hidden_row_of_nan_does_not_reach_the_rows_that_cannot_see_it() {
    let [q, _, v] = inputs(9, (1, 8, 1, 3, 20)).unwrap();
    let keys = turning(9, 64, 0).unwrap().keys(20).unwrap();
    let nan = Tensor::full(f32::NAN, (1, 1, 1, 512), &Device::Cpu).unwrap();
    let dirty = Tensor::cat(&[&v.narrow(2, 0, 19).unwrap(), &nan], 2).unwrap();
    for route in routes() {
        let run = |v: &Tensor| {
            let call = Call {
                q: &q,
                v,
                keys: &keys,
                partitions: 3,
            };
            call.run(route, Mode::Checked).0
        };
        let (want, got) = (run(&v), run(&dirty));
        let seen = |t: &Tensor| bits(&t.narrow(2, 0, 2).unwrap()).unwrap();
        assert_eq!(seen(&got), seen(&want), "{route:?}");
        let last = flat(&got.narrow(2, 2, 1).unwrap()).unwrap();
        assert!(last.iter().all(|x| x.is_nan()), "{route:?}");
    }
}

#[test]
fn a_token_costs_512_values_and_a_row_of_angles_and_2560_bytes_where_it_is_staged() {
    const KV_LEN: usize = 640;
    let [q, k, v] = inputs(1, (1, 8, 1, 1, KV_LEN)).unwrap();
    let keys = turning(1, 64, 3).unwrap().keys(KV_LEN).unwrap();
    let call = Call {
        q: &q,
        v: &v,
        keys: &keys,
        partitions: 32,
    };
    for route in [fused(4, 1, true), fused(8, 1, true), fused(4, 2, true)] {
        let Route::Fused(Tiling { tokens, .. }) = route else {
            unreachable!()
        };
        let plan_of = call.plan(route).unwrap();
        assert_eq!(plan_of.passes[0].threadgroup_bytes, tokens * 2560);
        let (_, stats) = call.run(route, Mode::Checked);
        let device = &stats[0].memory.as_ref().unwrap().device;
        let read = |index: u32| (device[&index].read.bytes, device[&index].read.unique_bytes);
        let (values, angles) = (KV_LEN as u64 * 512 * 4, KV_LEN as u64 * 64 * 2 * 4);
        assert_eq!(read(1), (values, values), "{route:?}");
        assert_eq!(read(3), (angles, angles), "{route:?}");
        // Once a SIMD group, 32 partitions.
        assert_eq!(device[&2].read.unique_bytes, 512 * 4);

        let g = AttentionGeometry::new("attention_d512", &q, &k, &v, true).unwrap();
        let partitions = Partitions::new(KV_LEN, 32).unwrap();
        let stored = plan(&g, &partitions, SCALE, route).unwrap();
        assert_eq!(stored.passes[0].threadgroup_bytes, tokens * 4096);
        let (_, stats) = run(&stored, &[&q, &k, &v], Mode::Checked).unwrap();
        let device = &stats[0].memory.as_ref().unwrap().device;
        let both = device[&1].read.bytes + device[&2].read.bytes;
        assert_eq!(both, 2 * values, "{route:?}");
    }
    let [half_q, half_v] = [&q, &v].map(|t| t.to_dtype(DType::BF16).unwrap());
    let half = Call {
        q: &half_q,
        v: &half_v,
        ..call
    };
    let bytes = half.plan(fused(4, 1, true)).unwrap().passes[0].threadgroup_bytes;
    assert_eq!(bytes, 4 * (512 * 2 + 128 * 4));
}

#[test]
fn routes_without_a_kernel_are_refused_with_the_reason() {
    let [q, _, v] = inputs(1, (1, 8, 1, 1, 64)).unwrap();
    let keys = turning(1, 64, 0).unwrap().keys(64).unwrap();
    let call = Call {
        q: &q,
        v: &v,
        keys: &keys,
        partitions: 2,
    };
    let refused = |route| refusal(call.plan(route));
    insta::assert_snapshot!(refused(Route::Matrix), @"attention_d512_shared_kv: the matrix route takes keys from the device straight into matrices, and rebuilt ones are not there; want the fused route");
    insta::assert_snapshot!(refused(Route::Staged), @"attention_d512_shared_kv: the unfused route reads keys that are stored, and rebuilt ones are not; want the fused route");
    insta::assert_snapshot!(refused(fused(8, 2, true)), @"attention_d512_shared_kv: no kernel for Tiling { tokens: 8, heads: 2, stage: true }, want tiles of 4 or 8 tokens with 1 head, or of 4 with 2");
    let short = Call {
        keys: &keys.at(1),
        ..call
    };
    insta::assert_snapshot!(refusal(short.plan(Route::default())), @"attention_d512_shared_kv: 64 cached tokens from position 1 on reach past the rotary tables, which have 64 positions");
}

/// What becomes of a call on a changed text and plan: an error of the harness, or the largest error of the result.
fn outcome(
    route: Route,
    text: impl Fn(&str) -> String,
    change: impl Fn(&mut Plan),
) -> Result<f64, String> {
    let [q, _, v] = inputs(1, (1, 8, 1, 1, 37)).unwrap();
    let turning = turning(1, 64, 500).unwrap();
    let keys = turning.keys(37).unwrap();
    let call = Call {
        q: &q,
        v: &v,
        keys: &keys,
        partitions: 3,
    };
    let mut plan = call.plan(route).unwrap();
    change(&mut plan);
    let modules = |pass: &gem::backend::plan::Pass| {
        let text = text(pass.source.text());
        Arc::new(compile(pass.source, &text, &[pass.entry], Mode::Checked).unwrap())
    };
    let want = turning.oracle(&q, &v, SCALE as f64, true).unwrap();
    match run_plan(&plan, &call.inputs(), Mode::Checked, modules) {
        Ok((outputs, _)) => Ok(max_error(&outputs[0], &want).unwrap()),
        Err(e) => Err(e.to_string()),
    }
}

fn without_barrier(text: &str, n: usize) -> String {
    let barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);";
    match text.match_indices(barrier).nth(n) {
        Some((at, _)) => format!("{}{}", &text[..at], &text[at + barrier.len()..]),
        None => text.to_string(),
    }
}

#[test]
fn nothing_is_found_where_nothing_was_planted() {
    for route in routes() {
        let error = outcome(route, str::to_string, |_| ()).unwrap();
        assert!(error < 1e-6, "{route:?}: {error:e}");
    }
}

#[test]
fn a_missing_barrier_is_a_race_with_both_lines() {
    for n in 0..2 {
        let found = outcome(fused(4, 1, true), |text| without_barrier(text, n), |_| ());
        let error = found.expect_err(&format!("barrier {n}"));
        let lines = error.matches("attention_shared_kv.metal").count();
        assert!(error.contains("race") && lines >= 2, "barrier {n}: {error}");
    }
}

#[test]
fn planted_mistakes_of_the_rebuilding_give_wrong_numbers_or_leave_the_buffer() {
    for (what, from, to, staged_only) in [
        ("sign of the sine", "-(b * sine)", "b * sine", false),
        (
            "weight of the pair",
            "high * high_weight",
            "high * low_weight",
            false,
        ),
        (
            "weight of what does not turn",
            "turns ? row : row * weight.part[j]",
            "row",
            false,
        ),
        (
            "weight twice",
            "turns ? row : row * weight.part[j]",
            "row * weight.part[j]",
            false,
        ),
        (
            "position",
            "first_angles + ulong(t0)",
            "first_angles + ulong(t0 + 1)",
            false,
        ),
        ("partner", "from + GEM_DIM / 2", "from + GEM_DIM / 4", true),
        (
            "row of the strip",
            "(row * 2 + 1) * pairs + low);\n",
            "row * 2 * pairs + low);\n",
            true,
        ),
        ("row stride", "p.v.row_stride", "p.v.head_stride", false),
        (
            "tail",
            "t0 < end; t0 += TILE",
            "t0 + TILE <= end; t0 += TILE",
            false,
        ),
    ] {
        for stage in [true, false] {
            if staged_only && !stage {
                continue;
            }
            let planted = |text: &str| text.replace(from, to);
            match outcome(fused(4, 1, stage), planted, |_| ()) {
                Ok(error) => assert!(error > 1e-3, "{what}, staged {stage}: {error:e}"),
                Err(e) => assert!(e.contains("out of bounds"), "{what}, staged {stage}: {e}"),
            }
        }
    }
}

#[test]
fn too_little_threadgroup_memory_is_found() {
    let found = outcome(fused(4, 1, true), str::to_string, |plan| {
        plan.passes[0].threadgroup_bytes -= 16
    });
    assert!(
        found.clone().is_err_and(|e| e.contains("threadgroup")),
        "{found:?}"
    );
}

#[test]
fn the_states_of_every_partition_are_those_of_the_cpu() {
    let [q, _, v] = inputs(21, (2, 4, 2, 3, 37)).unwrap();
    let keys = turning(21, 64, 9).unwrap().keys(37).unwrap();
    // 20 partitions of 2 leave the last one empty.
    for (partitions, route) in [(3, fused(4, 1, true)), (20, fused(8, 1, false))] {
        let g = AttentionGeometry::new_shared_kv("attention_d512_shared_kv", &q, &v, true).unwrap();
        let cut = Partitions::new(37, partitions).unwrap();
        let plan = plan_shared_kv_states(&g, &keys, &cut, SCALE, route).unwrap();
        let operands = [&q, &v, keys.weight(), keys.tables().rows()];
        let packed = flat(&run(&plan, &operands, Mode::Checked).unwrap().0[0]).unwrap();
        let want = AttentionD512::new(SCALE)
            .partitions(partitions)
            .partials_shared_kv(&q, &v, &keys)
            .unwrap();
        let want: Vec<f32> = [want.max(), want.denominator(), want.numerator()]
            .into_iter()
            .flat_map(|t| flat(t).unwrap())
            .collect();
        assert_eq!(packed.len(), want.len());
        for (got, want) in packed.iter().zip(&want) {
            let error = (got - want).abs();
            assert!(error <= 1e-5 * want.abs().max(1.0), "{got} {want}");
        }
    }
}
