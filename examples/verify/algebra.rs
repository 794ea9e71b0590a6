//! Gate 1: the algebra of partial states on the CPU, against direct softmax in f64.

use crate::measure::{inputs, oracle, Agreement, Bounds, Geometry, SCALE};
use crate::receipt::{sha256, Report, Settings};
use crate::Progress;
use candle::{DType, Device, Result, Tensor};
use gem::attention::partial::EMPTY_MAX;
use gem::attention::plan::Partitions;
use gem::attention::CpuKernel;
use gem::{AttentionD512, AttentionPartials};
use serde::{Deserialize, Serialize};

/// Keys of a case; the last two not with `--quick`.
const LENGTHS: [usize; 5] = [8191, 8192, 8193, 65_536, 131_072];
const PARTITIONS: usize = 32;
const Q_HEADS: usize = 8;
const BOUNDS: Bounds = Bounds {
    least_correlation: 0.999_999_999_999,
    most_nmse: 1.42e-11,
    most_abs_error: Some(1.64e-7),
};

/// 13 tokens of 17 dims, cut so many ways; 16 has empty partitions.
const CUTS: [usize; 6] = [1, 2, 3, 4, 7, 16];
const MOST_CUT_ERROR: f64 = 1e-6;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Algebra {
    partitions: usize,
    q_heads: usize,
    softmax_scale: f32,
    bounds: Bounds,
    cuts: Vec<Cut>,
    cases: Vec<Case>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Cut {
    partitions: usize,
    max_abs_error: f64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    kernel: String,
    kv_len: usize,
    sha256_inputs: String,
    sha256_output: String,
    agreement: Agreement,
}

fn lengths(quick: bool) -> &'static [usize] {
    &LENGTHS[..if quick { 3 } else { 5 }]
}

fn kernels() -> impl Iterator<Item = CpuKernel> {
    CpuKernel::ALL
        .into_iter()
        .filter(|kernel| kernel.is_available())
}

pub fn steps(quick: bool) -> u64 {
    lengths(quick).len() as u64
}

pub fn run(settings: &Settings, progress: &Progress) -> Result<Algebra> {
    let mut cases = Vec::new();
    for &kv_len in lengths(settings.quick) {
        progress.step(format!("algebra at {kv_len} keys"));
        let geometry = Geometry {
            q_heads: Q_HEADS,
            kv_heads: 1,
            q_len: 1,
            kv_len,
        };
        let qkv = inputs(settings.seed, geometry, DType::F32)?;
        let want = oracle(&qkv)?;
        let [q, k, v] = &qkv;
        let digest = sha256(&[bytes(q)?, bytes(k)?, bytes(v)?].concat());
        for kernel in kernels() {
            let op = AttentionD512::new(SCALE)
                .partitions(PARTITIONS)
                .cpu_kernel(kernel);
            // By way of the states, so that their merge is what is measured.
            let run = || op.partials(q, k, v)?.finish(DType::F32);
            let got = run()?;
            cases.push(Case {
                kernel: format!("{kernel:?}"),
                kv_len,
                sha256_inputs: digest.clone(),
                sha256_output: sha256(&bytes(&got)?),
                agreement: Agreement::new(&got, &run()?, &want)?,
            });
        }
    }
    Ok(Algebra {
        partitions: PARTITIONS,
        q_heads: Q_HEADS,
        softmax_scale: SCALE,
        bounds: BOUNDS,
        cuts: CUTS.into_iter().map(cut).collect::<Result<_>>()?,
        cases,
    })
}

fn bytes(t: &Tensor) -> Result<Vec<u8>> {
    let values = t.flatten_all()?.to_vec1::<f32>()?;
    Ok(values.iter().flat_map(|x| x.to_le_bytes()).collect())
}

