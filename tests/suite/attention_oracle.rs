//! The op against direct softmax in f64.

use candle::{DType, Result};
use gem::attention::CpuKernel;
use gem::{attention_d512, AttentionD512};

use crate::attention_support::{bits, inputs, max_error, oracle, SCALE};

const LENGTHS: [usize; 16] = [
    1, 3, 4, 5, 31, 32, 33, 511, 512, 513, 1023, 1024, 1025, 8191, 8192, 8193,
];
const PARTITIONS: [usize; 7] = [1, 2, 7, 31, 32, 33, 64];

/// Outputs are averages of unit normals, so this is also about relative to one value.
const F32_ERROR: f64 = 2e-6;

fn kernels() -> impl Iterator<Item = CpuKernel> {
    CpuKernel::ALL
        .into_iter()
        .filter(|kernel| kernel.is_available())
}

#[test]
fn decode_equals_the_oracle_at_every_length_with_any_number_of_partitions() -> Result<()> {
    for len in LENGTHS {
        let [q, k, v] = inputs(len as u64, (1, 8, 2, 1, len))?;
        let want = oracle(&q, &k, &v, SCALE as f64, true)?;
        for partitions in PARTITIONS {
            let op = AttentionD512::new(SCALE).partitions(partitions);
            let error = max_error(&op.forward(&q, &k, &v)?, &want)?;
            assert!(error < F32_ERROR, "length {len}, P {partitions}: {error:e}");
        }
        let error = max_error(&attention_d512(&q, &k, &v, SCALE)?, &want)?;
        assert!(error < F32_ERROR, "length {len}, default P: {error:e}");
    }
    Ok(())
}

#[test]
fn every_group_size_batch_and_dtype_equals_the_oracle_on_every_kernel() -> Result<()> {
    for group in [1, 2, 3, 4, 6, 8, 16, 72] {
        for (batch, dtype) in [(1, DType::BF16), (2, DType::F16), (3, DType::F32)] {
            let inputs = inputs(group as u64, (batch, 2 * group, 2, 1, 100))?;
            let [q, k, v] = inputs.map(|t| t.to_dtype(dtype));
            let (q, k, v) = (q?, k?, v?);
            let want = oracle(&q, &k, &v, SCALE as f64, true)?;
            for kernel in kernels() {
                let op = AttentionD512::new(SCALE).cpu_kernel(kernel);
                // Finished in f32 even where q is not, so that no rounding hides an error.
                let got = op.partials(&q, &k, &v)?.finish(DType::F32)?;
                let error = max_error(&got, &want)?;
                assert!(
                    error < F32_ERROR,
                    "group {group}, {dtype:?}, {kernel:?}: {error:e}"
                );
                assert_eq!(
                    bits(&op.forward(&q, &k, &v)?)?,
                    bits(&got.to_dtype(dtype)?)?
                );
            }
        }
    }
    Ok(())
}

#[test]
fn more_partitions_than_keys_cost_nothing_and_change_nothing() -> Result<()> {
    let [q, k, v] = inputs(3, (1, 8, 1, 1, 40))?;
    let op = AttentionD512::new(SCALE);
    let want = bits(&op.partitions(40).forward(&q, &k, &v)?)?;
    assert_eq!(bits(&op.partitions(1 << 40).forward(&q, &k, &v)?)?, want);
    Ok(())
}

