//! Rotary tables, made for the positions of one forward pass.
//!
//! Nothing is kept between passes: a table of every position that a 31B accepts would take half a gigabyte. Angles are
//! in f64, whatever the type of the model: rounded to bf16, positions above 256 fall together.

use super::config::RopeConfig;
use crate::attention::{cos_sin, RotaryTables};
use crate::memory;
use candle::{bail, Device, Result, Tensor};

/// What one forward pass knows of the positions in the layers of one [`Rope`].
#[derive(Debug)]
pub(super) struct Angles {
    /// Of the tokens that are fed: f32 `(tokens, head_dim / 2)`.
    pub cos: Tensor,
    /// As `cos`.
    pub sin: Tensor,
    /// Of every token, where keys are rebuilt from cached values.
    pub keys: Option<RotaryTables>,
}

/// The frequencies of one layer kind.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    inv_freq: Vec<f64>,
}

impl Rope {
    /// Frequencies of the `head_dim / 2` pairs `(i, i + head_dim / 2)`; 0 where a pair does not turn.
    ///
    /// The exponent runs over the whole head, also where only some of the pairs turn.
    pub fn new(config: &RopeConfig, head_dim: usize) -> Self {
        let frequency = |pair: usize| match pair < config.rotated_pairs {
            true => config.theta.powf(-2.0 * pair as f64 / head_dim as f64) / config.factor,
            false => 0.0,
        };
        Self {
            inv_freq: (0..head_dim / 2).map(frequency).collect(),
        }
    }

    /// Radians a position, by pair.
    pub fn inv_freq(&self) -> &[f64] {
        &self.inv_freq
    }

    /// Cosines and sines of positions `start..start + len`: two f32 tensors `(len, head_dim / 2)`.
    ///
    /// # Errors
    ///
    /// Positions past 64 bits, or more than there is memory for.
    pub fn cos_sin(&self, start: usize, len: usize, device: &Device) -> Result<(Tensor, Tensor)> {
        let pairs = self.inv_freq.len();
        let Some(end) = start.checked_add(len) else {
            bail!("rope: {len} positions from {start} on pass the 64-bit range");
        };
        let what = format_args!("{len} positions of {pairs} pairs");
        let elements = memory::addressable("rope", what, &[len, pairs], 4)?;
        let mut cos = memory::zeros("rope", what, elements)?;
        let mut sin = memory::zeros("rope", what, elements)?;
        let rows = cos.chunks_exact_mut(pairs.max(1));
        for (position, (cos, sin)) in (start..end).zip(rows.zip(sin.chunks_exact_mut(pairs.max(1))))
        {
            for ((cos, sin), &frequency) in cos.iter_mut().zip(sin).zip(&self.inv_freq) {
                (*cos, *sin) = cos_sin(position, frequency);
            }
        }
        Ok((
            Tensor::from_vec(cos, (len, pairs), device)?,
            Tensor::from_vec(sin, (len, pairs), device)?,
        ))
    }
}
