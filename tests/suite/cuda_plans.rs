//! Plans for CUDA: what a device must be able to launch, without one.

use crate::attention_support::refusal;
use crate::qsa_support::{norms, state_at, Rows};
use candle::{DType, Device, Tensor};
use gem::attention::gpu::cuda::{plan, Chip};
use gem::attention::gpu::Route;
use gem::attention::plan::Partitions;
use gem::attention::{AttentionGeometry, RotaryKeys, RotaryTables};
use gem::backend::plan::{Plan, Source};
use gem::projection::gpu::{cuda_route, CudaRoute};
use gem::projection::ProjectionGeometry;
use gem::qsa::prep::geometry::PrepGeometry;
use gem::qsa::prep::gpu as prep;
use gem::qsa::QsaChunk;

const H200: Chip = Chip {
    multiprocessors: 132,
    shared_bytes: 232_448,
};

fn geometry(
    (batch, q_heads, kv_heads, q_len, kv_len): (usize, usize, usize, usize, usize),
    q: DType,
    kv: DType,
) -> AttentionGeometry {
    // One row, broadcast: the shape is what counts.
    let tensor = |shape: (usize, usize, usize, usize), dtype| {
        let row = Tensor::zeros((1, 1, 1, 512), dtype, &Device::Cpu).unwrap();
        row.broadcast_as(shape).unwrap()
    };
    let q = tensor((batch, q_heads, q_len, 512), q);
    let kv = tensor((batch, kv_heads, kv_len, 512), kv);
    AttentionGeometry::new("attention_d512", &q, &kv, &kv, true).unwrap()
}

fn planned(g: &AttentionGeometry, chip: Chip, route: Route) -> candle::Result<Plan> {
    let partitions = Partitions::new(g.kv_len, chip.partitions(g, None)).unwrap();
    plan(g, None, chip, &partitions, 1.0, route, false)
}

#[test]
fn one_block_of_a_long_decode_is_on_every_multiprocessor() {
    let g = geometry((1, 32, 4, 1, 131_072), DType::BF16, DType::BF16);
    let plan = planned(&g, H200, Route::default()).unwrap();
    assert_eq!(plan.passes[0].threadgroups, [33, 4, 1]);
    assert_eq!(plan.passes[0].entry, "attention_d512_matrix_bf16_rows8");
    assert_eq!(plan.passes[1].entry, "attention_states_finish");
    assert_eq!(plan.passes[1].threadgroups, [32, 4, 1]);
}

#[test]
fn few_multiprocessors_idle_whatever_the_batch() {
    for batch in 1..=70 {
        let g = geometry((batch, 32, 4, 1, 65_536), DType::F32, DType::F32);
        let plan = planned(&g, H200, Route::default()).unwrap();
        let [partitions, heads, _] = plan.passes[0].threadgroups;
        let turns = (partitions * heads).div_ceil(132);
        let busy = (partitions * heads) as f64 / (turns * 132) as f64;
        assert!(busy > 0.8, "batch {batch}: {partitions} partitions, {busy}");
    }
}

#[test]
fn a_short_sequence_is_not_cut_into_crumbs() {
    let g = geometry((1, 32, 4, 1, 100), DType::F32, DType::F32);
    assert_eq!(H200.partitions(&g, None), 4);
    let g = geometry((1, 32, 4, 1, 1), DType::F32, DType::F32);
    assert_eq!(H200.partitions(&g, None), 1);
}

#[test]
fn every_plan_fits_the_shared_memory_and_the_threads_of_its_device() {
    for shared_bytes in [232_448, 166_912, 101_376] {
        let chip = Chip {
            shared_bytes,
            ..H200
        };
        for group in [1, 2, 4, 6, 8, 16, 40] {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let g = geometry((1, group, 1, 1, 5000), dtype, dtype);
                let first = &planned(&g, chip, Route::default()).unwrap().passes[0];
                assert!(first.threadgroup_bytes <= shared_bytes, "{first:?}");
                assert!(first.threads.is_multiple_of(32) && first.threads <= 256);
                let together: u32 = match first.entry.split_once("_rows") {
                    Some((_, rows)) => rows.parse().unwrap(),
                    None => 64,
                };
                assert!(first.threadgroups[2] * together >= group as u32);
            }
        }
    }
}

