//! Plain double precision, and seeded inputs.

use half::f16;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// `n` values in [-1, 1).
pub fn uniform(seed: u64, n: usize) -> Vec<f32> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    (0..n).map(|_| random.random_range(-1.0f32..1.0)).collect()
}

pub fn to_f16(values: &[f32]) -> Vec<f16> {
    values.iter().map(|v| f16::from_f32(*v)).collect()
}

pub fn softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
    let exp: Vec<f64> = x.iter().map(|v| (v - max).exp()).collect();
    let sum: f64 = exp.iter().sum();
    exp.iter().map(|e| e / sum).collect()
}

/// Row-major (m, k) times (k, n); element (i, j) of the right factor is `right(i, j)`.
pub fn matmul(left: &[f32], right: impl Fn(usize, usize) -> f32, m: usize, n: usize) -> Vec<f64> {
    let k = left.len() / m;
    let mut out = Vec::with_capacity(m * n);
    for i in 0..m {
        for j in 0..n {
            let terms = (0..k).map(|x| f64::from(left[i * k + x]) * f64::from(right(x, j)));
            out.push(terms.sum());
        }
    }
    out
}

/// The largest difference; infinite when a value is NaN, so that no bound accepts it.
pub fn max_error(got: impl IntoIterator<Item = f64>, want: &[f64]) -> f64 {
    let got: Vec<f64> = got.into_iter().collect();
    assert_eq!(got.len(), want.len());
    let errors = got.iter().zip(want).map(|(a, b)| (a - b).abs());
    errors.fold(0.0, |worst, e| {
        if e.is_nan() {
            f64::INFINITY
        } else {
            worst.max(e)
        }
    })
}

pub fn widen(values: &[f32]) -> impl Iterator<Item = f64> + '_ {
    values.iter().map(|v| f64::from(*v))
}
