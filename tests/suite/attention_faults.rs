//! Faults that were reported against other implementations of this op.

use candle::{DType, Device, Result, Tensor};
use gem::attention_d512;

use crate::attention_support::{bits, flat, max_error, normal, oracle, SCALE};

/// ml-explore/mlx#4431: the batch index was missing from the K/V pointer, so every row read batch 0.
#[test]
fn each_batch_row_and_head_reads_its_own_values_and_equals_its_run_alone() -> Result<()> {
    for len in [1, 1023, 1024, 2048, 8192] {
        let q = normal(1, (3, 32, 1, 512), DType::F32)?;
        let k = normal(2, (3, 4, len, 512), DType::F32)?;
        let ids: Vec<f32> = (0..12).map(|i| (10 * (i / 4) + i % 4 + 1) as f32).collect();
        let v =
            Tensor::from_vec(ids, (3, 4, 1, 1), &Device::Cpu)?.broadcast_as((3, 4, len, 512))?;
        let v = v.contiguous()?;
        let out = attention_d512(&q, &k, &v, SCALE)?;
        for (i, row) in flat(&out)?.chunks(512).enumerate() {
            let want = (10 * (i / 32) + i % 32 / 8 + 1) as f32;
            assert!(
                row.iter().all(|x| (x - want).abs() < want * 1e-6),
                "{len} {i}: {}",
                row[0]
            );
        }
        for b in 0..3 {
            let one = |t: &Tensor| t.narrow(0, b, 1);
            let alone = attention_d512(&one(&q)?, &one(&k)?, &one(&v)?, SCALE)?;
            assert_eq!(bits(&alone)?, bits(&one(&out)?)?, "{len} {b}");
        }
    }
    Ok(())
}

/// huggingface/candle#3727: sums kept in the half type stall, and above 65504 become infinite.
#[test]
fn long_sums_are_not_kept_in_the_half_type() -> Result<()> {
    for (dtype, len) in [
        (DType::F16, 4096),
        (DType::BF16, 600),
        (DType::F16, 70_000),
        (DType::BF16, 70_000),
    ] {
        let q = Tensor::ones((1, 2, 1, 512), dtype, &Device::Cpu)?;
        let k = Tensor::full(0.25f32, (1, 1, len, 512), &Device::Cpu)?.to_dtype(dtype)?;
        let v = Tensor::ones((1, 1, len, 512), dtype, &Device::Cpu)?;
        for x in flat(&attention_d512(&q, &k, &v, SCALE)?)? {
            assert!((x - 1.0).abs() <= 2e-3, "{dtype:?} {len}: {x}");
        }
    }
    Ok(())
}

/// Uniform attention over V = position is the mean of the visible positions: a missing or doubled causal bound shows.
#[test]
fn query_rows_average_exactly_the_positions_up_to_their_own() -> Result<()> {
    let (q_len, kv_len) = (70, 200);
    let q = normal(1, (1, 8, q_len, 512), DType::F32)?;
    let k = Tensor::zeros((1, 2, kv_len, 512), DType::F32, &Device::Cpu)?;
    let v = Tensor::arange(0f32, kv_len as f32, &Device::Cpu)?
        .reshape((1, 1, kv_len, 1))?
        .broadcast_as((1, 2, kv_len, 512))?
        .contiguous()?;
    let out = attention_d512(&q, &k, &v, 1.0)?;
    for (i, row) in flat(&out)?.chunks(512).enumerate() {
        let position = kv_len - q_len + i % q_len;
        let want = position as f32 / 2.0;
        assert!(
            row.iter().all(|x| (x - want).abs() < 1e-4),
            "{position}: {}",
            row[0]
        );
    }
    Ok(())
}

/// huggingface/candle#3625: at some total lengths a causal row lost all its scores and became NaN.
#[test]
fn no_total_length_gives_a_nan_or_another_row() -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        let q = normal(1, (1, 16, 300, 512), dtype)?;
        let k = normal(2, (1, 2, 300, 512), dtype)?;
        let v = normal(3, (1, 2, 300, 512), dtype)?;
        // A row sees the keys up to its own, so that those of every length are among those of the longest.
        let want = oracle(&q, &k, &v, SCALE as f64, true)?;
        for len in 1..=300usize {
            for q_len in [len, len.min(37)] {
                let (q, k) = (q.narrow(2, len - q_len, q_len)?, k.narrow(2, 0, len)?);
                let out = flat(&attention_d512(&q, &k, &v.narrow(2, 0, len)?, SCALE)?)?;
                for (i, got) in out.chunks(512).enumerate() {
                    let row = i / q_len * 300 + len - q_len + i % q_len;
                    let want = &want[512 * row..][..512];
                    // No NaN passes.
                    let near = |(got, want): (&f32, &f64)| (*got as f64 - want).abs() <= 2e-2;
                    assert!(
                        got.iter().zip(want).all(near),
                        "{dtype:?}, row {i} of {q_len} of {len}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// trymirai/uzu#412: no tile of some types and lengths fitted, and nothing was launched.
#[test]
fn every_type_has_a_result_at_one_and_at_several_query_rows() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for q_len in [1, 2, 9, 64] {
            let made = |seed, heads, rows| normal(seed, (2, heads, rows, 512), dtype);
            let (q, k, v) = (made(1, 8, q_len)?, made(2, 2, 100)?, made(3, 2, 100)?);
            let want = oracle(&q, &k, &v, SCALE as f64, true)?;
            let error = max_error(&attention_d512(&q, &k, &v, SCALE)?, &want)?;
            // Half a step of the type of the result, at values up to 2.
            let bound = match dtype {
                DType::F32 => 2e-6,
                DType::F16 => 5e-4,
                _ => 4e-3,
            };
            assert!(error <= bound, "{dtype:?}, {q_len} rows: off by {error:e}");
        }
    }
    Ok(())
}