#[test]
fn the_matrix_units_are_for_half_types_in_one_type_and_rows_that_see_every_key() {
    let entry = |g| planned(&g, H200, Route::default()).unwrap().passes[0].entry;
    let shape = (1, 8, 1, 1, 100);
    for (q, kv, want) in [
        (DType::F16, DType::F16, "attention_d512_matrix_f16_rows8"),
        (DType::F32, DType::F16, "attention_d512_partial_f16_rows8"),
        (DType::F32, DType::F32, "attention_d512_partial_f32_rows8"),
    ] {
        assert_eq!(entry(geometry(shape, q, kv)), want);
    }
}

#[test]
fn many_rows_and_causal_ones_share_tiles_of_the_matrix_units() {
    let causal = geometry((1, 8, 1, 2, 100), DType::BF16, DType::BF16);
    let many = geometry((1, 40, 1, 1, 100), DType::F16, DType::F16);
    let first = |g, chip| planned(g, chip, Route::default()).unwrap().passes[0].clone();
    assert_eq!(first(&causal, H200).entry, "attention_d512_tiled_bf16");
    assert_eq!(first(&many, H200).entry, "attention_d512_tiled_f16");
    assert_eq!(first(&causal, H200).threads, 256);
    // Where the rows of q do not fit: the f32 units for causal rows, the few rows of the other kernels for those that see every key.
    let small = Chip {
        shared_bytes: 101_376,
        ..H200
    };
    assert_eq!(
        first(&causal, small).entry,
        "attention_d512_partial_bf16_rows16"
    );
    assert_eq!(
        first(&many, small).entry,
        "attention_d512_matrix_f16_rows16"
    );
    // 512 positions of 8 heads on 4 KV heads are 256 blocks: two turns of 132 multiprocessors, with one partition.
    let prompt = geometry((1, 32, 4, 512, 8704), DType::BF16, DType::BF16);
    assert_eq!(first(&prompt, H200).threadgroups, [1, 4, 64]);
    let plan = planned(&prompt, H200, Route::default()).unwrap();
    assert_eq!(plan.passes[0].entry, "attention_d512_tiled_bf16_whole");
    assert_eq!((plan.passes.len(), plan.scratch.len()), (1, 0));
    // 8 positions are 4 blocks: partitions fill the rest.
    let few = geometry((1, 32, 4, 8, 8704), DType::BF16, DType::BF16);
    assert_eq!(first(&few, H200).threadgroups, [30, 4, 1]);
}

#[test]
fn what_cuda_has_no_kernel_for_is_refused_with_the_reason() {
    let f32s = geometry((1, 8, 1, 1, 100), DType::F32, DType::F32);
    insta::assert_snapshot!(
        refusal(planned(&f32s, H200, Route::Matrix)),
        @"attention_d512: the matrix route is for f16 and bf16, got F32"
    );
    let causal = geometry((1, 8, 1, 2, 100), DType::BF16, DType::BF16);
    let small = Chip {
        shared_bytes: 101_376,
        ..H200
    };
    insta::assert_snapshot!(
        refusal(planned(&causal, small, Route::Matrix)),
        @"attention_d512: the matrix route needs 111360 bytes of shared memory for causal rows, this device has 101376"
    );
    insta::assert_snapshot!(
        refusal(planned(&f32s, H200, Route::Staged)),
        @"attention_d512: CUDA has no kernels for Staged, want the default route or the matrix route"
    );
    let small = Chip {
        shared_bytes: 10_000,
        ..H200
    };
    insta::assert_snapshot!(
        refusal(planned(&f32s, small, Route::default())),
        @"attention_d512: a block needs 18944 bytes of shared memory, this device has 10000"
    );
}

#[test]
fn a_projection_is_for_cublas_where_that_is_faster_and_can_read_the_rows() {
    let route = |(m, stride), x, w| {
        let rows = |n, dtype| Tensor::zeros((n, 64), dtype, &Device::Cpu).unwrap();
        let x = match stride {
            0 => rows(1, x).broadcast_as((m, 64)).unwrap(),
            _ => rows(m, x),
        };
        let g = ProjectionGeometry::new("fused_projection", &x, &rows(48, w)).unwrap();
        match cuda_route(&g).unwrap() {
            CudaRoute::Library => "cuBLAS".to_string(),
            CudaRoute::Kernels(plan) => {
                let pass = &plan.passes[0];
                format!("{} {:?}", pass.entry, pass.threadgroups)
            }
        }
    };
    for (rows, x, w, want) in [
        ((1, 64), DType::BF16, DType::BF16, "cuBLAS"),
        ((9, 64), DType::F16, DType::F16, "cuBLAS"),
        ((9, 64), DType::F32, DType::F32, "cuBLAS"),
        // A few rows of f32, two dtypes, rows less far apart than they are long.
        (
            (1, 64),
            DType::F32,
            DType::F32,
            "projection_f32_rows1 [3, 1, 1]",
        ),
        (
            (4, 64),
            DType::F32,
            DType::F32,
            "projection_f32_rows4 [3, 1, 1]",
        ),
        (
            (9, 64),
            DType::F32,
            DType::BF16,
            "projection_f32_bf16_rows8 [3, 2, 1]",
        ),
        (
            (9, 0),
            DType::F16,
            DType::F16,
            "projection_f16_rows8 [3, 2, 1]",
        ),
    ] {
        assert_eq!(route(rows, x, w), want, "{rows:?} {x:?} {w:?}");
    }
}

