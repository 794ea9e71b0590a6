//! Every op on an NVIDIA GPU against the same op on the CPU. Needs the GPU, so these run when asked for:
//! `cargo test --release --features cuda --test suite -- --ignored cuda_device`.

use crate::attention_support::{bits, flat, inputs, normal, SCALE};
use crate::projection_support::{relative_error, weight};
use crate::qsa_support::{differing, norms, state_at, uniform, Rows};
use crate::shared_kv_support::turning;
use candle::{DType, Device, Result, Tensor};
use gem::attention::{RotaryKeys, RotaryTables};
use gem::projection::FusedProjection;
use gem::qsa::{qsa_prep, QsaChunk, QsaNorms, QsaState};
use gem::{attention_d512, attention_d512_shared_kv, AttentionD512, AttentionPartials};

fn gpu() -> Device {
    Device::new_cuda(0).unwrap()
}

/// Largest difference, over the largest value.
fn difference(got: &Tensor, want: &Tensor) -> f32 {
    let (got, want) = (flat(got).unwrap(), flat(want).unwrap());
    assert_eq!(got.len(), want.len());
    let scale = want.iter().fold(1e-30f32, |m, x| m.max(x.abs()));
    got.iter().zip(&want).fold(0f32, |worst, (a, b)| {
        let error = (a - b).abs() / scale;
        if error > worst || error.is_nan() {
            error
        } else {
            worst
        }
    })
}

/// A rounding of the type and what f32 sums differ by.
fn allowed(dtype: DType) -> f32 {
    match dtype {
        DType::F16 => 1e-3,
        DType::BF16 => 8e-3,
        _ => 4e-6,
    }
}

