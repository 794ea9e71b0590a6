//! How many bytes each route moves, counted by the harness, not asserted from the design.

use crate::attention_support::{flat, inputs, SCALE};
use crate::candle_decode::{self, Decode};
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

impl Moved {
    /// A pass that reads K and V through the buffers `kv`.
    fn add(&mut self, stats: &Stats, kv: impl Iterator<Item = u32>) {
        let memory = stats.memory.as_ref().unwrap();
        for index in kv {
            self.kv_issued += memory.device[&index].read.bytes;
            self.kv_unique += memory.device[&index].read.unique_bytes;
        }
        self.device += memory.device_bytes();
        self.threadgroup += memory.threadgroup.read.bytes + memory.threadgroup.written.bytes;
    }
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
        let reads_kv =
            |(_, binding): &(u32, &Binding)| matches!(binding, Binding::Read(Slot::Input(1 | 2)));
        let kv = (0..).zip(&pass.buffers).filter(reads_kv);
        moved.add(stats, kv.map(|(index, _)| index));
    }
    (moved, stats)
}

/// candle's kernels on the inputs that [`moved`] takes.
fn moved_by_candle(two_pass: bool, kv_len: usize) -> Moved {
    let [q, k, v] = inputs(1, (1, GROUP, 1, 1, kv_len)).unwrap();
    let decode = Decode {
        heads: GROUP,
        kv_heads: 1,
        tokens: kv_len,
        scale: SCALE,
        q: flat(&q).unwrap(),
        k: flat(&k).unwrap(),
        v: flat(&v).unwrap(),
    };
    let module = candle_decode::compile(Mode::Checked);
    let (_, stats) = match two_pass {
        true => decode.two_pass(&module, &[0]).unwrap(),
        false => decode.one_pass(&module, &[0]).unwrap(),
    };
    let mut moved = Moved::default();
    for (pass, stats) in stats.iter().enumerate() {
        moved.add(stats, (1..=2).filter(|_| pass == 0));
    }
    moved
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
    // One KV head of the four is run.
    let mb = |bytes: u64| 4.0 * bytes as f64 / 1e6;
    let print = |name: &str, moved: &Moved| {
        println!(
            "| {name} | {:.3} | {:.1} | {:.1} |",
            moved.kv_issued as f64 / moved.kv_unique as f64,
            mb(moved.device),
            mb(moved.threadgroup)
        );
    };
    for route in routes {
        print(&format!("{route:?}"), &moved(route, 8192).0);
    }
    for (name, two_pass) in [("sdpa_vector", false), ("sdpa_vector_2pass", true)] {
        print(name, &moved_by_candle(two_pass, 8192));
    }
}

/// What the fused routes are for.
#[test]
fn candle_issues_the_cache_once_for_each_query_head_and_the_fused_route_once() {
    for two_pass in [false, true] {
        let candle = moved_by_candle(two_pass, KV_LEN);
        assert_eq!(candle.kv_unique, KV_BYTES);
        assert_eq!(candle.kv_issued, GROUP as u64 * KV_BYTES);
        let fused = moved(fused(4, 1, true), KV_LEN).0;
        assert_eq!(fused.kv_issued, KV_BYTES);
    }
}
