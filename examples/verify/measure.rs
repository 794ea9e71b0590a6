//! Inputs that anyone can make again, the oracle, and how far a result is from it.

use candle::{DType, Device, Result, Tensor};
use gem::attention::{RotaryKeys, RotaryTables, HEAD_DIM};
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// `1 / sqrt(512)`: scores of these inputs are about unit-normal, so that the softmax is not one-hot.
pub const SCALE: f32 = 0.044_194_174;

#[derive(Debug, Clone, Copy)]
pub struct Geometry {
    pub q_heads: usize,
    pub kv_heads: usize,
    pub q_len: usize,
    pub kv_len: usize,
}

/// q, k and v: uniform values of unit variance, rounded to `dtype`, on the CPU.
pub fn inputs(seed: u64, g: Geometry, dtype: DType) -> Result<[Tensor; 3]> {
    let made = |seed, heads, len| uniform(seed, heads, len)?.to_dtype(dtype);
    Ok([
        made(seed, g.q_heads, g.q_len)?,
        made(seed + 1, g.kv_heads, g.kv_len)?,
        made(seed + 2, g.kv_heads, g.kv_len)?,
    ])
}

fn uniform(seed: u64, heads: usize, len: usize) -> Result<Tensor> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let width = 12f32.sqrt() / (1u32 << 24) as f32;
    let values: Vec<f32> = (0..heads * len * HEAD_DIM)
        .map(|_| ((rng.next_u32() >> 8) as f32 - (1u32 << 23) as f32) * width)
        .collect();
    Tensor::from_vec(values, (1, heads, len, HEAD_DIM), &Device::Cpu)
}

/// Keys that every query head attends to by about a sixth each: a route that leaves one out, or reads another in its place, is
/// far off at any length. The first, one in the middle, where partitions meet, and the last.
fn heavy(kv_len: usize) -> [usize; 3] {
    [0, kv_len / 2, kv_len - 1]
}

/// As [`inputs`], with [`heavy`] keys.
pub fn weighted_inputs(seed: u64, g: Geometry, dtype: DType) -> Result<[Tensor; 3]> {
    let [q, k, v] = inputs(seed, g, dtype)?;
    let rows = heavy_rows(&q, g)?;
    Ok([q, replaced(&k, &rows)?, v])
}

/// As [`weighted_inputs`], with values from which such keys follow.
pub fn weighted_values(
    seed: u64,
    g: Geometry,
    dtype: DType,
    keys: &RotaryKeys,
) -> Result<[Tensor; 2]> {
    let [q, _, v] = inputs(seed, g, dtype)?;
    let mut rows = heavy_rows(&q, g)?;
    let weight = keys.weight().to_vec1::<f32>()?;
    let (pairs, angles) = (
        keys.tables().pairs(),
        keys.tables().rows().to_vec2::<f32>()?,
    );
    for (i, row) in &mut rows {
        let (cos, sin) = angles[*i % g.kv_len].split_at(pairs);
        for j in 0..HEAD_DIM / 2 {
            let (cos, sin) = if j < pairs {
                (cos[j], sin[j])
            } else {
                (1.0, 0.0)
            };
            let (a, b) = (row[j], row[j + HEAD_DIM / 2]);
            row[j] = (a * cos + b * sin) / weight[j];
            row[j + HEAD_DIM / 2] = (b * cos - a * sin) / weight[j + HEAD_DIM / 2];
        }
    }
    Ok([q, replaced(&v, &rows)?])
}

/// The rows of `(kv_heads * kv_len, 512)` that are heavy, by their index.
fn heavy_rows(q: &Tensor, g: Geometry) -> Result<Vec<(usize, Vec<f32>)>> {
    let group = g.q_heads / g.kv_heads;
    let last = q.to_dtype(DType::F32)?.narrow(2, g.q_len - 1, 1)?;
    let sums = last
        .reshape((g.kv_heads, group, HEAD_DIM))?
        .sum(1)?
        .to_vec2::<f32>()?;
    // A query scores its own part of the sum by about HEAD_DIM; the others of a key's score cancel out.
    let score = (g.kv_len.max(4) as f32 / 2.0).ln();
    let factor = score / (HEAD_DIM as f32 * SCALE);
    let row = |head: usize, i: usize| {
        let row: Vec<f32> = sums[head].iter().map(|x| x * factor).collect();
        (head * g.kv_len + i, row)
    };
    Ok((0..g.kv_heads)
        .flat_map(|head| heavy(g.kv_len).map(|i| row(head, i)))
        .collect())
}

/// `t`, `(1, kv_heads, kv_len, 512)`, with these rows in place of its own.
fn replaced(t: &Tensor, rows: &[(usize, Vec<f32>)]) -> Result<Tensor> {
    let mut values = t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    for (i, row) in rows {
        values[i * HEAD_DIM..(i + 1) * HEAD_DIM].copy_from_slice(row);
    }
    Tensor::from_vec(values, t.shape(), &Device::Cpu)?.to_dtype(t.dtype())
}

/// Of Gemma 4: 64 pairs of dimensions turn. Weights are between 1/2 and 3/2.
pub fn rotary_keys(seed: u64, positions: usize) -> Result<RotaryKeys> {
    let frequencies: Vec<f64> = (0..HEAD_DIM / 8)
        .map(|i| 1e6f64.powf(-2.0 * i as f64 / HEAD_DIM as f64))
        .collect();
    let weight = (uniform(seed, 1, 1)?.flatten_all()? / 12f64.sqrt())? + 1.0;
    RotaryKeys::new(
        &weight?,
        &RotaryTables::new(&frequencies, positions, &Device::Cpu)?,
    )
}

