//! Inputs and the oracle of the attention tests.

pub use crate::common::numeric::normal;
use crate::common::{message, oracle};
use candle::{DType, Result, Tensor};

/// `1 / sqrt(512)`: scores of unit-normal inputs are about unit-normal.
pub const SCALE: f32 = 0.044_194_174;

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
    let hidden_at_first = k.dim(2)? - q.dim(2)?;
    oracle::attention(q, k, v, scale, |query, key| {
        !causal || key <= hidden_at_first + query
    })
    .flatten_all()?
    .to_vec1()
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

/// The text of a refusal.
pub fn refusal<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => "not refused".to_string(),
        Err(e) => message(e),
    }
}
