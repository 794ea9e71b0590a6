//! RMS normalisation in f32: `x / sqrt(mean(x^2) + eps) * weight`, with no `1 +`.

use super::source::Part;
use candle::{DType, Device, Result, Tensor};

#[derive(Debug, Clone)]
pub(super) struct RmsNorm {
    weight: Tensor,
    eps: f32,
}

impl RmsNorm {
    /// The weight is read in f32 whatever the type of the model, and multiplied in f32.
    pub(super) fn load(dim: usize, eps: f64, part: &Part) -> Result<Self> {
        let weight = part.vector("weight", dim)?;
        Ok(Self {
            weight,
            eps: eps as f32,
        })
    }

    pub(super) fn weightless(dim: usize, eps: f64, device: &Device) -> Result<Self> {
        Ok(Self {
            weight: Tensor::ones(dim, DType::F32, device)?,
            eps: eps as f32,
        })
    }

    /// f32, one a dimension.
    pub(super) fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// `xs`: f32, any shape with the normalised dimension last.
    pub(super) fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        candle_nn::ops::rms_norm(&xs.contiguous()?, &self.weight, self.eps)
    }
}
