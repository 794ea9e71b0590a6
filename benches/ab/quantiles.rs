//! Statistics of repeated measurements.

/// Between two samples the quantile is interpolated, so the median of an even number is the mean of the middle two.
pub fn quantile(samples: &[f64], at: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else {
        return f64::NAN;
    };
    let place = last as f64 * at;
    let below = place as usize;
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64)
}

pub fn median(samples: &[f64]) -> f64 {
    quantile(samples, 0.5)
}

/// Half the distance between the quartiles, relative to the median.
pub fn spread(samples: &[f64]) -> f64 {
    (quantile(samples, 0.75) - quantile(samples, 0.25)) / 2.0 / median(samples)
}

/// Round by round, the time of one arm by that of another in the same round: drift of the machine cancels.
pub fn ratios(times: &[f64], to: &[f64]) -> Vec<f64> {
    times.iter().zip(to).map(|(a, b)| a / b).collect()
}
