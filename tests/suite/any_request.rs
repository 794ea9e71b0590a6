//! Whatever is asked of the ops: the right numbers, or an error that says whose it is; never a panic.

use crate::attention_support::{max_error, oracle, refusal, SCALE};
use crate::common::numeric::normal;
use candle::{DType, Device, Result, Tensor};
use gem::attention::CpuKernel;
use gem::{AttentionD512, FusedProjection};
use proptest::prelude::*;
use std::panic::{catch_unwind, AssertUnwindSafe};

fn float() -> impl Strategy<Value = DType> {
    prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::BF16)]
}

fn any_dtype() -> impl Strategy<Value = DType> {
    prop_oneof![
        6 => float(),
        1 => Just(DType::F64),
        1 => Just(DType::U32),
        1 => Just(DType::I64),
        1 => Just(DType::U8),
    ]
}

/// How a tensor lies in memory.
#[derive(Debug, Clone, Copy)]
enum Lay {
    Contiguous,
    /// `(batch, rows, heads, dim)` seen with heads first.
    RowsFirst,
    /// A view of a larger cache, with NaN around it.
    Cache(usize, usize),
    /// Some columns of a wider row, as a block of a fused projection.
    Columns(usize),
}

fn lay() -> impl Strategy<Value = Lay> {
    prop_oneof![
        Just(Lay::Contiguous),
        Just(Lay::RowsFirst),
        (0usize..5, 0usize..40).prop_map(|(before, after)| Lay::Cache(before, after)),
        (1usize..70).prop_map(Lay::Columns),
    ]
}

/// The same values as `t`, `(batch, heads, rows, dim)`, lying otherwise.
fn laid(t: &Tensor, lay: Lay) -> Result<Tensor> {
    let (batch, heads, rows, dim) = t.dims4()?;
    let nan = |shape: (usize, usize, usize, usize)| {
        Tensor::full(f32::NAN, shape, &Device::Cpu)?.to_dtype(t.dtype())
    };
    match lay {
        Lay::Contiguous => Ok(t.clone()),
        Lay::RowsFirst => t.transpose(1, 2)?.contiguous()?.transpose(1, 2),
        Lay::Cache(before, after) => {
            let around = |n| nan((batch, heads, n, dim));
            Tensor::cat(&[&around(before)?, t, &around(after)?], 2)?.narrow(2, before, rows)
        }
        Lay::Columns(n) => {
            let beside = nan((batch, heads, rows, n))?;
            Tensor::cat(&[&beside, t, &beside], 3)?.narrow(3, n, dim)
        }
    }
}

fn kernel() -> impl Strategy<Value = CpuKernel> {
    let available = CpuKernel::ALL.into_iter().filter(|k| k.is_available());
    proptest::sample::select(available.collect::<Vec<_>>())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn attention_of_any_shape_type_layout_and_kernel_is_that_of_f64(
        (batch, kv_heads, group) in (1usize..3, 1usize..4, 1usize..10),
        (q_len, more) in (1usize..6, 0usize..90),
        (q_dtype, k_dtype, v_dtype) in (float(), float(), float()),
        (q_lay, k_lay, v_lay) in (lay(), lay(), lay()),
        (causal, partitions, kernel) in (any::<bool>(), 1usize..40, kernel()),
        seed in 0u64..1000,
    ) {
        let kv_len = q_len + more;
        let made = |seed, heads, rows, dtype| normal(seed, (batch, heads, rows, 512), dtype).unwrap();
        let q = made(seed, group * kv_heads, q_len, q_dtype);
        let (k, v) = (made(seed + 1, kv_heads, kv_len, k_dtype), made(seed + 2, kv_heads, kv_len, v_dtype));
        let want = oracle(&q, &k, &v, SCALE as f64, causal).unwrap();
        let op = AttentionD512::new(SCALE).causal(causal).partitions(partitions).cpu_kernel(kernel);
        let (q, k, v) = (laid(&q, q_lay).unwrap(), laid(&k, k_lay).unwrap(), laid(&v, v_lay).unwrap());
        // Finished in f32, so that no rounding of the result hides an error.
        let got = op.partials(&q, &k, &v).unwrap().finish(DType::F32).unwrap();
        let error = max_error(&got, &want).unwrap();
        prop_assert!(error < 2e-6, "{error:e}");
        let out = op.forward(&q, &k, &v).unwrap();
        prop_assert_eq!(out.dims(), q.dims());
        prop_assert_eq!(out.dtype(), q_dtype);
    }
}

