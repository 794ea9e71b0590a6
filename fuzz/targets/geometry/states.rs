//! Partial states that were made elsewhere: an error, or what their definition merges to.

use crate::any_tensor::assert_named;
use arbitrary::{Result, Unstructured};
use candle::{DType, Device, Tensor};
use gem::AttentionPartials;

const NAME: &str = "attention_partials";

fn number(u: &mut Unstructured) -> Result<f32> {
    Ok(match u.int_in_range(0..=7)? {
        0 => f32::from_bits(u.arbitrary()?),
        1 => 0.0,
        2 => f32::MIN,
        _ => u.int_in_range(-800i32..=800)? as f32 / 16.0,
    })
}

fn tensor(u: &mut Unstructured, dims: &[usize]) -> Result<Tensor> {
    let values: Vec<f32> = (0..dims.iter().product::<usize>())
        .map(|_| number(u))
        .collect::<Result<_>>()?;
    Ok(Tensor::from_vec(values, dims, &Device::Cpu).unwrap())
}

pub fn any(u: &mut Unstructured) -> Result<()> {
    let mut parts = vec![];
    let [batch, heads, q_len] = [1, u.int_in_range(0..=2)?, u.int_in_range(1..=2)?];
    for _ in 0..u.int_in_range(0..=3)? {
        let partitions = u.int_in_range(0..=3)?;
        let dim = if u.ratio(1, 16)? { 2 } else { 3 };
        let rows = [partitions, batch, heads, q_len];
        let (max, denominator) = (tensor(u, &rows)?, tensor(u, &rows)?.abs().unwrap());
        let numerator = tensor(u, &[&rows[..], &[dim]].concat())?;
        match AttentionPartials::new(max, denominator, numerator) {
            Ok(part) => parts.push(part),
            Err(e) => assert_named(e, &[NAME]),
        }
    }
    match AttentionPartials::merge(&parts) {
        Ok(merged) => {
            let (flat, max) = (values(merged.denominator()), values(merged.max()));
            assert!(
                flat.iter().chain(&max).all(|x| !x.is_nan()),
                "{flat:?} {max:?}"
            );
            assert_defined(&parts, &merged);
        }
        Err(e) => assert_named(e, &[NAME]),
    }
    for part in &parts {
        for result in [
            part.finish(DType::F32),
            part.finish(DType::U8),
            part.log_sum_exp(),
        ] {
            result.map_or_else(|e| assert_named(e, &[NAME]), drop);
        }
    }
    Ok(())
}

fn values(t: &Tensor) -> Vec<f64> {
    let t = t
        .to_dtype(DType::F64)
        .and_then(|t| t.flatten_all()?.to_vec1());
    t.unwrap()
}

/// Maximum, denominator, numerator.
type State = (f64, f64, Vec<f64>);

/// Each row's sum of exponentials and of values, in f64.
fn assert_defined(parts: &[AttentionPartials], merged: &AttentionPartials) {
    let rows = merged.max().elem_count();
    let dim = merged.numerator().elem_count() / rows;
    let mut states: Vec<Vec<State>> = vec![vec![]; rows];
    for part in parts {
        let (max, denominator) = (values(part.max()), values(part.denominator()));
        let numerator = values(part.numerator());
        for (i, state) in max.into_iter().zip(denominator).enumerate() {
            if state.1 != 0.0 {
                let numerator = numerator[i * dim..][..dim].to_vec();
                states[i % rows].push((state.0, state.1, numerator));
            }
        }
    }
    let (max, denominator) = (values(merged.max()), values(merged.denominator()));
    let numerator = values(merged.numerator());
    for (row, states) in states.iter().enumerate() {
        let largest = states.iter().map(|s| s.0).fold(f32::MIN.into(), f64::max);
        assert_eq!(max[row], largest);
        // The sum of what `pick` takes of each state, and what the roundings of f32 come to.
        let near = |got: f64, pick: &dyn Fn(&State) -> f64| {
            let (mut sum, mut size, mut error) = (0.0, 0.0, 0.0);
            for state in states {
                let (x, below) = (pick(state), largest - state.0);
                let addend = x * (-below).exp();
                (sum, size) = (sum + addend, size + addend.abs());
                // Of the difference of maxima, then of a weight that may be subnormal.
                error += 2e-6 * addend.abs() * (1.0 + below / 16.0) + 3e-45 * x.abs();
            }
            let past_f32 = size > 1e38;
            assert!(
                past_f32 || (got - sum).abs() <= error + 1e-44,
                "{got} {sum}"
            );
        };
        near(denominator[row], &|state| state.1);
        for i in 0..dim {
            near(numerator[row * dim + i], &|state| state.2[i]);
        }
    }
}
