//! Distances between tensors, and tensors to measure them on.

use candle::{DType, Device, Result, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Largest absolute difference. NaN where either holds a NaN, so that no bound accepts it.
pub fn max_abs_diff(got: &Tensor, want: &Tensor) -> Result<f64> {
    let largest = |worst: f64, (g, w): (f64, f64)| match (g - w).abs() {
        diff if diff.is_nan() || worst.is_nan() => f64::NAN,
        diff => worst.max(diff),
    };
    Ok(pairs(got, want)?.into_iter().fold(0.0, largest))
}

/// Root of the mean squared difference.
pub fn rms_diff(got: &Tensor, want: &Tensor) -> Result<f64> {
    let pairs = pairs(got, want)?;
    let sum: f64 = pairs.iter().map(|(g, w)| (g - w).powi(2)).sum();
    Ok((sum / pairs.len() as f64).sqrt())
}

/// Squared difference over the squared size of `want`.
pub fn nmse(got: &Tensor, want: &Tensor) -> Result<f64> {
    let pairs = pairs(got, want)?;
    let error: f64 = pairs.iter().map(|(g, w)| (g - w).powi(2)).sum();
    Ok(error / pairs.iter().map(|(_, w)| w.powi(2)).sum::<f64>())
}

fn pairs(got: &Tensor, want: &Tensor) -> Result<Vec<(f64, f64)>> {
    if got.shape() != want.shape() {
        candle::bail!("got {:?}, want {:?}", got.shape(), want.shape());
    }
    let values = |t: &Tensor| t.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>();
    Ok(values(got)?.into_iter().zip(values(want)?).collect())
}

/// Unit-normal values (sum of twelve uniforms), the same on every machine.
pub fn normal(seed: u64, shape: impl Into<candle::Shape>, dtype: DType) -> Result<Tensor> {
    let shape = shape.into();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let values: Vec<f32> = (0..shape.elem_count())
        .map(|_| (0..12).map(|_| rng.random::<f32>()).sum::<f32>() - 6.0)
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
}
