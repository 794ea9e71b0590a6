//! A weight matrix: dense, or quantized as a GGUF file has it.

use crate::projection::product;
use candle::quantized::QTensor;
use candle::{DType, Module, Result, Tensor, D};
use candle_nn::Linear;
use std::sync::Arc;

/// Rows of the head that are widened to f32 together where the weights are half precision.
pub(super) const HEAD_ROWS: usize = 8192;

/// Rows of f32 times a half-precision head that [`product`] takes in one read of it.
const PRODUCT_ROWS: usize = 8;

/// `(rows, columns)`; a clone is the same memory.
#[derive(Debug, Clone)]
pub(super) enum Matrix {
    Dense(Tensor),
    /// No `QMatMul`, which environment variables can make dense.
    Quantized(Arc<QTensor>),
}

impl Matrix {
    pub(super) fn quantized(weight: QTensor) -> Self {
        Self::Quantized(Arc::new(weight))
    }

    /// `xs` `(.., columns)` times every row: in the type of xs, or f32 from a quantized weight.
    pub(super) fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(weight) => Linear::new(weight.clone(), None).forward(xs),
            Self::Quantized(weight) => {
                // The kernels of every device take f32.
                let xs = xs.to_dtype(DType::F32)?.contiguous()?;
                let product = xs.apply_op1_no_bwd(weight.as_ref())?;
                // Those of the CPU quantize xs, where NaN and infinity become numbers. Zero times a sum of them is NaN still, and adds
                // nothing to the rest.
                product.broadcast_add(&(xs * 0.)?.sum_keepdim(D::Minus1)?)
            }
        }
    }

    /// As `forward` for f32 `xs` `(n, columns)`, with f32 sums and results whatever the type of the weights.
    pub(super) fn forward_f32(&self, xs: &Tensor) -> Result<Tensor> {
        let weight = match self {
            Self::Dense(weight) => weight,
            Self::Quantized(_) => return self.forward(xs),
        };
        // A GPU that is asked for a row at a time would widen more bytes than the weights have.
        if weight.device().is_cuda() && weight.dtype() != DType::F32 && xs.dim(0)? <= PRODUCT_ROWS {
            return product(xs, weight);
        }
        let total = weight.dim(0)?;
        let rows = match weight.dtype() {
            DType::F32 => total,
            _ => HEAD_ROWS,
        };
        let mut parts = Vec::with_capacity(total.div_ceil(rows));
        for start in (0..total).step_by(rows) {
            let part = weight.narrow(0, start, rows.min(total - start))?;
            parts.push(xs.matmul(&part.to_dtype(DType::F32)?.t()?)?);
        }
        Tensor::cat(&parts, 1)
    }

    /// The rows of these ids `(n)`, f32 `(n, columns)`.
    pub(super) fn rows(&self, ids: &Tensor) -> Result<Tensor> {
        match self {
            Self::Dense(weight) => weight.index_select(ids, 0)?.to_dtype(DType::F32),
            Self::Quantized(weight) => weight.embedding(ids),
        }
    }
}
