//! Attention as its definition reads, in f64.

use candle::{DType, Device, Tensor};

/// `softmax(q k^T * scale) v` over the keys that `sees(query row, key row)` admits; shapes as for the ops, result f64.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    scale: f64,
    sees: impl Fn(usize, usize) -> bool,
) -> Tensor {
    let (batch, q_heads, q_len, dim) = q.dims4().unwrap();
    let (_, kv_heads, kv_len, _) = k.dims4().unwrap();
    let rows = |t: &Tensor| -> Vec<Vec<f64>> {
        t.to_dtype(DType::F64)
            .unwrap()
            .contiguous()
            .unwrap()
            .reshape(((), dim))
            .unwrap()
            .to_vec2()
            .unwrap()
    };
    let (q, k, v) = (rows(q), rows(k), rows(v));
    let mut out = Vec::with_capacity(batch * q_heads * q_len * dim);
    for b in 0..batch {
        for h in 0..q_heads {
            let kv_row = |t: usize| (b * kv_heads + h / (q_heads / kv_heads)) * kv_len + t;
            for i in 0..q_len {
                let query = &q[(b * q_heads + h) * q_len + i];
                let seen: Vec<usize> = (0..kv_len).filter(|&t| sees(i, t)).collect();
                let dot = |t: usize| {
                    query
                        .iter()
                        .zip(&k[kv_row(t)])
                        .map(|(a, b)| a * b)
                        .sum::<f64>()
                };
                let scores: Vec<f64> = seen.iter().map(|&t| dot(t) * scale).collect();
                let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f64 = weights.iter().sum();
                let mut row = vec![0.0; dim];
                for (&t, weight) in seen.iter().zip(&weights) {
                    row.iter_mut()
                        .zip(&v[kv_row(t)])
                        .for_each(|(out, value)| *out += weight / sum * value);
                }
                out.extend(row);
            }
        }
    }
    Tensor::from_vec(out, (batch, q_heads, q_len, dim), &Device::Cpu).unwrap()
}
