//! Kernels for keys that are rebuilt from values, `k = rotate(w * v)`.
//!
//! For one block of query rows a key is never whole: what turns is rebuilt for a few keys at a time, where it is scored, and the
//! rest is `w * v` in registers for f32 values, so that every key has the bits of a stored one and every score is summed as of
//! one: a chain of multiply-adds over ascending dimensions. For half types `w` is in the queries instead. Several blocks
//! share the whole keys of a tile, in f32.

// Plain index loops over constant bounds are what becomes registers.
#![allow(clippy::needless_range_loop)]

use super::body::{lines, BlockRows, Scores, BLOCK, TILE};
use super::rows::{Addresses, Rows};
use crate::attention::geometry::HEAD_DIM;
use crate::cpu::isa::{Element, Isa};

/// Dimension `i` of a head is paired with `i + HALF`.
pub(super) const HALF: usize = HEAD_DIM / 2;

/// The most keys that are scored at a time.
const MOST_KEYS: usize = 8;

/// What is left of keys that are being scored.
pub(super) type Strip = [f32; MOST_KEYS * HALF];

/// The weight of the key norm.
pub(super) type Weight = [f32; HEAD_DIM];

/// How values become keys.
#[derive(Clone, Copy)]
pub(super) struct Turns<'a> {
    pub weight: &'a Weight,
    /// Of each token from the first cached one on: `pairs` cosines, then as many sines.
    pub rows: &'a [f32],
    /// A multiple of 32, at most `HALF`.
    pub pairs: usize,
}

impl Turns<'_> {
    /// Cosines and sines of `len` tokens from `token` on: checked once here.
    #[inline(always)]
    fn angles(&self, token: usize, len: usize) -> *const f32 {
        let row = 2 * self.pairs;
        self.rows[token * row..(token + len) * row].as_ptr()
    }
}

/// Rows of V, the first of them of token `token`, as what their keys are rebuilt from.
#[derive(Clone, Copy)]
pub(super) struct Shared<'a> {
    pub values: Rows<'a>,
    pub token: usize,
    pub turns: &'a Turns<'a>,
}

/// `W` pairs of a key: the same operations in the same order as a norm's weight and candle's rotation.
///
/// # Safety
///
/// `value` is a row, `angles` a row of `pairs` cosines and sines, `weight` that of a norm; and the instructions of `I` are
/// there.
#[inline(always)]
unsafe fn turned<I: Isa, E: Element>(
    value: *const E,
    [low, high]: [I::V; 2],
    angles: *const f32,
    pairs: usize,
    i: usize,
) -> [I::V; 2] {
    let a = I::mul(E::load::<I>(value.add(i)), low);
    let b = I::mul(E::load::<I>(value.add(HALF + i)), high);
    let (cos, sin) = (I::load(angles.add(i)), I::load(angles.add(pairs + i)));
    [
        I::sub(I::mul(a, cos), I::mul(b, sin)),
        I::add(I::mul(a, sin), I::mul(b, cos)),
    ]
}

/// The keys of all rows, in f32 and in plain order.
///
/// # Safety
///
/// The instructions of `I` are there.
#[inline(always)]
pub(super) unsafe fn rebuild<I: Isa, E: Element>(
    k: &Shared,
    all: &[E],
    to: &mut [[f32; HEAD_DIM]],
) {
    let (first, stride) = k.values.span(all);
    let (weight, pairs) = (k.turns.weight.as_ptr(), k.turns.pairs.min(HALF));
    let angles = k.turns.angles(k.token, k.values.len());
    for (t, to) in to.iter_mut().enumerate().take(k.values.len()) {
        let (value, to) = (first.add(t * stride), to.as_mut_ptr());
        let angles = angles.add(t * 2 * pairs);
        for i in (0..pairs).step_by(I::W) {
            let weights = [I::load(weight.add(i)), I::load(weight.add(HALF + i))];
            let [low, high] = turned::<I, E>(value, weights, angles, pairs, i);
            I::store(to.add(i), low);
            I::store(to.add(HALF + i), high);
        }
        for half in [0, HALF] {
            for d in (half + pairs..half + HALF).step_by(I::W) {
                let weighted = I::mul(E::load::<I>(value.add(d)), I::load(weight.add(d)));
                I::store(to.add(d), weighted);
            }
        }
    }
}

