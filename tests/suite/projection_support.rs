//! Inputs and the oracle of the projection tests.

use candle::{DType, Result, Tensor};
use gem::projection::CpuKernel;

pub use crate::attention_support::{bits, flat, refusal};
pub use crate::common::numeric::normal;

/// Weights of about the size that a trained model has.
pub fn weight(seed: u64, rows: usize, hidden: usize, dtype: DType) -> Result<Tensor> {
    (normal(seed, (rows, hidden), DType::F32)? * 0.02)?.to_dtype(dtype)
}

pub fn kernels() -> impl Iterator<Item = CpuKernel> {
    CpuKernel::ALL
        .into_iter()
        .filter(|kernel| kernel.is_available())
}

/// The largest distance of `got` from the product in f64 of what is stored, relative to what the absolute values of the
/// addends come to: what bounds the error of any order of summation.
pub fn relative_error(got: &Tensor, xs: &Tensor, w: &Tensor) -> Result<f64> {
    let rows = |t: &Tensor| -> Result<Vec<Vec<f64>>> {
        let hidden = t.dims()[t.rank() - 1];
        t.to_dtype(DType::F64)?.reshape(((), hidden))?.to_vec2()
    };
    let (xs, w, got) = (rows(xs)?, rows(w)?, rows(got)?);
    assert_eq!((got.len(), got[0].len()), (xs.len(), w.len()));
    let mut worst = 0f64;
    for (x, got) in xs.iter().zip(&got) {
        for (w, got) in w.iter().zip(got) {
            let (mut sum, mut size) = (0.0, 0.0);
            for (x, w) in x.iter().zip(w) {
                sum += x * w;
                size += (x * w).abs();
            }
            let error = (got - sum).abs() / size;
            // A NaN must not hide in a maximum.
            if error.is_nan() {
                return Ok(f64::NAN);
            }
            worst = worst.max(error);
        }
    }
    Ok(worst)
}
