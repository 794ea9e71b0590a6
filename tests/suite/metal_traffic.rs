//! How many bytes each route moves, counted by the harness, not asserted from the design.

use crate::attention_support::{inputs, SCALE};
use crate::metal_support::Call;
use gem::attention::gpu::{Route, Tiling};
use gem::backend::plan::{Binding, Slot};
use msl::{Mode, Stats};

/// Bytes issued and different bytes, of K and V, of all device memory, and of threadgroup memory.
#[derive(Debug, Default)]
struct Moved {
    kv_issued: u64,
    kv_unique: u64,
    device: u64,
    threadgroup: u64,
}

const GROUP: usize = 8;

fn moved(route: Route, kv_len: usize) -> (Moved, Vec<Stats>) {
    let qkv = inputs(1, (1, GROUP, 1, 1, kv_len)).unwrap();
    let call = Call {
        qkv: qkv.each_ref(),
        scale: SCALE,
        partitions: 32,
        causal: true,
        route,
    };
    let plan = call.plan().unwrap();
    let stats = call.run(Mode::Checked).unwrap().stats;
    let mut moved = Moved::default();
    for (pass, stats) in plan.passes.iter().zip(&stats) {
        let memory = stats.memory.as_ref().unwrap();
        for (index, binding) in (0..).zip(&pass.buffers) {
            if matches!(binding, Binding::Read(Slot::Input(1 | 2))) {
                moved.kv_issued += memory.device[&index].read.bytes;
                moved.kv_unique += memory.device[&index].read.unique_bytes;
            }
        }
        moved.device += memory.device_bytes();
        moved.threadgroup += memory.threadgroup.read.bytes + memory.threadgroup.written.bytes;
    }
    (moved, stats)
}

fn fused(tokens: u32, heads: u32, stage: bool) -> Route {
    Route::Fused(Tiling {
        tokens,
        heads,
        stage,
    })
}

const KV_LEN: usize = 640;
const KV_BYTES: u64 = 2 * KV_LEN as u64 * 512 * 4;

#[test]
fn the_staged_and_the_matrix_routes_read_the_cache_once() {
    for route in [
        fused(4, 1, true),
        fused(8, 1, true),
        fused(4, 2, true),
        Route::Matrix,
        Route::Staged,
    ] {
        let (moved, _) = moved(route, KV_LEN);
        assert_eq!(moved.kv_unique, KV_BYTES, "{route:?}");
        // The matrix route reads the last block of a partition whole.
        assert!(
            moved.kv_issued as f64 <= 1.2 * KV_BYTES as f64,
            "{route:?}: {moved:?}"
        );
        if route != Route::Matrix {
            assert_eq!(moved.kv_issued, KV_BYTES, "{route:?}");
        }
    }
}

#[test]
fn without_staging_every_simd_group_issues_the_cache_and_two_heads_halve_that() {
    let issued = |heads| moved(fused(4, heads, false), KV_LEN).0.kv_issued;
    assert_eq!(issued(1), GROUP as u64 * KV_BYTES);
    assert_eq!(issued(2), GROUP as u64 / 2 * KV_BYTES);
}

/// Each staged byte is written once to threadgroup memory and read by every SIMD group.
#[test]
fn threadgroup_memory_is_read_once_a_simd_group() {
    for (heads, simd_groups) in [(1, 8), (2, 4)] {
        let (moved, _) = moved(fused(4, heads, true), KV_LEN);
        assert_eq!(moved.threadgroup, (1 + simd_groups) * KV_BYTES);
    }
}

/// S is the bytes of all scores: one pass writes them, the softmax moves them five times, 16 tiles of values read them.
#[test]
fn the_unfused_route_moves_its_scores_22_times() {
    let (_, stats) = moved(Route::Staged, KV_LEN);
    let scores = (GROUP * KV_LEN * 4) as u64;
    let traffic = |pass: usize, index: u32| {
        let flow = stats[pass].memory.as_ref().unwrap().device[&index];
        (flow.read.bytes / scores, flow.written.bytes / scores)
    };
    assert_eq!(
        (traffic(0, 2), traffic(1, 0), traffic(2, 1)),
        ((0, 1), (3, 2), (16, 0))
    );
}

/// The table of docs/metal.md: `cargo test --release -- --ignored --nocapture metal_traffic::table_at_8192_keys`
#[test]
#[ignore = "prints a table, takes a minute"]
fn table_at_8192_keys() {
    println!("| route | K and V issued, over once | device bytes, MB | threadgroup bytes, MB |\n|---|---:|---:|---:|");
    let routes = [
        fused(4, 1, true),
        fused(8, 1, true),
        fused(4, 2, true),
        fused(4, 1, false),
        fused(4, 2, false),
        Route::Matrix,
        Route::Staged,
    ];
    for route in routes {
        let (moved, _) = moved(route, 8192);
        // One KV head of the four was run.
        let mb = |bytes: u64| 4.0 * bytes as f64 / 1e6;
        println!(
            "| {route:?} | {:.3} | {:.1} | {:.1} |",
            moved.kv_issued as f64 / moved.kv_unique as f64,
            mb(moved.device),
            mb(moved.threadgroup)
        );
    }
}