fn moved(tensors: &[Tensor; 3], device: &Device) -> [Tensor; 3] {
    tensors.each_ref().map(|t| t.to_device(device).unwrap())
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn the_gpu_gives_what_the_cpu_gives() {
    let device = gpu();
    let shapes = [
        (1, 8, 1, 1, 1),
        (1, 8, 1, 1, 33),
        (2, 8, 4, 1, 513),
        (1, 6, 1, 1, 100),
        (1, 16, 1, 1, 1000),
        (1, 32, 4, 1, 8193),
        (1, 8, 2, 5, 300),
        (1, 8, 1, 40, 40),
        (1, 4, 1, 1, 31),
        (1, 1, 1, 1, 511),
        (2, 2, 2, 1, 512),
        (1, 32, 4, 1, 8191),
        (1, 32, 4, 64, 1100),
    ];
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for shape in shapes {
            let qkv = inputs(3, shape)
                .unwrap()
                .map(|t| t.to_dtype(dtype).unwrap());
            let [q, k, v] = &qkv;
            let want = attention_d512(q, k, v, SCALE).unwrap();
            let [q, k, v] = &moved(&qkv, &device);
            let got = attention_d512(q, k, v, SCALE).unwrap();
            let off = difference(&got, &want);
            assert!(off <= allowed(dtype), "{dtype:?} {shape:?}: {off:e}");
            assert_eq!(
                bits(&got).unwrap(),
                bits(&attention_d512(q, k, v, SCALE).unwrap()).unwrap()
            );
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn any_number_of_partitions_and_mixed_types_are_right() {
    let device = gpu();
    let qkv = inputs(4, (1, 8, 2, 1, 200)).unwrap();
    let want = attention_d512(&qkv[0], &qkv[1], &qkv[2], SCALE).unwrap();
    let [q, k, v] = &moved(&qkv, &device);
    for partitions in [1, 2, 7, 31, 33, 64, 300] {
        let op = AttentionD512::new(SCALE).partitions(partitions);
        assert!(difference(&op.forward(q, k, v).unwrap(), &want) <= 4e-6);
    }
    let half = |t: &Tensor| t.to_dtype(DType::BF16).unwrap();
    let (cpu_k, cpu_v) = (half(&qkv[1]), half(&qkv[2]));
    let want = attention_d512(&qkv[0], &cpu_k, &cpu_v, SCALE).unwrap();
    let got = attention_d512(q, &half(k), &half(v), SCALE).unwrap();
    assert_eq!(got.dtype(), DType::F32);
    assert!(difference(&got, &want) <= 4e-6);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_view_of_a_cache_gives_the_bits_of_a_copy() {
    let device = gpu();
    let [q, k, v] = moved(&inputs(5, (2, 8, 4, 1, 90)).unwrap(), &device);
    for dtype in [DType::F32, DType::BF16] {
        let [q, k, v] = [&q, &k, &v].map(|t| t.to_dtype(dtype).unwrap());
        let cache = |t: &Tensor| -> Result<Tensor> {
            let nan = (Tensor::ones((2, 4, 100, 512), DType::F32, &device)? * f64::NAN)?;
            // (batch, tokens, heads, dim), transposed, and narrowed.
            let left = nan.narrow(2, 0, 3)?.to_dtype(dtype)?;
            let right = nan.narrow(2, 0, 7)?.to_dtype(dtype)?;
            let all = Tensor::cat(&[&left, t, &right], 2)?;
            all.transpose(1, 2)?
                .contiguous()?
                .transpose(1, 2)?
                .narrow(2, 3, 90)
        };
        let plain = attention_d512(&q, &k, &v, SCALE).unwrap();
        let viewed = attention_d512(&q, &cache(&k).unwrap(), &cache(&v).unwrap(), SCALE).unwrap();
        assert_eq!(bits(&plain).unwrap(), bits(&viewed).unwrap());
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn partial_states_merge_and_finish_on_the_gpu() {
    let device = gpu();
    let qkv = inputs(6, (1, 8, 2, 3, 70)).unwrap();
    let op = AttentionD512::new(SCALE).causal(false).partitions(5);
    let [q, k, v] = &qkv;
    let want = op.forward(q, k, v).unwrap();
    let want_lse = op.partials(q, k, v).unwrap().log_sum_exp().unwrap();
    let [q, k, v] = &moved(&qkv, &device);
    let part = |start, len| {
        op.partials(
            q,
            &k.narrow(2, start, len).unwrap(),
            &v.narrow(2, start, len).unwrap(),
        )
        .unwrap()
    };
    let merged = AttentionPartials::merge(&[part(0, 31), part(31, 39)]).unwrap();
    assert!(difference(&merged.finish(DType::F32).unwrap(), &want) <= 4e-6);
    assert!(difference(&merged.log_sum_exp().unwrap(), &want_lse) <= 4e-6);
    let whole = op.partials(q, k, v).unwrap();
    assert!(difference(&whole.finish(DType::F32).unwrap(), &want) <= 4e-6);
    assert!(difference(&whole.log_sum_exp().unwrap(), &want_lse) <= 4e-6);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rebuilt_keys_give_what_they_give_on_the_cpu() {
    let device = gpu();
    for (pairs, start) in [(64, 0), (1, 7), (129, 3), (256, 1000), (0, 0)] {
        for shape in [(1, 8, 1, 1, 100), (2, 8, 4, 1, 513), (1, 32, 4, 3, 77)] {
            let [q, _, v] = inputs(7, shape).unwrap();
            let turning = turning(8, pairs, start).unwrap();
            let keys = turning.keys(shape.4).unwrap();
            let tables = RotaryTables::new(&turning.frequencies, start + shape.4, &device).unwrap();
            let weight = turning.weight.to_device(&device).unwrap();
            let there = RotaryKeys::new(&weight, &tables).unwrap().at(start);
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let [q, v] = [&q, &v].map(|t| t.to_dtype(dtype).unwrap());
                let want = attention_d512_shared_kv(&q, &v, &keys, SCALE).unwrap();
                let [q, v] = [&q, &v].map(|t| t.to_device(&device).unwrap());
                let got = attention_d512_shared_kv(&q, &v, &there, SCALE).unwrap();
                let off = difference(&got, &want);
                assert!(
                    off <= 2.0 * allowed(dtype),
                    "{dtype:?} {shape:?} {pairs}: {off:e}"
                );
                let op = AttentionD512::new(SCALE);
                let states = op.partials_shared_kv(&q, &v, &there).unwrap();
                let off = difference(&states.finish(dtype).unwrap(), &want);
                assert!(
                    off <= 2.0 * allowed(dtype),
                    "states, {dtype:?} {shape:?}: {off:e}"
                );
            }
        }
    }
}

const PAIRS: [(DType, DType); 5] = [
    (DType::F32, DType::F32),
    (DType::F16, DType::F16),
    (DType::BF16, DType::BF16),
    (DType::F32, DType::F16),
    (DType::F32, DType::BF16),
];

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn projections_are_right_and_a_block_has_the_bits_of_its_own() {
    let device = gpu();
    for (x_type, w_type) in PAIRS {
        for (m, k) in [(1, 5376), (2, 200), (3, 65), (8, 257), (9, 512), (130, 96)] {
            let xs = normal(9, (m, k), x_type).unwrap();
            let (a, b) = (
                weight(10, 130, k, w_type).unwrap(),
                weight(11, 37, k, w_type).unwrap(),
            );
            let all = Tensor::cat(&[&a, &b], 0).unwrap();
            let there = [&xs, &a, &b].map(|t| t.to_device(&device).unwrap());
            let [xs_there, a, b] = &there;
            let both = FusedProjection::pack(&[("a", a), ("b", b)]).unwrap();
            let got = both.forward(xs_there).unwrap();
            let packed = got.packed().to_device(&Device::Cpu).unwrap();
            let error = relative_error(&packed, &xs, &all).unwrap();
            // Of one dtype it is a product of cuBLAS, whose matrix units cut off what does not fit a sum.
            let library = x_type == w_type && (x_type != DType::F32 || m > 4);
            let allowed = if library { 1e-5 } else { 2e-6 };
            assert!(
                error <= allowed,
                "{x_type:?} {w_type:?} {m} x {k}: {error:e}"
            );
            let alone = FusedProjection::pack(&[("b", b)]).unwrap();
            let alone = alone.forward(xs_there).unwrap().get("b").unwrap();
            let together = got.get("b").unwrap().contiguous().unwrap();
            if !library {
                assert_eq!(bits(&together).unwrap(), bits(&alone).unwrap());
            }
            // Rows that begin anywhere, with NaN around them, give the bits of rows of their own.
            let nan = (Tensor::ones((m, 3), DType::F32, &device).unwrap() * f64::NAN).unwrap();
            let nan = nan.to_dtype(x_type).unwrap();
            let wide = Tensor::cat(&[&nan, xs_there, &nan], 1).unwrap();
            let view = both.forward(&wide.narrow(1, 3, k).unwrap()).unwrap();
            if library {
                let view = view.packed().to_device(&Device::Cpu).unwrap();
                let error = relative_error(&view, &xs, &all).unwrap();
                assert!(error <= allowed, "{x_type:?} {m} x {k}: {error:e}");
            } else {
                assert_eq!(
                    bits(view.packed()).unwrap(),
                    bits(got.packed()).unwrap(),
                    "{x_type:?} {w_type:?} {m} x {k}"
                );
            }
        }
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn qsa_prep_has_the_bits_of_the_cpu() -> Result<()> {
    let device = gpu();
    let there = |t: &Tensor| t.to_device(&device);
    let norms_there = QsaNorms::new(
        &there(&uniform(11, 256)?)?,
        &there(&uniform(12, 256)?)?,
        &there(&uniform(13, 128)?)?,
        &there(&uniform(14, 128)?)?,
    )?;
    let here = norms()?;
    for (tokens, pos0) in [(2, 0), (3, 1), (5, 1022), (517, 2047), (1029, 2050)] {
        for dtype in [DType::F32, DType::F16] {
            let fused = Rows::fused(3, tokens)?.q_as(dtype)?;
            for rows in [fused.clone(), fused.in_1152()?, fused.separate()?] {
                let state = state_at(pos0)?;
                let chunk = QsaChunk::new(pos0, tokens, &Device::Cpu)?;
                let want = qsa_prep(&rows.inputs(), &here, &chunk, &state)?;
                let moved = rows.on(&device)?;
                let state = match pos0 {
                    0 => QsaState::start(&device)?,
                    _ => QsaState::new(pos0, &there(&state.tail()?)?, &there(&state.dead()?)?)?,
                };
                let chunk = QsaChunk::new(pos0, tokens, &device)?;
                let got = qsa_prep(&moved.inputs(), &norms_there, &chunk, &state)?;
                assert!(
                    differing(&got, &want).is_empty(),
                    "{tokens} from {pos0} on, {dtype:?}: {:?}",
                    differing(&got, &want)
                );
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_row_of_a_prompt_knows_nothing_of_later_values() {
    let device = gpu();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let qkv = inputs(9, (1, 16, 2, 70, 133))
            .unwrap()
            .map(|t| t.to_dtype(dtype).unwrap());
        let want = attention_d512(&qkv[0], &qkv[1], &qkv[2], SCALE).unwrap();
        let [q, k, v] = &moved(&qkv, &device);
        let last = (Tensor::ones((1, 2, 3, 512), DType::F32, &device).unwrap() * f64::NAN)
            .and_then(|nan| nan.to_dtype(dtype))
            .unwrap();
        let poisoned = Tensor::cat(&[&v.narrow(2, 0, 130).unwrap(), &last], 2).unwrap();
        let got = attention_d512(q, k, &poisoned, SCALE).unwrap();
        let rows = |t: &Tensor, start, len| t.narrow(2, start, len).unwrap();
        let off = difference(&rows(&got, 0, 67), &rows(&want, 0, 67));
        assert!(off <= allowed(dtype), "{dtype:?}: {off:e}");
        let seen = flat(&rows(&got, 67, 3)).unwrap();
        assert!(seen.iter().all(|x| x.is_nan()), "{dtype:?}");
    }
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_call_can_be_recorded_in_a_cuda_graph() {
    use candle::cuda_backend::cudarc::driver::sys::{
        CUgraphInstantiate_flags, CUstreamCaptureMode,
    };
    let device = gpu();
    let Device::Cuda(cuda) = &device else {
        panic!("{device:?} is not CUDA")
    };
    let stream = cuda.cuda_stream();
    for (dtype, q_len) in [(DType::F32, 1), (DType::BF16, 1), (DType::BF16, 40)] {
        let shape = (1, 8, 2, q_len, 1000);
        let there = |seed| {
            moved(&inputs(seed, shape).unwrap(), &device).map(|t| t.to_dtype(dtype).unwrap())
        };
        let ([q, k, v], [other, ..]) = (there(30), there(31));
        // The first call loads its kernels, which no graph can hold.
        let before = bits(&attention_d512(&q, &k, &v, SCALE).unwrap()).unwrap();
        device.synchronize().unwrap();
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).unwrap();
        let out = attention_d512(&q, &k, &v, SCALE);
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap();
        let (out, graph) = (out.unwrap(), graph.unwrap());
        // What is recorded runs on what its inputs hold then.
        q.slice_set(&other, 0, 0).unwrap();
        graph.launch().unwrap();
        let got = bits(&out).unwrap();
        assert_ne!(got, before);
        assert_eq!(
            got,
            bits(&attention_d512(&q, &k, &v, SCALE).unwrap()).unwrap()
        );
    }
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn eight_threads_get_the_bits_of_one() {
    let device = gpu();
    let cases: Vec<_> = (0..8)
        .map(|i| {
            let dtype = [DType::F32, DType::BF16][i % 2];
            let qkv = inputs(20 + i as u64, (1, 8, 2, 1, 100 + 77 * i)).unwrap();
            let [q, k, v] = moved(&qkv, &device).map(|t| t.to_dtype(dtype).unwrap());
            let want = bits(&attention_d512(&q, &k, &v, SCALE).unwrap()).unwrap();
            (q, k, v, want)
        })
        .collect();
    std::thread::scope(|scope| {
        for (q, k, v, want) in &cases {
            scope.spawn(move || {
                for round in 0..200 {
                    let got = bits(&attention_d512(q, k, v, SCALE).unwrap()).unwrap();
                    assert_eq!(&got, want, "round {round}");
                }
            });
        }
    });
}
