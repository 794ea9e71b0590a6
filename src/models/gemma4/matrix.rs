//! A weight matrix: dense, or quantized as a GGUF file has it.

use crate::projection::{gpu::DECODE_ROWS, product};
use candle::quantized::QTensor;
use candle::{
    CpuStorage, CudaStorage, CustomOp1, DType, Layout, MetalStorage, Module, Result, Shape, Tensor,
};
use candle_nn::Linear;
use std::sync::Arc;

/// Rows of the head that are widened to f32 together where the weights are half precision.
pub(super) const HEAD_ROWS: usize = 8192;

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
            // The kernels of every device take f32.
            Self::Quantized(weight) => xs
                .to_dtype(DType::F32)?
                .contiguous()?
                .apply_op1_no_bwd(&Carrying(weight)),
        }
    }

    /// As `forward` for f32 `xs` `(n, columns)`, with f32 sums and results whatever the type of the weights.
    pub(super) fn forward_f32(&self, xs: &Tensor) -> Result<Tensor> {
        let weight = match self {
            Self::Dense(weight) => weight,
            Self::Quantized(_) => return self.forward(xs),
        };
        // A GPU that is asked for a row at a time would widen more bytes than the weights have.
        if weight.device().is_cuda() && weight.dtype() != DType::F32 && xs.dim(0)? <= DECODE_ROWS {
            return product(xs, weight, None);
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

/// candle's product, but that a row of the input which is not finite gives a row of NaN: on the CPU candle quantizes the input, where
/// NaN and infinity become numbers.
struct Carrying<'a>(&'a QTensor);

impl CustomOp1 for Carrying<'_> {
    fn name(&self) -> &'static str {
        "quantized product"
    }

    fn cpu_fwd(&self, xs: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (mut product, shape) = self.0.cpu_fwd(xs, layout)?;
        if let (CpuStorage::F32(xs), CpuStorage::F32(product), Some((start, end))) =
            (xs, &mut product, layout.contiguous_offsets())
        {
            let (rows, columns) = self.0.shape().dims2()?;
            let inputs = xs[start..end].chunks_exact(columns);
            for (xs, product) in inputs.zip(product.chunks_exact_mut(rows)) {
                if !xs.iter().all(|x| x.is_finite()) {
                    product.fill(f32::NAN);
                }
            }
        }
        Ok((product, shape))
    }

    fn metal_fwd(&self, xs: &MetalStorage, layout: &Layout) -> Result<(MetalStorage, Shape)> {
        self.0.metal_fwd(xs, layout)
    }

    fn cuda_fwd(&self, xs: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        self.0.cuda_fwd(xs, layout)
    }
}