/// `rotate(weight * v)` as its definition reads, in f64, rounded to f32 once.
pub fn rebuilt(v: &Tensor, keys: &RotaryKeys) -> Result<Tensor> {
    let (_, _, kv_len, _) = v.dims4()?;
    let weight = keys.weight().to_vec1::<f32>()?;
    let tables = keys.tables();
    let (pairs, rows) = (tables.pairs(), tables.rows().to_vec2::<f32>()?);
    let mut k = v.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    k.par_chunks_mut(HEAD_DIM).enumerate().for_each(|(i, row)| {
        let weighted: Vec<f64> = row
            .iter()
            .zip(&weight)
            .map(|(v, w)| f64::from(*v) * f64::from(*w))
            .collect();
        let (cos, sin) = rows[i % kv_len].split_at(pairs);
        for j in 0..HEAD_DIM / 2 {
            let (a, b) = (weighted[j], weighted[j + HEAD_DIM / 2]);
            let (cos, sin) = match j < pairs {
                true => (f64::from(cos[j]), f64::from(sin[j])),
                false => (1.0, 0.0),
            };
            row[j] = (a * cos - b * sin) as f32;
            row[j + HEAD_DIM / 2] = (b * cos + a * sin) as f32;
        }
    });
    Tensor::from_vec(k, v.shape(), &Device::Cpu)
}

/// Causal attention as its definition reads, in f64 over the stored values.
pub fn oracle([q, k, v]: &[Tensor; 3]) -> Result<Vec<f64>> {
    let (_, q_heads, q_len, _) = q.dims4()?;
    let (_, kv_heads, kv_len, _) = k.dims4()?;
    let flat = |t: &Tensor| t.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>();
    let (q, k, v) = (flat(q)?, flat(k)?, flat(v)?);
    let row = |i: usize| i * HEAD_DIM..(i + 1) * HEAD_DIM;
    let attend = |i: usize| -> Vec<f64> {
        let (head, position) = (i / q_len, i % q_len);
        let first = head / (q_heads / kv_heads) * kv_len;
        let query = &q[row(i)];
        let seen = first..first + kv_len - q_len + position + 1;
        let scores: Vec<f64> = seen
            .clone()
            .map(|t| {
                let products = query.iter().zip(&k[row(t)]);
                products
                    .map(|(a, b)| f64::from(*a) * f64::from(*b))
                    .sum::<f64>()
                    * f64::from(SCALE)
            })
            .collect();
        let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut out = vec![0.0; HEAD_DIM];
        for (t, weight) in seen.zip(weights) {
            for (out, value) in out.iter_mut().zip(&v[row(t)]) {
                *out += weight / sum * f64::from(*value);
            }
        }
        out
    };
    Ok((0..q_heads * q_len)
        .into_par_iter()
        .flat_map_iter(attend)
        .collect())
}

pub fn values(t: &Tensor) -> Result<Vec<f64>> {
    t.to_device(&Device::Cpu)?
        .to_dtype(DType::F64)?
        .flatten_all()?
        .to_vec1()
}

/// How a result compares with what it should be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Agreement {
    pub correlation: f64,
    /// Squared difference over the squared size.
    pub nmse: f64,
    pub max_abs_error: f64,
    pub finite: bool,
    /// A second run gave the same bits.
    pub repeats: bool,
}

/// The least that agrees.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Bounds {
    pub least_correlation: f64,
    pub most_nmse: f64,
    pub most_abs_error: Option<f64>,
}

impl Agreement {
    pub fn new(got: &Tensor, again: &Tensor, want: &[f64]) -> Result<Self> {
        let (got, again) = (values(got)?, values(again)?);
        if got.len() != want.len() {
            candle::bail!("the result has {} elements, want {}", got.len(), want.len());
        }
        let sum =
            |f: &dyn Fn(f64, f64) -> f64| got.iter().zip(want).map(|(a, b)| f(*a, *b)).sum::<f64>();
        let n = got.len() as f64;
        let (mean_a, mean_b) = (sum(&|a, _| a) / n, sum(&|_, b| b) / n);
        let covariance = sum(&|a, b| (a - mean_a) * (b - mean_b));
        let variances = sum(&|a, _| (a - mean_a).powi(2)) * sum(&|_, b| (b - mean_b).powi(2));
        let bits = |x: &f64| x.to_bits();
        Ok(Self {
            correlation: covariance / variances.sqrt(),
            nmse: sum(&|a, b| (a - b).powi(2)) / sum(&|_, b| b * b),
            max_abs_error: got
                .iter()
                .zip(want)
                .fold(0.0, |worst: f64, (a, b)| worst.max((a - b).abs())),
            finite: got.iter().all(|x| x.is_finite()),
            repeats: got.iter().map(bits).eq(again.iter().map(bits)),
        })
    }

    /// Why this is not good enough. Written so that a NaN, or a figure that cannot be, is not.
    pub fn refusal(&self, bounds: &Bounds) -> Option<String> {
        let most = bounds.most_abs_error.unwrap_or(f64::MAX);
        let why = if !self.finite {
            "is not finite".to_string()
        } else if !self.repeats {
            "does not repeat bit for bit".to_string()
        } else if !(bounds.least_correlation..=1.0 + 1e-9).contains(&self.correlation) {
            format!(
                "correlates by {}, want {}",
                self.correlation, bounds.least_correlation
            )
        } else if !(0.0..=bounds.most_nmse).contains(&self.nmse) {
            format!(
                "has an NMSE of {:e}, want {:e}",
                self.nmse, bounds.most_nmse
            )
        } else if !(0.0..=most).contains(&self.max_abs_error) {
            format!("is off by {:e}, want {most:e}", self.max_abs_error)
        } else {
            return None;
        };
        Some(why)
    }
}