/// As `body::scores_rows`, of keys that are rebuilt. `WEIGHTED`: what does not turn is multiplied by the weight here, not in the
/// queries.
///
/// # Safety
///
/// As there, with `N` at most `MOST_KEYS`.
#[inline(always)]
unsafe fn scores_rows<I: Isa, E: Element, const R: usize, const N: usize, const WEIGHTED: bool>(
    q: *const f32,
    k: &Shared,
    all: &[E],
    scale: f32,
    strip: &mut Strip,
    out: *mut f32,
    ahead: &Addresses,
) {
    const { assert!(N <= MOST_KEYS) }
    let (first, stride) = k.values.span(all);
    let len = k.values.len().min(TILE);
    let last = len.saturating_sub(1);
    let (weight, pairs) = (k.turns.weight.as_ptr(), k.turns.pairs.min(HALF));
    let (first_angles, strip) = (k.turns.angles(k.token, len), strip.as_mut_ptr());
    for t in (0..len).step_by(N) {
        let mut values = [first; N];
        let mut angles = [first_angles; N];
        let mut next = [std::ptr::null::<u8>(); N];
        for n in 0..N {
            // Past the end the last key again: its score lands where no one looks, and there is no tail to write.
            values[n] = first.add((t + n).min(last) * stride);
            angles[n] = first_angles.add((t + n).min(last) * 2 * pairs);
            next[n] = ahead.row(t + n);
        }
        let mut acc = [[I::splat(0.0); N]; R];
        for half in 0..2 {
            for i in (0..pairs).step_by(I::W) {
                let mut key = [I::splat(0.0); N];
                if half == 0 {
                    let weights = [I::load(weight.add(i)), I::load(weight.add(HALF + i))];
                    for n in 0..N {
                        let [low, high] = turned::<I, E>(values[n], weights, angles[n], pairs, i);
                        key[n] = low;
                        I::store(strip.add(n * HALF + i), high);
                    }
                } else {
                    for n in 0..N {
                        key[n] = I::load(strip.add(n * HALF + i));
                    }
                }
                for r in 0..R {
                    let q = I::load(q.add(r * HEAD_DIM + half * HALF + i));
                    for n in 0..N {
                        acc[r][n] = I::fma(q, key[n], acc[r][n]);
                    }
                }
            }
            for d32 in (half * HALF + pairs..half * HALF + HALF).step_by(32) {
                for n in 0..N {
                    let next = next[n].wrapping_add(d32 * ahead.size);
                    for line in 0..lines::<E>(32) {
                        I::prefetch(next.wrapping_add(line * 64));
                    }
                }
                for d in (d32..d32 + 32).step_by(2 * I::W) {
                    let mut key = [[I::splat(0.0); 2]; N];
                    for n in 0..N {
                        key[n] = E::load2::<I>(values[n].add(d));
                        if WEIGHTED {
                            for half in 0..2 {
                                let weight = I::load(weight.add(d + half * I::W));
                                key[n][half] = I::mul(key[n][half], weight);
                            }
                        }
                    }
                    for half in 0..2 {
                        for r in 0..R {
                            let q = I::load(q.add(r * HEAD_DIM + d + half * I::W));
                            for n in 0..N {
                                acc[r][n] = I::fma(q, key[n][half], acc[r][n]);
                            }
                        }
                    }
                }
            }
        }
        for n in 0..N {
            for r4 in (0..R).step_by(4) {
                let mut four = [I::splat(0.0); 4];
                for r in r4..R.min(r4 + 4) {
                    four[r - r4] = acc[r][n];
                }
                I::store_sums(four, scale, out.add((t + n) * BLOCK + r4));
            }
        }
    }
}

/// Scores of the first `rows` rows of a block; those of the others come out as anything finite or are left.
///
/// # Safety
///
/// The instructions of `I` are there.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
pub(super) unsafe fn scores<I: Isa, E: Element, const WEIGHTED: bool>(
    q: &BlockRows,
    rows: usize,
    k: &Shared,
    all: &[E],
    scale: f32,
    strip: &mut Strip,
    out: &mut Scores,
    ahead: &Addresses,
) {
    let (q, out) = (q.as_ptr(), out.as_mut_ptr());
    match rows {
        1 => scores_rows::<I, E, 1, 8, WEIGHTED>(q, k, all, scale, strip, out, ahead),
        2 => scores_rows::<I, E, 2, 4, WEIGHTED>(q, k, all, scale, strip, out, ahead),
        3 | 4 => scores_rows::<I, E, 4, 3, WEIGHTED>(q, k, all, scale, strip, out, ahead),
        _ if I::W == 16 && k.values.len() == 1 => {
            scores_rows::<I, E, 8, 1, WEIGHTED>(q, k, all, scale, strip, out, ahead)
        }
        _ if I::W == 16 => scores_rows::<I, E, 8, 3, WEIGHTED>(q, k, all, scale, strip, out, ahead),
        _ => {
            scores_rows::<I, E, 4, 3, WEIGHTED>(q, k, all, scale, strip, out, ahead);
            let second = q.add(4 * HEAD_DIM);
            scores_rows::<I, E, 4, 3, WEIGHTED>(second, k, all, scale, strip, out.add(4), ahead);
        }
    }
}