#[test]
fn qsa_prep_is_the_plan_of_metal_with_one_kernel_for_all_strides() {
    let (state, norms) = (state_at(2).unwrap(), norms().unwrap());
    let chunk = QsaChunk::new(2, 9, &Device::Cpu).unwrap();
    let fused = Rows::fused(3, 9).unwrap();
    for (dtype, entry) in [(DType::F32, "qsa_prep_f32"), (DType::F16, "qsa_prep_f16")] {
        let fused = fused.clone().q_as(dtype).unwrap();
        for rows in [
            fused.clone(),
            fused.in_1152().unwrap(),
            fused.separate().unwrap(),
        ] {
            let g = PrepGeometry::new(&rows.inputs(), &norms, &chunk, &state).unwrap();
            let (metal, mut cuda) = (prep::plan(&g), prep::plan_cuda(&g));
            let pass = &mut cuda.passes[0];
            assert_eq!((pass.source, pass.entry), (Source::CudaQsaPrep, entry));
            (pass.source, pass.entry) = (metal.passes[0].source, metal.passes[0].entry);
            assert_eq!(cuda, metal);
        }
    }
}

/// Kernels as `cuda/*.cu` spells them, macros applied.
fn kernels() -> Vec<String> {
    let types = ["f32", "f16", "bf16"];
    let mut all: Vec<String> = ["finish", "merge", "pack", "log_sum_exp"]
        .map(|op| format!("attention_states_{op}"))
        .into();
    for rows in [4, 8, 16] {
        for name in types {
            all.push(format!("attention_d512_partial_{name}_rows{rows}"));
            for blocks in [1, 2] {
                all.push(format!(
                    "attention_d512_shared_kv_partial_{name}_rows{rows}_blocks{blocks}"
                ));
            }
        }
    }
    for rows in [8, 16] {
        for name in &types[1..] {
            all.push(format!("attention_d512_matrix_{name}_rows{rows}"));
            all.push(format!("attention_d512_shared_kv_matrix_{name}_rows{rows}"));
        }
    }
    for op in ["attention_d512", "attention_d512_shared_kv"] {
        for name in &types[1..] {
            all.push(format!("{op}_tiled_{name}"));
            all.push(format!("{op}_tiled_{name}_whole"));
        }
    }
    all
}

#[test]
fn rebuilt_keys_have_a_plan_for_every_type_and_number_of_pairs() {
    let known = kernels();
    for pairs in [0, 64, 128, 129, 256] {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (q_len, count) in [(1, 3), (3, 3), (3, 1)] {
                let g = geometry((1, 8, 1, q_len, 100), dtype, dtype);
                let frequencies = vec![0.5; pairs];
                let tables = RotaryTables::new(&frequencies, 100, &Device::Cpu).unwrap();
                let weight = Tensor::ones(512, DType::F32, &Device::Cpu).unwrap();
                let keys = RotaryKeys::new(&weight, &tables).unwrap();
                let partitions = Partitions::new(100, count).unwrap();
                for states in [false, true] {
                    let plan = plan(
                        &g,
                        Some(&keys),
                        H200,
                        &partitions,
                        1.0,
                        Route::default(),
                        states,
                    );
                    for pass in plan.unwrap().passes {
                        assert!(known.iter().any(|k| k == pass.entry), "{}", pass.entry);
                        assert!(pass.threadgroup_bytes <= H200.shared_bytes);
                    }
                }
            }
        }
    }
}

#[test]
fn every_source_for_cuda_is_whole() {
    for source in Source::CUDA {
        let text = source.whole();
        let local = text.lines().find(|line| line.starts_with("#include \""));
        assert_eq!(local, None, "{}", source.file());
    }
}
