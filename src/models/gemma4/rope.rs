//! Rotary tables, made for the positions of one forward pass.
//!
//! Nothing is kept between passes: a table of every position that a 31B accepts would take half a gigabyte. Angles are
//! in f64, whatever the type of the model: rounded to bf16, positions above 256 fall together.

use super::config::RopeConfig;
use crate::attention::{cos_sin, RotaryTables};
use candle::{Device, Result, Tensor};

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
    pub fn cos_sin(&self, start: usize, len: usize, device: &Device) -> Result<(Tensor, Tensor)> {
        let pairs = self.inv_freq.len();
        let mut cos = Vec::with_capacity(len * pairs);
        let mut sin = Vec::with_capacity(len * pairs);
        for position in start..start + len {
            for &frequency in &self.inv_freq {
                let (c, s) = cos_sin(position, frequency);
                cos.push(c);
                sin.push(s);
            }
        }
        Ok((
            Tensor::from_vec(cos, (len, pairs), device)?,
            Tensor::from_vec(sin, (len, pairs), device)?,
        ))
    }
}
