//! Each fault that the kernels of the projection could have is planted in their text or their plan, and must be found.

use crate::metal_projection::{error_over_bound, operands, plan_for};
use crate::metal_support::{compile, run_plan};
use candle::{DType, Tensor};
use gem::backend::plan::{Binding, Plan};
use gem::projection::gpu::Tile;
use msl::Mode;
use std::panic::catch_unwind;
use std::sync::Arc;

const TILED: Option<Tile> = Some(Tile::ALL[0]);
const DECODE: Option<Tile> = None;

/// Tails of m, n and k, more than one step of k, and rows of x and w at strides of their own.
fn views(tile: Option<Tile>) -> [Tensor; 2] {
    let shape = if tile.is_some() {
        (43, 77, 43)
    } else {
        (5, 13, 141)
    };
    let [x, w] = operands(shape, (DType::F16, DType::F16));
    let wider = |t: &Tensor, by: usize| {
        let k = t.dim(1).unwrap();
        t.pad_with_zeros(1, 0, by).unwrap().narrow(1, 0, k).unwrap()
    };
    [wider(&x, 2), wider(&w, 5)]
}

/// What becomes of a call on a changed text and plan: an error of the harness, or the error of the result over its bound.
fn outcome(
    tile: Option<Tile>,
    text: impl Fn(&str) -> String,
    change: impl Fn(&mut Plan),
) -> Result<f64, String> {
    let [x, w] = views(tile);
    let mut plan = plan_for(&x, &w, tile);
    change(&mut plan);
    let run = run_plan(&plan, &[&x, &w], Mode::Checked, |pass| {
        let changed = text(pass.source.text());
        Arc::new(compile(pass.source, &changed, &[pass.entry], Mode::Checked).unwrap())
    });
    match run {
        Ok((outputs, _)) => {
            let y = outputs[0].reshape((x.dim(0).unwrap(), w.dim(0).unwrap()));
            Ok(error_over_bound(&y.unwrap(), &x, &w))
        }
        Err(e) => Err(e.to_string()),
    }
}

fn same(text: &str) -> String {
    text.to_string()
}

fn assert_found(tile: Option<Tile>, from: &str, to: &str) {
    let planted = |text: &str| {
        assert!(text.contains(from), "the text lacks {from}");
        text.replace(from, to)
    };
    match outcome(tile, planted, |_| ()) {
        Ok(over) => assert!(over > 100.0 || over.is_nan(), "{from}: {over} of the bound"),
        Err(e) => assert!(e.contains("projection.metal"), "{from}: {e}"),
    }
}

#[test]
fn nothing_is_found_where_nothing_was_planted() {
    for tile in [TILED, DECODE] {
        let over = outcome(tile, same, |_| ()).unwrap();
        assert!(over <= 1.0, "{tile:?}: {over} of the bound");
    }
}

#[test]
fn a_missing_barrier_is_a_race_with_both_lines() {
    for kind in ["threadgroup", "simdgroup"] {
        let barrier = format!("{kind}_barrier(mem_flags::mem_threadgroup);");
        for n in 0..2 {
            let without = |text: &str| {
                let (at, _) = text.match_indices(&barrier).nth(n).unwrap();
                format!("{}{}", &text[..at], &text[at + barrier.len()..])
            };
            let error = outcome(TILED, without, |_| ()).expect_err(&barrier);
            assert!(
                error.contains("race") && error.matches("projection.metal").count() >= 2,
                "{barrier} {n}: {error}"
            );
        }
    }
}

#[test]
fn a_barrier_that_orders_other_memory_is_found() {
    assert_found(TILED, "mem_flags::mem_threadgroup", "mem_flags::mem_device");
}

#[test]
fn a_dropped_tail_is_found() {
    // Of rows, columns and k: read past the end, written past the end, left out.
    let faults = [
        (
            "row < rows ? load4(from + row * row_stride, at, depth) : vec4<T>(T(0))",
            "load4(from + row * row_stride, at, depth)",
        ),
        ("at + 4 <= end", "true"),
        ("row + e / 8 < p.m && ", ""),
        (" && column + e % 8 < p.n", ""),
        ("k < p.k; k += DEPTH", "k + DEPTH <= p.k; k += DEPTH"),
        ("i < ROWS * DEPTH / 4", "i < min(rows, ROWS) * DEPTH / 4"),
        (
            "row + 8 <= p.m && column + 8 <= p.n",
            "row < p.m && column < p.n",
        ),
    ];
    for (from, to) in faults {
        assert_found(TILED, from, to);
    }
    let faults = [
        ("at + 4 <= end", "true"),
        ("row < ROWS && row < p.m", "row < ROWS"),
        ("first + DECODE_COLUMNS <= p.n", "true"),
        ("min(r, p.m - 1)", "r"),
    ];
    for (from, to) in faults {
        assert_found(DECODE, from, to);
    }
}

#[test]
fn a_swapped_stride_is_found() {
    for tile in [TILED, DECODE] {
        assert_found(tile, "p.x.row_stride", "p.w.row_stride");
        assert_found(tile, "p.w.row_stride", "p.x.row_stride");
    }
    assert_found(TILED, "ulong(row) * p.n", "ulong(row) * p.k");
}

#[test]
fn too_little_threadgroup_memory_is_found() {
    let found = outcome(TILED, same, |plan| plan.passes[0].threadgroup_bytes -= 16);
    // The padding behind the last row is not used; the 16 bytes before it are.
    assert!(found.is_ok(), "{found:?}");
    let found = outcome(TILED, same, |plan| plan.passes[0].threadgroup_bytes -= 32);
    assert!(
        found.clone().is_err_and(|e| e.contains("threadgroup")),
        "{found:?}"
    );
}

#[test]
fn an_output_that_is_bound_as_an_input_is_found() {
    for tile in [TILED, DECODE] {
        let found = outcome(tile, same, |plan| {
            let binding = &mut plan.passes[0].buffers[2];
            *binding = Binding::Read(binding.slot());
        });
        assert!(
            found.clone().is_err_and(|e| e.contains("buffer 2")),
            "{found:?}"
        );
    }
}

#[test]
fn an_element_that_nobody_writes_is_found() {
    // The runner of the plans panics over it.
    let unwritten = |run: Result<_, Box<dyn std::any::Any + Send>>| {
        let panic = run.map(|_: Result<f64, String>| ()).unwrap_err();
        let message = panic.downcast::<String>().unwrap();
        assert!(message.contains("output 0"), "{message}");
    };
    for tile in [TILED, DECODE] {
        unwritten(catch_unwind(|| {
            outcome(tile, same, |plan| plan.passes[0].threadgroups[0] -= 1)
        }));
    }
    unwritten(catch_unwind(|| {
        let dropped =
            |text: &str| text.replace("column < p.n; column++", "column + 1 < p.n; column++");
        outcome(DECODE, dropped, |_| ())
    }));
}