#[test]
fn several_query_rows_see_the_keys_up_to_their_own_position() -> Result<()> {
    for (q_len, kv_len) in [
        (1, 1),
        (2, 2),
        (2, 9),
        (5, 64),
        (7, 130),
        (64, 64),
        (100, 133),
    ] {
        for group in [1, 3, 8] {
            let [q, k, v] = inputs(q_len as u64, (2, 2 * group, 2, q_len, kv_len))?;
            let want = oracle(&q, &k, &v, SCALE as f64, true)?;
            for kernel in kernels() {
                for partitions in [None, Some(1), Some(5)] {
                    let mut op = AttentionD512::new(SCALE).cpu_kernel(kernel);
                    if let Some(partitions) = partitions {
                        op = op.partitions(partitions);
                    }
                    let error = max_error(&op.forward(&q, &k, &v)?, &want)?;
                    assert!(
                        error < F32_ERROR,
                        "{q_len} x {kv_len}, group {group}, {kernel:?}, P {partitions:?}: {error:e}"
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn without_causality_every_row_sees_every_key_even_if_there_are_fewer() -> Result<()> {
    for (q_len, kv_len) in [(3, 1), (20, 7), (5, 200)] {
        let [q, k, v] = inputs(5, (1, 4, 1, q_len, kv_len))?;
        let want = oracle(&q, &k, &v, SCALE as f64, false)?;
        let op = AttentionD512::new(SCALE).causal(false);
        let error = max_error(&op.forward(&q, &k, &v)?, &want)?;
        assert!(error < F32_ERROR, "{q_len} x {kv_len}: {error:e}");
    }
    Ok(())
}

#[test]
fn every_mix_of_dtypes_is_exact_up_to_the_rounding_of_the_result() -> Result<()> {
    let dtypes = [
        (DType::F32, F32_ERROR),
        (DType::F16, 5e-4),
        (DType::BF16, 4e-3),
    ];
    for (q_dtype, rounding) in dtypes {
        for (k_dtype, _) in dtypes {
            for (v_dtype, _) in dtypes {
                for q_len in [1, 9] {
                    let [q, k, v] = inputs(11, (1, 16, 2, q_len, 333))?;
                    let (q, k, v) = (
                        q.to_dtype(q_dtype)?,
                        k.to_dtype(k_dtype)?,
                        v.to_dtype(v_dtype)?,
                    );
                    let want = oracle(&q, &k, &v, SCALE as f64, true)?;
                    for kernel in kernels() {
                        let op = AttentionD512::new(SCALE).cpu_kernel(kernel);
                        let out = op.forward(&q, &k, &v)?;
                        assert_eq!(out.dtype(), q_dtype);
                        let error = max_error(&out, &want)?;
                        assert!(
                            error < rounding,
                            "{q_dtype:?} {k_dtype:?} {v_dtype:?} q_len {q_len} {kernel:?}: {error:e}"
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn extreme_scores_neither_overflow_nor_lose_the_dominant_key() -> Result<()> {
    // Gemma's scale of 1.0 leaves scores of hundreds; one key dominates each row.
    for scale in [1.0f32, 30.0, 1e4, -1e4] {
        let [q, k, v] = inputs(21, (1, 8, 1, 3, 700))?;
        let want = oracle(&q, &k, &v, scale as f64, true)?;
        for kernel in kernels() {
            let op = AttentionD512::new(scale).cpu_kernel(kernel);
            let got = op.forward(&q, &k, &v)?;
            // The weights follow the rounding of scores of this size.
            let tolerance = 1e-5 * (scale.abs() as f64).max(1.0);
            let error = max_error(&got, &want)?;
            assert!(
                error < tolerance.min(0.5),
                "scale {scale}, {kernel:?}: {error:e}"
            );
        }
    }
    Ok(())
}

#[test]
fn kernels_agree_with_the_portable_one() -> Result<()> {
    for (dtype, q_len) in [(DType::F32, 1), (DType::F16, 1), (DType::BF16, 12)] {
        let [q, k, v] = inputs(31, (2, 12, 2, q_len, 1000))?;
        let (k, v) = (k.to_dtype(dtype)?, v.to_dtype(dtype)?);
        let portable = AttentionD512::new(SCALE).cpu_kernel(CpuKernel::Portable);
        let want = portable.forward(&q, &k, &v)?;
        let want: Vec<f64> = crate::attention_support::flat(&want)?
            .into_iter()
            .map(f64::from)
            .collect();
        for kernel in kernels() {
            let op = AttentionD512::new(SCALE).cpu_kernel(kernel);
            let error = max_error(&op.forward(&q, &k, &v)?, &want)?;
            assert!(error < 1e-6, "{dtype:?} {kernel:?}: {error:e}");
        }
    }
    Ok(())
}
