//! One test on several arms, in turn.

use crate::peak;
use crate::quantiles;
use anyhow::Result;
use serde::Serialize;

/// What was measured of one arm in one test.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// `pp512` for reading 512 tokens, `tg128` for generating 128, `attention` for the operator.
    pub test: String,
    /// Tokens of context before, or keys.
    pub context: usize,
    pub arm: String,
    /// Seconds, a sample a round.
    pub seconds: Vec<f64>,
    /// Tokens that a sample reads or generates; 1 for the operator.
    pub tokens: usize,
    /// Bytes that must be read at least: weights and caches a token, K and V for the operator.
    pub bytes: Option<u64>,
    /// Weights and caches, or inputs.
    pub planned_bytes: u64,
    /// What was held at most in a sample: [`Arm::held_bytes`] and what came on top. On a CPU, where the system tells.
    pub peak_bytes: Option<u64>,
    /// Median over the rounds of this arm's time by that of the first in the same round.
    pub ratio: f64,
    /// Half the distance between the quartiles of these ratios, relative to their median.
    pub ratio_spread: f64,
}

impl Row {
    pub fn rates(&self) -> Vec<f64> {
        self.seconds
            .iter()
            .map(|s| self.tokens as f64 / s)
            .collect()
    }

    /// Mean and standard deviation of tokens, or calls, a second.
    pub fn rate(&self) -> (f64, f64) {
        let rates = self.rates();
        let n = rates.len() as f64;
        let mean = rates.iter().sum::<f64>() / n;
        let variance = rates.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0).max(1.0);
        (mean, variance.sqrt())
    }

    pub fn median_ms(&self) -> f64 {
        quantiles::median(&self.seconds) * 1e3
    }

    pub fn spread(&self) -> f64 {
        quantiles::spread(&self.seconds)
    }

    /// Gigabytes a second of what must be read.
    pub fn gigabytes_per_second(&self) -> Option<f64> {
        let bytes = self.bytes? as f64 * self.tokens as f64;
        Some(bytes / quantiles::median(&self.seconds) / 1e9)
    }
}

/// An arm that can be run: prepares a sample, then returns the seconds that it took.
pub struct Arm<'a> {
    pub name: String,
    pub bytes: Option<u64>,
    pub planned_bytes: u64,
    /// Of what is planned, what is there before a sample starts; nothing is known of the memory of a GPU.
    pub held_bytes: Option<u64>,
    pub run: Box<dyn FnMut() -> Result<f64> + 'a>,
}

/// Every arm once a round, the other way round every other round, after a round that does not count.
pub fn interleave(
    test: &str,
    context: usize,
    tokens: usize,
    mut arms: Vec<Arm>,
    rounds: usize,
    step: impl Fn(&str),
) -> Result<Vec<Row>> {
    for arm in &mut arms {
        step(&arm.name);
        (arm.run)()?;
    }
    // Apart from the rounds: asking takes time.
    let mut peaks = Vec::with_capacity(arms.len());
    for arm in &mut arms {
        step(&arm.name);
        let gained = peak::gained_by(&mut arm.run)?;
        peaks.push(
            arm.held_bytes
                .zip(gained)
                .map(|(held, gained)| held + gained),
        );
    }
    let mut seconds = vec![Vec::with_capacity(rounds); arms.len()];
    for round in 0..rounds {
        let mut order: Vec<usize> = (0..arms.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for i in order {
            step(&arms[i].name);
            seconds[i].push((arms[i].run)()?);
        }
    }
    let first = seconds[0].clone();
    let rows = arms
        .into_iter()
        .zip(seconds)
        .zip(peaks)
        .map(|((arm, seconds), peak_bytes)| {
            let ratios = quantiles::ratios(&seconds, &first);
            Row {
                test: test.to_string(),
                context,
                arm: arm.name,
                tokens,
                bytes: arm.bytes,
                planned_bytes: arm.planned_bytes,
                peak_bytes,
                ratio: quantiles::median(&ratios),
                ratio_spread: quantiles::spread(&ratios),
                seconds,
            }
        });
    Ok(rows.collect())
}
