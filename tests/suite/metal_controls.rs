//! Each fault that the kernels could have is planted in their text or their plan, and must be found.

use crate::attention_support::{inputs, max_error, oracle, SCALE};
use crate::metal_support::{compile, Call};
use candle::Tensor;
use gem::attention::gpu::{Route, Tiling};
use gem::backend::plan::{Binding, Plan, Source};
use msl::Mode;
use std::sync::Arc;

const STAGED: Route = Route::Fused(Tiling {
    tokens: 4,
    heads: 1,
    stage: true,
});

fn call(qkv: &[Tensor; 3], route: Route) -> Call<'_> {
    Call {
        qkv: qkv.each_ref(),
        scale: SCALE,
        partitions: 3,
        causal: true,
        route,
    }
}

/// What becomes of a call on a changed text and plan: an error of the harness, or the largest error of the result.
fn outcome(
    route: Route,
    text: impl Fn(&str) -> String,
    change: impl Fn(&mut Plan),
) -> Result<f64, String> {
    // So many that every route reuses its threadgroup memory: the unfused values take 32 at a time in 16 partitions.
    let kv_len = if route == Route::Staged { 600 } else { 37 };
    let qkv = inputs(1, (1, 8, 1, 1, kv_len)).unwrap();
    let call = call(&qkv, route);
    let mut plan = call.plan().unwrap();
    change(&mut plan);
    let run = call.run_plan(&plan, Mode::Checked, |pass| {
        Arc::new(
            compile(
                pass.source,
                &text(pass.source.text()),
                &[pass.entry],
                Mode::Checked,
            )
            .unwrap(),
        )
    });
    let want = oracle(&qkv[0], &qkv[1], &qkv[2], SCALE as f64, true).unwrap();
    match run {
        Ok(outcome) => Ok(max_error(&outcome.out, &want).unwrap()),
        Err(e) => Err(e.to_string()),
    }
}

fn same(text: &str) -> String {
    text.to_string()
}

/// `text` with the `n`th occurrence of `from` replaced.
fn replaced(text: &str, from: &str, to: &str, n: usize) -> String {
    let Some((at, _)) = text.match_indices(from).nth(n) else {
        return text.to_string();
    };
    format!("{}{to}{}", &text[..at], &text[at + from.len()..])
}

#[test]
fn nothing_is_found_where_nothing_was_planted() {
    for route in [STAGED, Route::Matrix, Route::Staged] {
        let error = outcome(route, same, |_| ()).unwrap();
        assert!(error < 1e-6, "{route:?}: {error:e}");
    }
}

#[test]
fn a_missing_barrier_is_a_race_with_both_lines() {
    let barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);";
    for (route, file, barriers) in [
        (STAGED, "attention_d512.metal", 2),
        (Route::Matrix, "attention_matrix.metal", 5),
        (Route::Staged, "attention_staged.metal", 6),
    ] {
        for n in 0..barriers {
            let found = outcome(route, |text| replaced(text, barrier, "", n), |_| ());
            let error = found.expect_err(&format!("{route:?}: barrier {n}"));
            assert!(
                error.contains("race") && error.matches(file).count() >= 2,
                "{route:?}, barrier {n}: {error}"
            );
        }
    }
}

#[test]
fn a_barrier_that_orders_other_memory_is_found() {
    let found = outcome(
        STAGED,
        |text| text.replace("mem_flags::mem_threadgroup", "mem_flags::mem_device"),
        |_| (),
    );
    assert!(found.is_err(), "{found:?}");
}

#[test]
fn a_swapped_stride_gives_wrong_numbers_or_leaves_the_buffer() {
    for (from, to) in [
        ("p.k.row_stride", "p.k.head_stride"),
        ("p.v.row_stride", "p.q.row_stride + 4"),
    ] {
        match outcome(STAGED, |text| text.replace(from, to), |_| ()) {
            Ok(error) => assert!(error > 1e-3, "{from} for {to}: {error:e}"),
            Err(e) => assert!(e.contains("out of bounds"), "{e}"),
        }
    }
}

#[test]
fn a_dropped_tail_gives_wrong_numbers() {
    let found = outcome(
        STAGED,
        |text| text.replace("t0 < end; t0 += TILE", "t0 + TILE <= end; t0 += TILE"),
        |_| (),
    );
    assert!(found.clone().unwrap() > 1e-3, "{found:?}");
    // A reducer that handles whole blocks of partitions only.
    let found = outcome(
        STAGED,
        |text| text.replace("i < p.partitions", "i < p.partitions / 2 * 2"),
        |_| (),
    );
    assert!(found.clone().unwrap() > 1e-3, "{found:?}");
}

#[test]
fn too_little_threadgroup_memory_is_found() {
    for route in [STAGED, Route::Matrix, Route::Staged] {
        let found = outcome(route, same, |plan| plan.passes[0].threadgroup_bytes /= 2);
        assert!(
            found.clone().is_err_and(|e| e.contains("threadgroup")),
            "{route:?}: {found:?}"
        );
    }
}

#[test]
fn an_output_that_is_bound_as_an_input_is_found() {
    let found = outcome(STAGED, same, |plan| {
        let binding = &mut plan.passes[0].buffers[5];
        *binding = Binding::Read(binding.slot());
    });
    assert!(
        found.clone().is_err_and(|e| e.contains("buffer 5")),
        "{found:?}"
    );
}

#[test]
fn a_partition_that_writes_nothing_is_found() {
    let found = outcome(
        STAGED,
        |text| {
            replaced(
                text,
                "if (lane == 0) {",
                "if (lane == 0 && begin < end && partition != 1) {",
                0,
            )
        },
        |_| (),
    );
    assert!(found.is_err(), "{found:?}");
}

#[test]
fn every_source_includes_only_the_header() {
    for source in Source::METAL {
        let includes: Vec<_> = source
            .text()
            .lines()
            .filter(|line| line.starts_with("#include"))
            .collect();
        assert_eq!(
            includes,
            ["#include <metal_stdlib>", "#include \"gem.h\""],
            "{}",
            source.file()
        );
    }
}

#[test]
fn the_digest_of_a_plan_changes_with_what_it_would_run() {
    let qkv = inputs(1, (1, 8, 1, 1, 37)).unwrap();
    let plan = call(&qkv, STAGED).plan().unwrap();
    assert_eq!(plan.digest(), call(&qkv, STAGED).plan().unwrap().digest());
    let changes: [fn(&mut Plan); 4] = [
        |plan| plan.passes[0].params[0] ^= 1,
        |plan| plan.passes[1].threadgroups[0] += 1,
        |plan| plan.passes[0].source = Source::AttentionMatrix,
        |plan| plan.scratch[2] += 4,
    ];
    for change in changes {
        let mut changed = plan.clone();
        change(&mut changed);
        assert_ne!(plan.digest(), changed.digest());
    }
}