/// Sizes around what the op takes, zero among them.
fn dims() -> impl Strategy<Value = Vec<usize>> {
    let last = prop_oneof![6 => Just(512usize), 1 => Just(256), 1 => Just(511), 1 => Just(0)];
    let first = proptest::collection::vec(0usize..5, 0..5);
    (first, last).prop_map(|(mut dims, last)| {
        dims.push(last);
        dims
    })
}

/// Such a tensor, perhaps with a stride of 0, or with its last dimension not next to each other.
fn any_tensor() -> impl Strategy<Value = Tensor> {
    (dims(), any_dtype(), 0usize..4).prop_map(|(dims, dtype, how)| {
        let zeros = Tensor::zeros(dims.clone(), dtype, &Device::Cpu).unwrap();
        let rank = dims.len();
        match how {
            0 if rank >= 2 => zeros.transpose(rank - 1, rank - 2).unwrap(),
            1 => Tensor::zeros((), dtype, &Device::Cpu)
                .unwrap()
                .broadcast_as(dims)
                .unwrap(),
            _ => zeros,
        }
    })
}

/// What `f` comes to; a panic is a failure.
fn outcome(
    f: impl FnOnce() -> Result<Tensor>,
) -> std::result::Result<Result<Tensor>, TestCaseError> {
    catch_unwind(AssertUnwindSafe(f)).map_err(|_| TestCaseError::fail("panicked"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn any_request_of_attention_is_answered_or_refused_in_its_name(
        (q, k, v) in (any_tensor(), any_tensor(), any_tensor()),
        scale in prop_oneof![4 => Just(1f32), 1 => any::<f32>()],
        partitions in prop_oneof![Just(None), (0usize..70).prop_map(Some), Just(Some(usize::MAX))],
        causal in any::<bool>(),
    ) {
        let op = AttentionD512::new(scale).causal(causal);
        let op = match partitions {
            Some(partitions) => op.partitions(partitions),
            None => op,
        };
        let checked = op.check(&q, &k, &v).map(|_| ());
        let result = outcome(|| op.forward(&q, &k, &v))?;
        match &result {
            // All inputs are 0, and so is any average of them.
            Ok(out) => prop_assert!(out.dims() == q.dims() && max_error(out, &vec![0.0; q.elem_count()]).unwrap() == 0.0),
            Err(_) => {
                let why = refusal(op.forward(&q, &k, &v));
                prop_assert!(why.starts_with("attention_d512: "), "{why}");
            }
        }
        prop_assert_eq!(checked.is_ok(), result.is_ok());
        let states = outcome(|| op.partials(&q, &k, &v)?.finish(DType::F32))?;
        prop_assert!(states.is_ok() || result.is_err() || partitions == Some(usize::MAX));
    }

    #[test]
    fn any_request_of_a_projection_is_answered_or_refused_in_its_name(
        xs in any_tensor(),
        weights in proptest::collection::vec(any_tensor(), 0..4),
    ) {
        let names = ["a", "b", "c"];
        let blocks: Vec<(&str, &Tensor)> = names.into_iter().zip(&weights).collect();
        let result = outcome(|| {
            let results = FusedProjection::pack(&blocks)?.forward(&xs)?;
            results.iter().try_for_each(|block| block.map(|_| ()))?;
            Ok(results.packed().clone())
        })?;
        match &result {
            Ok(out) => prop_assert_eq!(max_error(out, &vec![0.0; out.elem_count()]).unwrap(), 0.0),
            Err(e) => {
                let why = e.to_string();
                prop_assert!(why.starts_with("fused_projection: "), "{why}");
            }
        }
    }
}