/// 13 scores and values, their states by partition, and what the merge makes of them.
fn cut(partitions: usize) -> Result<Cut> {
    const DIM: usize = 17;
    let score = |t: usize| ((t * 7 % 13) as f64 - 6.0) * 0.5;
    let value = |t: usize, d: usize| ((t * 5 + d * 3) % 11) as f64 / 4.0 - 1.0;
    let cut = Partitions::new(13, partitions)?;
    let (mut maxima, mut sums, mut numerators) = (vec![], vec![], vec![]);
    for keys in (0..partitions).map(|p| cut.range(p)) {
        if keys.is_empty() {
            maxima.push(EMPTY_MAX);
            sums.push(0f32);
            // What an empty state holds must not matter.
            numerators.extend([f32::NAN; DIM]);
            continue;
        }
        let max = keys.clone().map(score).fold(f64::MIN, f64::max);
        let weight = |t: usize| (score(t) - max).exp();
        maxima.push(max as f32);
        sums.push(keys.clone().map(weight).sum::<f64>() as f32);
        let numerator = |d| keys.clone().map(|t| weight(t) * value(t, d)).sum::<f64>() as f32;
        numerators.extend((0..DIM).map(numerator));
    }
    let grid = (partitions, 1, 1, 1);
    let states = AttentionPartials::new(
        Tensor::from_vec(maxima, grid, &Device::Cpu)?,
        Tensor::from_vec(sums, grid, &Device::Cpu)?,
        Tensor::from_vec(numerators, (partitions, 1, 1, 1, DIM), &Device::Cpu)?,
    )?;
    let got = states.finish(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let sum: f64 = (0..13).map(|t| score(t).exp()).sum();
    let want = |d| (0..13).map(|t| score(t).exp() * value(t, d)).sum::<f64>() / sum;
    let errors = got
        .iter()
        .enumerate()
        .map(|(d, x)| (f64::from(*x) - want(d)).abs());
    Ok(Cut {
        partitions,
        // A sum, unlike a maximum, hides no NaN.
        max_abs_error: errors.clone().fold(0.0, f64::max) + 0.0 * errors.sum::<f64>(),
    })
}

impl Report for Algebra {
    const GATE: &'static str = crate::FIRST_GATE;

    fn refusals(&self, settings: &Settings) -> Vec<String> {
        let mut refusals = Vec::new();
        let asked = (
            self.partitions,
            self.q_heads,
            self.softmax_scale,
            self.bounds,
        );
        if asked != (PARTITIONS, Q_HEADS, SCALE, BOUNDS) {
            refusals.push(format!("measured {asked:?}, want {PARTITIONS} partitions of {Q_HEADS} heads and {BOUNDS:?}"));
        }
        if !self.cuts.iter().map(|cut| cut.partitions).eq(CUTS) {
            refusals.push(format!("13 tokens are not cut in {CUTS:?}"));
        }
        for cut in &self.cuts {
            if !(0.0..MOST_CUT_ERROR).contains(&cut.max_abs_error) {
                refusals.push(format!(
                    "13 tokens in {} are off by {:e}",
                    cut.partitions, cut.max_abs_error
                ));
            }
        }
        if !self.cases.iter().any(|case| case.kernel == "Portable") {
            refusals.push("the portable kernel was not measured".to_string());
        }
        let mut kernels: Vec<&str> = self.cases.iter().map(|case| case.kernel.as_str()).collect();
        kernels.sort_unstable();
        kernels.dedup();
        for kernel in kernels {
            let measured = self
                .cases
                .iter()
                .filter(|case| case.kernel == kernel)
                .map(|case| &case.kv_len);
            if !measured.eq(lengths(settings.quick)) {
                refusals.push(format!(
                    "{kernel} was not measured at {:?}",
                    lengths(settings.quick)
                ));
            }
        }
        for case in &self.cases {
            if let Some(why) = case.agreement.refusal(&self.bounds) {
                refusals.push(format!("{} at {} keys {why}", case.kernel, case.kv_len));
            }
        }
        refusals
    }

    fn summary(&self) -> String {
        let worst = |f: fn(&Agreement) -> f64| {
            self.cases
                .iter()
                .map(|case| f(&case.agreement))
                .fold(0.0, f64::max)
        };
        format!(
            "{} runs in {PARTITIONS} partitions: NMSE at most {:.1e}, error at most {:.1e}",
            self.cases.len(),
            worst(|a| a.nmse),
            worst(|a| a.max_abs_error)
        )
    }
}
