//! Keys of values: as a cache would store them, and as their definition reads, in f64.

use crate::attention_support::normal;
use crate::common::oracle;
use candle::{DType, Device, Result, Tensor};
use gem::attention::{RotaryKeys, RotaryTables};

/// What turns values into keys.
pub struct Turning {
    pub weight: Tensor,
    /// Radians a position.
    pub frequencies: Vec<f64>,
    /// Position of cached token 0.
    pub start: usize,
}

/// Gemma 4's frequencies of the first `pairs` pairs, and a weight around 1.
pub fn turning(seed: u64, pairs: usize, start: usize) -> Result<Turning> {
    let frequency = |i| 1e6f64.powf(-2.0 * i as f64 / 512.0);
    Ok(Turning {
        weight: ((normal(seed, 512, DType::F32)? * 0.2)? + 1.0)?,
        frequencies: (0..pairs).map(frequency).collect(),
        start,
    })
}

impl Turning {
    /// For `tokens` cached ones, and not one more.
    pub fn keys(&self, tokens: usize) -> Result<RotaryKeys> {
        let tables = RotaryTables::new(&self.frequencies, self.start + tokens, &Device::Cpu)?;
        Ok(RotaryKeys::new(&self.weight, &tables)?.at(self.start))
    }

    /// In candle's ops: the norm's weight, its rotation over all 256 pairs, one rounding to the type of `v`.
    pub fn stored(&self, v: &Tensor) -> Result<Tensor> {
        let tokens = v.dim(2)?;
        let table = |f: fn(f64) -> f64| {
            let values = (self.start..self.start + tokens).flat_map(|position| {
                (0..256).map(move |pair| {
                    let frequency = self.frequencies.get(pair).copied().unwrap_or(0.0);
                    f(position as f64 * frequency) as f32
                })
            });
            Tensor::from_iter(values, &Device::Cpu)?.reshape((tokens, 256))
        };
        let weighted = v.to_dtype(DType::F32)?.broadcast_mul(&self.weight)?;
        candle_nn::rotary_emb::rope(
            &weighted.contiguous()?,
            &table(f64::cos)?,
            &table(f64::sin)?,
        )?
        .to_dtype(v.dtype())
    }

    /// In f64; shares no code with the op.
    pub fn exact(&self, v: &Tensor) -> Result<Tensor> {
        let (_, _, tokens, dim) = v.dims4()?;
        let weight: Vec<f64> = self.weight.to_dtype(DType::F64)?.to_vec1()?;
        let mut rows: Vec<f64> = v.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?;
        for (i, row) in rows.chunks_mut(dim).enumerate() {
            let position = self.start + i % tokens;
            row.iter_mut().zip(&weight).for_each(|(x, w)| *x *= w);
            for (pair, frequency) in self.frequencies.iter().enumerate() {
                let (sin, cos) = (position as f64 * frequency).sin_cos();
                let (a, b) = (row[pair], row[pair + 256]);
                (row[pair], row[pair + 256]) = (a * cos - b * sin, a * sin + b * cos);
            }
        }
        Tensor::from_vec(rows, v.shape(), &Device::Cpu)
    }

    /// Direct softmax over the exact keys.
    pub fn oracle(&self, q: &Tensor, v: &Tensor, scale: f64, causal: bool) -> Result<Vec<f64>> {
        let hidden_at_first = v.dim(2)? - q.dim(2)?;
        oracle::attention(q, &self.exact(v)?, v, scale, |query, key| {
            !causal || key <= hidden_at_first + query
        })
        .flatten_all()?
        .to_vec1()
    }
}
