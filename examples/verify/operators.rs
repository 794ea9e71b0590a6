//! Gate 3: every route of the device against the baseline route and against softmax in f64.

use crate::measure::{
    oracle, rebuilt, rotary_keys, values, weighted_inputs, weighted_values, Agreement, Bounds,
    Geometry,
};
use crate::receipt::{Report, Settings};
use crate::routes::{Arm, Inputs};
use crate::Progress;
use candle::{DType, Device, Result};
use gem::attention::RotaryKeys;
use serde::{Deserialize, Serialize};

const Q_HEADS: usize = 32;
const KV_HEADS: usize = 4;
/// `(query rows, keys)`: around tiles, partitions and what decides their number.
const SHORT: [(usize, usize); 14] = [
    (1, 1),
    (1, 3),
    (1, 4),
    (1, 5),
    (1, 31),
    (1, 32),
    (1, 33),
    (1, 255),
    (1, 256),
    (1, 257),
    (1, 513),
    (3, 3),
    (5, 70),
    (9, 300),
];
const BOUNDARY: [(usize, usize); 3] = [(1, 8191), (1, 8192), (1, 8193)];
const LONG: [(usize, usize); 2] = [(1, 65_536), (1, 131_072)];
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

const fn within(most_nmse: f64, most_abs_error: f64) -> Bounds {
    Bounds {
        least_correlation: 0.9999,
        most_nmse,
        most_abs_error: Some(most_abs_error),
    }
}

/// In the order of [`DTYPES`]: several times what plain ops leave, the results' own rounding to the type included. Leaving one
/// heavy key out costs an NMSE of a hundredth and more.
const BOUNDS: [Bounds; 3] = [within(1e-10, 1e-4), within(1e-4, 1e-1), within(1e-4, 1e-1)];

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Operators {
    q_heads: usize,
    kv_heads: usize,
    bounds: [Bounds; 3],
    baseline: String,
    /// The routes that were compared, the baseline first.
    arms: Vec<String>,
    cases: Vec<Case>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    dtype: String,
    q_len: usize,
    kv_len: usize,
    arm: String,
    to_oracle: Agreement,
    to_baseline: Agreement,
}

fn shapes(quick: bool) -> Vec<(usize, usize)> {
    let long: &[_] = if quick { &[] } else { &LONG };
    [&SHORT[..], &BOUNDARY, long].concat()
}

/// `--quick` leaves out f16 at the boundary: the kernels differ from those of bf16 in the loads alone.
fn dtypes(quick: bool, kv_len: usize) -> &'static [DType] {
    match quick && kv_len > 1024 {
        true => &[DType::F32, DType::BF16],
        false => &DTYPES,
    }
}

fn geometry((q_len, kv_len): (usize, usize)) -> Geometry {
    Geometry {
        q_heads: Q_HEADS,
        kv_heads: KV_HEADS,
        q_len,
        kv_len,
    }
}

pub fn steps(quick: bool) -> u64 {
    shapes(quick)
        .iter()
        .map(|shape| dtypes(quick, shape.1).len() as u64)
        .sum()
}

pub fn run(settings: &Settings, device: &Device, progress: &Progress) -> Result<Operators> {
    let arms = Arm::all(device);
    let mut cases = Vec::new();
    for shape in shapes(settings.quick) {
        for &dtype in dtypes(settings.quick, shape.1) {
            progress.step(format!(
                "{} query rows on {} keys in {}",
                shape.0,
                shape.1,
                dtype.as_str()
            ));
            for shares_kv in [false, true] {
                let (seed, g) = (settings.seed + 3, geometry(shape));
                let (made, keys) = match shares_kv {
                    false => (weighted_inputs(seed, g, dtype)?, None),
                    true => {
                        let keys = rotary_keys(settings.seed + 6, shape.1)?;
                        let [q, v] = weighted_values(seed, g, dtype, &keys)?;
                        ([q, rebuilt(&v, &keys)?, v], Some(keys))
                    }
                };
                let want = oracle(&made)?;
                let [q, k, v] = made;
                let inputs = Inputs {
                    q: q.to_device(device)?,
                    // The baseline reads stored keys, in the type of the values.
                    k: k.to_dtype(dtype)?.to_device(device)?,
                    v: v.to_device(device)?,
                    keys: keys.map(|keys| on(&keys, device)).transpose()?,
                };
                let baseline = values(&arms[0].run(&inputs)?)?;
                let serving =
                    |arm: &&Arm| arm.shares_kv() == shares_kv && arm.serves(geometry(shape));
                for arm in arms.iter().filter(serving) {
                    let (got, again) = (arm.run(&inputs)?, arm.run(&inputs)?);
                    cases.push(Case {
                        dtype: dtype.as_str().to_string(),
                        q_len: shape.0,
                        kv_len: shape.1,
                        arm: arm.name(),
                        to_oracle: Agreement::new(&got, &again, &want)?,
                        to_baseline: Agreement::new(&got, &again, &baseline)?,
                    });
                }
            }
        }
    }
    Ok(Operators {
        q_heads: Q_HEADS,
        kv_heads: KV_HEADS,
        bounds: BOUNDS,
        baseline: arms[0].name(),
        arms: arms.iter().map(|arm| arm.name()).collect(),
        cases,
    })
}

