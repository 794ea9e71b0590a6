//! Inputs and the oracle of the attention tests.

use candle::{DType, Device, Result, Tensor};
use rand::Rng;
use rand_chacha::rand_core::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// `1 / sqrt(512)`: scores of unit-normal inputs are about unit-normal.
pub const SCALE: f32 = 0.044_194_174;

/// Unit-normal values (sum of twelve uniforms), the same on every machine.
pub fn normal(seed: u64, shape: impl Into<candle::Shape>, dtype: DType) -> Result<Tensor> {
    let shape = shape.into();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let values: Vec<f32> = (0..shape.elem_count())
        .map(|_| (0..12).map(|_| rng.random::<f32>()).sum::<f32>() - 6.0)
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
}

/// q, k and v of `(batch, q_heads, kv_heads, q_len, kv_len)` in f32.
pub fn inputs(
    seed: u64,
    (batch, q_heads, kv_heads, q_len, kv_len): (usize, usize, usize, usize, usize),
) -> Result<[Tensor; 3]> {
    Ok([
        normal(seed, (batch, q_heads, q_len, 512), DType::F32)?,
        normal(seed + 1, (batch, kv_heads, kv_len, 512), DType::F32)?,
        normal(seed + 2, (batch, kv_heads, kv_len, 512), DType::F32)?,
    ])
}

pub fn flat(t: &Tensor) -> Result<Vec<f32>> {
    t.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

pub fn bits(t: &Tensor) -> Result<Vec<u32>> {
    Ok(flat(t)?.into_iter().map(f32::to_bits).collect())
}

/// Direct softmax in f64 over the stored values; shares no code and no order of operations with the op.
pub fn oracle(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64, causal: bool) -> Result<Vec<f64>> {
    let (batch, q_heads, q_len, dim) = q.dims4()?;
    let (_, kv_heads, kv_len, _) = k.dims4()?;
    let (q, k, v) = (flat(q)?, flat(k)?, flat(v)?);
    let mut out = Vec::with_capacity(q.len());
    for (i, q) in q.chunks(dim).enumerate() {
        let (b, head, row) = (i / q_len / q_heads, i / q_len % q_heads, i % q_len);
        let kv_head = b * kv_heads + head * kv_heads / q_heads;
        let of_head = kv_head * kv_len * dim..(kv_head + 1) * kv_len * dim;
        let (k, v) = (&k[of_head.clone()], &v[of_head]);
        let seen = if causal {
            kv_len - q_len + row + 1
        } else {
            kv_len
        };
        let scores: Vec<f64> = k
            .chunks(dim)
            .take(seen)
            .map(|k| {
                scale
                    * q.iter()
                        .zip(k)
                        .map(|(q, k)| *q as f64 * *k as f64)
                        .sum::<f64>()
            })
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut row = vec![0f64; dim];
        for (weight, v) in weights.iter().zip(v.chunks(dim)) {
            for (o, v) in row.iter_mut().zip(v) {
                *o += weight / sum * *v as f64;
            }
        }
        out.extend(row);
    }
    assert_eq!(out.len(), batch * q_heads * q_len * dim);
    Ok(out)
}

pub fn max_error(got: &Tensor, want: &[f64]) -> Result<f64> {
    let got = flat(got)?;
    assert_eq!(got.len(), want.len());
    let mut worst = 0f64;
    for (got, want) in got.iter().zip(want) {
        // A NaN must not hide in a maximum.
        let error = (*got as f64 - want).abs();
        worst = if error > worst || error.is_nan() {
            error
        } else {
            worst
        };
        if worst.is_nan() {
            break;
        }
    }
    Ok(worst)
}

/// The text of an error, without the backtrace that candle adds where the environment asks for one.
pub fn refusal<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => "not refused".to_string(),
        Err(e) => e.to_string().lines().next().unwrap_or_default().to_string(),
    }
}
