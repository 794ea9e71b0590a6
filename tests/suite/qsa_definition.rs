//! Every stage of qsa_prep in f64, written from its definition: by position and dimension, without chunks of work, carried
//! tensors, tables or vectors.

use crate::qsa_support::{bytes, norms, state_at, Rows, POSITIONS};
use candle::{DType, Result, Tensor};
use gem::qsa::{QsaCodes, QsaState};
use half::f16;
use std::collections::BTreeMap;

/// Outputs are of the size of 1 to 10; what f32 loses in sums of 256 and in a rounded cosine.
const BOUND: f64 = 4e-6;

fn wide(t: &Tensor) -> Vec<f64> {
    t.to_dtype(DType::F64)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

/// One element of `R_p(rms(x, g))`.
fn turned(x: &[f64], g: &[f64], p: usize, dim: usize) -> f64 {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let normed = |i: usize| x[i] / (mean + 1e-6).sqrt() * g[i];
    let a = p as f64 * 1e7f64.powf(-2.0 * (dim % 32) as f64 / 64.0);
    match dim {
        0..32 => normed(dim) * a.cos() - normed(dim + 32) * a.sin(),
        32..64 => normed(dim - 32) * a.sin() + normed(dim) * a.cos(),
        _ => normed(dim),
    }
}

fn assert_near(what: &str, got: &[f64], want: impl Fn(usize) -> f64, bound: f64) {
    for (i, got) in got.iter().enumerate() {
        let want = want(i);
        // Not `>`: a NaN must not pass.
        let near = (got - want).abs() <= bound * want.abs().max(1.0);
        assert!(near, "{what}[{i}]: {got}, want {want}");
    }
}

fn assert_codes(what: &str, got: &QsaCodes, want: impl Fn(usize) -> f64) {
    let codes = bytes(&got.codes);
    let scales = got.scales.flatten_all().unwrap().to_vec1::<f16>().unwrap();
    assert_eq!(codes.len(), 64 * scales.len());
    let mut unusual = 0;
    for (group, scale) in scales.iter().enumerate() {
        let values: Vec<f64> = (0..64).map(|i| want(64 * group + i)).collect();
        let largest = values.iter().fold(0f64, |m, x| m.max(x.abs()));
        // Within half a step of f16, of which the smallest is 2^-24, and almost always the nearest.
        let exact = largest / 127.0;
        let scale_error = (scale.to_f64() - exact).abs();
        assert!(
            scale_error <= (4.9e-4 * exact).max(3e-8),
            "{what}: group {group}"
        );
        unusual += (*scale != f16::from_f64(exact)) as usize;
        for (i, value) in values.iter().enumerate() {
            let code = codes[64 * group + i] as i8;
            let exact = (value / scale.to_f64()).clamp(-127.0, 127.0);
            let off = (exact - code as f64).abs();
            assert!(
                code != -128 && off <= 0.5 + 3e-4,
                "{what}: group {group}, {i}: {code}"
            );
        }
    }
    // A few in a hundred would be wrong, one of a few is none.
    assert!(
        unusual <= 2 + scales.len() / 100,
        "{what}: {unusual} scales"
    );
}

/// The ik of each position that the call knows of.
fn keys_by_position(rows: &Rows, state: &QsaState) -> BTreeMap<usize, Vec<f64>> {
    let (pos0, tail) = (state.pos(), state.tail().unwrap());
    let before = (pos0 / 4 * 4..pos0).map(|p| (p, wide(&tail.get(p % 4).unwrap())));
    let chunk = (0..rows.tokens()).map(|t| (pos0 + t, wide(&rows.ik.get(t).unwrap())));
    before.chain(chunk).collect()
}

pub fn assert_defined(rows: &Rows, state: &QsaState) -> Result<()> {
    let out = rows.prep(state)?;
    let pos0 = state.pos();
    let packed = wide(norms()?.packed());
    let (g_q, g_k, g_iq, g_ik) = (
        &packed[..256],
        &packed[256..512],
        &packed[512..640],
        &packed[640..],
    );
    let (q, k, v) = (wide(&rows.q), wide(&rows.k), wide(&rows.v));

    let qcur = |i: usize| {
        let (t, head, dim) = (i / (24 * 256), i / 256 % 24, i % 256);
        let from = t * 24 * 512 + head * 512;
        turned(&q[from..from + 256], g_q, pos0 + t, dim)
    };
    // Rounded once to the type of q.
    let bound = match rows.q.dtype() {
        DType::F16 => 4.9e-4,
        _ => BOUND,
    };
    // Every 7th element, since each is computed from its whole row.
    let sampled: Vec<usize> = (0..out.qcur.elem_count()).step_by(7).collect();
    let got = wide(&out.qcur);
    let got: Vec<f64> = sampled.iter().map(|&i| got[i]).collect();
    assert_near("qcur", &got, |i| qcur(sampled[i]), bound);

    if let (Some(iq), Some(qidx)) = (&rows.iq, &out.qidx) {
        let iq = wide(iq);
        let want = |i: usize| turned(&iq[i / 128 * 128..][..128], g_iq, pos0 + i / 512, i % 128);
        assert_near("qidx", &wide(qidx), want, BOUND);
    }
    let key = |i: usize| turned(&k[i / 256 * 256..][..256], g_k, pos0 + i / 512, i % 256);
    assert_codes("k", &out.k, key);
    assert_codes("v", &out.v, |i| v[i]);

    let keys = keys_by_position(rows, state);
    let end = pos0 + rows.tokens();
    let dead: Vec<f64> = match pos0 {
        0 => (0..128)
            .map(|dim| turned(&keys[&0], g_ik, 0, dim))
            .collect(),
        _ => wide(&state.dead()?),
    };
    let pooled = |i: usize| {
        let first = 4 * (pos0 / 4 + i / 128);
        if first + 4 > end {
            return dead[i % 128];
        }
        let mean = |dim: usize| (first..first + 4).map(|p| keys[&p][dim]).sum::<f64>() / 4.0;
        let mean: Vec<f64> = (0..128).map(mean).collect();
        turned(&mean, g_ik, first, i % 128)
    };
    assert_eq!(out.pooled.dims(), [end / 4 - pos0 / 4 + 1, 128]);
    assert_near("pooled", &wide(&out.pooled), pooled, BOUND);
    assert_near("dead", &wide(&out.state.dead()?), |i| dead[i], BOUND);
    let tail = |i: usize| {
        let position = end / 4 * 4 + i / 128;
        if position < end {
            keys[&position][i % 128]
        } else {
            0.0
        }
    };
    assert_near("tail", &wide(&out.state.tail()?), tail, 0.0);
    Ok(())
}

#[test]
fn every_stage_is_its_definition() -> Result<()> {
    for (i, pos0) in (0..).zip(POSITIONS) {
        for tokens in [1, 2, 3, 5, 9] {
            let rows = Rows::fused(20 + i, tokens)?;
            assert_defined(&rows, &state_at(pos0)?)?;
            assert_defined(&rows.q_as(DType::F16)?.without_iq(), &state_at(pos0)?)?;
        }
    }
    assert_defined(&Rows::fused(30, 257)?, &state_at(0)?)?;
    assert_defined(&Rows::fused(31, 130)?, &state_at(6143)?)
}

/// Where an angle in f32 would be off by a hundredth of a radian and more.
#[test]
fn angles_hold_at_a_million_tokens() -> Result<()> {
    for pos0 in [262_143, 1_000_001, 16_777_217] {
        assert_defined(&Rows::fused(40, 6)?, &state_at(pos0)?)?;
    }
    Ok(())
}

#[test]
fn small_and_large_rows_are_their_definition() -> Result<()> {
    for scale in [1e-4, 1e-2, 1e3] {
        let scaled = |t: &Tensor| (t * scale).unwrap();
        let rows = Rows::fused(50, 5)?;
        let rows = Rows {
            q: scaled(&rows.q),
            k: scaled(&rows.k),
            v: scaled(&rows.v),
            ik: scaled(&rows.ik),
            iq: rows.iq.as_ref().map(scaled),
        };
        assert_defined(&rows, &state_at(0)?)?;
    }
    Ok(())
}