/// The same keys on another device.
fn on(keys: &RotaryKeys, device: &Device) -> Result<RotaryKeys> {
    RotaryKeys::new(
        &keys.weight().to_device(device)?,
        &keys.tables().to_device(device)?,
    )
}

impl Report for Operators {
    const GATE: &'static str = "operators";

    fn refusals(&self, settings: &Settings) -> Vec<String> {
        let mut refusals = Vec::new();
        if (self.q_heads, self.kv_heads, self.bounds) != (Q_HEADS, KV_HEADS, BOUNDS) {
            refusals.push(format!("measured {} on {} heads within {:?}, want {Q_HEADS} on {KV_HEADS} within {BOUNDS:?}", self.q_heads, self.kv_heads, self.bounds));
        }
        let least = match settings.device.as_str() {
            "cpu" => vec!["reference", "fused-portable", "shared-kv-portable"],
            _ => vec![
                "staged",
                "fused-tile4-heads1-staged",
                "fused-tile4-heads1-direct",
                "matrix",
                "shared-kv-tile4-heads1-staged",
            ],
        };
        for arm in least {
            if !self.arms.iter().any(|measured| measured == arm) {
                refusals.push(format!("{arm} was not measured"));
            }
        }
        if self.arms.first() != Some(&self.baseline) {
            refusals.push(format!(
                "the baseline {} was not measured first",
                self.baseline
            ));
        }
        let mut cases = self.cases.iter();
        for shape in shapes(settings.quick) {
            for dtype in dtypes(settings.quick, shape.1) {
                let of_type = DTYPES.into_iter().zip(&self.bounds);
                let Some((_, bounds)) = of_type.into_iter().find(|(known, _)| known == dtype)
                else {
                    continue;
                };
                for arm in &self.arms {
                    if arm == "matrix"
                        && !Arm::Gpu(gem::attention::gpu::Route::Matrix).serves(geometry(shape))
                    {
                        continue;
                    }
                    let name = format!(
                        "{arm}, {} rows on {} keys in {}",
                        shape.0,
                        shape.1,
                        dtype.as_str()
                    );
                    let wanted = |case: &&Case| {
                        (case.dtype.as_str(), case.q_len, case.kv_len, &case.arm)
                            == (dtype.as_str(), shape.0, shape.1, arm)
                    };
                    let Some(case) = cases.next().filter(wanted) else {
                        refusals.push(format!("{name}: not measured"));
                        return refusals;
                    };
                    for (what, agreement) in [
                        ("softmax in f64", &case.to_oracle),
                        (self.baseline.as_str(), &case.to_baseline),
                    ] {
                        if let Some(why) = agreement.refusal(bounds) {
                            refusals.push(format!("{name} against {what}: {why}"));
                        }
                    }
                }
            }
        }
        if cases.next().is_some() {
            refusals.push("more was measured than asked for".to_string());
        }
        refusals
    }

    fn summary(&self) -> String {
        let worst = |dtype: &str| {
            let cases = self.cases.iter().filter(|case| case.dtype == dtype);
            cases.map(|case| case.to_oracle.nmse).fold(0.0, f64::max)
        };
        format!(
            "{} comparisons of {} routes: NMSE at most {:.1e} in f32, {:.1e} in f16, {:.1e} in bf16",
            self.cases.len(),
            self.arms.len(),
            worst("f32"),
            worst("f16"),
            worst("bf16")
        )
    }
}
