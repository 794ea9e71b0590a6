//! The kernels, written once over [`Isa`] and compiled once per instruction set by `kernels.rs`.
//!
//! Scores of a block are token-major, `scores[token * BLOCK + row]`, so that the softmax runs over rows in lanes and the
//! value pass finds the weights of one token side by side.
//!
//! Each K and V element is loaded once per block of rows, that is once for all query heads of a KV head at decode. The
//! result of a row does not depend on the size of the block it is in: each score is one chain of multiply-adds over the
//! dimension and each output one over the tokens of a tile.

// Plain index loops over constant bounds are what becomes registers.
#![allow(clippy::needless_range_loop)]

use super::exp::exp;
use super::rows::{Addresses, Rows};
use crate::attention::geometry::HEAD_DIM;
use crate::attention::partial::EMPTY_MAX;
use crate::cpu::isa::{Element, Isa};

/// Query rows that a kernel call works on at once.
pub(super) const BLOCK: usize = 8;

/// Keys staged together: one update of the running maximum, one rescale. A multiple of every token step below.
pub(super) const TILE: usize = 48;

/// The running softmax of one block.
#[derive(Clone, Copy)]
pub(super) struct BlockState {
    pub max: [f32; BLOCK],
    pub denominator: [f32; BLOCK],
    /// What the numerator so far must be multiplied by.
    pub rescale: [f32; BLOCK],
}

impl BlockState {
    pub const EMPTY: Self = Self {
        max: [EMPTY_MAX; BLOCK],
        denominator: [0.0; BLOCK],
        rescale: [1.0; BLOCK],
    };
}

/// Scores, then weights, of a block against a tile.
pub(super) type Scores = [f32; TILE * BLOCK];

/// Query rows, or numerators, of a block.
pub(super) type BlockRows = [f32; BLOCK * HEAD_DIM];

/// Query rows of a block, left in bf16.
pub(super) type BlockHalves = [half::bf16; BLOCK * HEAD_DIM];

/// Rows of a block.
#[derive(Clone, Copy)]
pub(super) enum Part {
    /// So many, from the first.
    First(usize),
    Only(usize),
}

/// What is added to numerators: the weights from key `token` of a tile on, for a part of a block.
#[derive(Clone, Copy)]
pub(super) struct Addend<'a> {
    pub weights: &'a Scores,
    pub token: usize,
    pub part: Part,
    /// What the numerators are multiplied by first; `None` if they hold nothing yet.
    pub rescale: Option<&'a [f32; BLOCK]>,
}

/// Cache lines that `elements` of the type at hand fill: what is prefetched for as many elements of the rows ahead, which
/// nearly always have the same type. A number known at compile time costs nothing in the innermost loops.
#[inline(always)]
pub(super) fn lines<E>(elements: usize) -> usize {
    (elements * size_of::<E>()).div_ceil(64)
}

/// The scores of `R` query rows against all of `k`, `N` keys at a time.
///
/// # Safety
///
/// `q` is valid for `R` rows, `out` starts a row of a `Scores` and `R` rows fit from there; and the instructions of `I`
/// are there.
#[inline(always)]
unsafe fn scores_rows<I: Isa, E: Element, const R: usize, const N: usize>(
    q: *const f32,
    k: &Rows,
    all: &[E],
    scale: f32,
    out: *mut f32,
    ahead: &Addresses,
) {
    let (first, stride) = k.span(all);
    let last = k.len().saturating_sub(1);
    for t in (0..k.len().min(TILE)).step_by(N) {
        let mut keys = [first; N];
        let mut next = [std::ptr::null::<u8>(); N];
        for n in 0..N {
            // Past the end the last key again: its score lands where no one looks, and there is no tail to write.
            keys[n] = first.add((t + n).min(last) * stride);
            next[n] = ahead.row(t + n);
        }
        let mut acc = [[I::splat(0.0); N]; R];
        for d32 in 0..HEAD_DIM / 32 {
            for n in 0..N {
                let next = next[n].wrapping_add(d32 * 32 * ahead.size);
                for line in 0..lines::<E>(32) {
                    I::prefetch(next.wrapping_add(line * 64));
                }
            }
            for d in (d32 * 32..d32 * 32 + 32).step_by(2 * I::W) {
                let mut key = [[I::splat(0.0); 2]; N];
                for n in 0..N {
                    key[n] = E::load2::<I>(keys[n].add(d));
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
pub(super) unsafe fn scores<I: Isa, E: Element>(
    q: &BlockRows,
    rows: usize,
    k: &Rows,
    all: &[E],
    scale: f32,
    out: &mut Scores,
    ahead: &Addresses,
) {
    let (q, out) = (q.as_ptr(), out.as_mut_ptr());
    match rows {
        1 => scores_rows::<I, E, 1, 8>(q, k, all, scale, out, ahead),
        2 => scores_rows::<I, E, 2, 4>(q, k, all, scale, out, ahead),
        3 | 4 => scores_rows::<I, E, 4, 3>(q, k, all, scale, out, ahead),
        // The first token of a conversation: three columns for one key would be three times the work.
        _ if I::W == 16 && k.len() == 1 => scores_rows::<I, E, 8, 1>(q, k, all, scale, out, ahead),
        _ if I::W == 16 => scores_rows::<I, E, 8, 3>(q, k, all, scale, out, ahead),
        _ => {
            // 16 registers hold 4 x 3 sums, not 8 x 3.
            scores_rows::<I, E, 4, 3>(q, k, all, scale, out, ahead);
            let second = q.add(4 * HEAD_DIM);
            scores_rows::<I, E, 4, 3>(second, k, all, scale, out.add(4), ahead);
        }
    }
}

/// Turns the scores of `tokens` keys into weights under the new running maximum.
///
/// # Safety
///
/// The instructions of `I`, which has `BLOCK` lanes, are there.
#[inline(always)]
pub(super) unsafe fn softmax<I: Isa>(scores: &mut Scores, tokens: usize, state: &mut BlockState) {
    const { assert!(I::W == BLOCK) }
    let tokens = tokens.min(TILE);
    let scores = scores.as_mut_ptr();
    let old = I::load(state.max.as_ptr());
    let mut max = old;
    for t in 0..tokens {
        max = I::max(I::load(scores.add(t * BLOCK)), max);
    }
    let mut sum = I::splat(0.0);
    for t in 0..tokens {
        let score = scores.add(t * BLOCK);
        let weight = exp::<I>(I::sub(I::load(score), max));
        I::store(score, weight);
        sum = I::add(sum, weight);
    }
    let rescale = exp::<I>(I::sub(old, max));
    let denominator = I::load(state.denominator.as_ptr());
    I::store(
        state.denominator.as_mut_ptr(),
        I::fma(denominator, rescale, sum),
    );
    I::store(state.rescale.as_mut_ptr(), rescale);
    I::store(state.max.as_mut_ptr(), max);
}

/// `numerator = numerator * rescale + weights x v` for `R` rows, `C` vectors of the dimension at a time.
///
/// # Safety
///
/// `numerator`, and `rescale` if there is one, start at a row of their block and `R` rows fit from there; `weights` starts
/// at this row too and `tokens` keys fit from there; `tokens` is at most the rows of `v`; and the instructions of `I` are
/// there.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
unsafe fn accumulate_rows<I: Isa, E: Element, const R: usize, const C: usize>(
    weights: *const f32,
    tokens: usize,
    v: &Rows,
    all: &[E],
    rescale: Option<*const f32>,
    numerator: *mut f32,
    ahead: &Addresses,
) {
    // As many dims of the rows ahead are fetched per key as are computed, one row after the other.
    let (strip, strips_per_row) = (C * I::W, HEAD_DIM / (C * I::W));
    let (first, stride) = v.span(all);
    for s in 0..strips_per_row {
        let mut acc = [[I::splat(0.0); C]; R];
        let mut row = first.wrapping_add(s * strip);
        for t in 0..tokens {
            let step = s * TILE + t;
            let at = step % strips_per_row * strip * ahead.size;
            let next = ahead.row(step / strips_per_row).wrapping_add(at);
            for line in 0..lines::<E>(strip) {
                I::prefetch(next.wrapping_add(line * 64));
            }
            let mut value = [I::splat(0.0); C];
            for c in (0..C).step_by(2) {
                [value[c], value[c + 1]] = E::load2::<I>(row.add(c * I::W));
            }
            for r in 0..R {
                let weight = I::splat(*weights.add(t * BLOCK + r));
                for c in 0..C {
                    acc[r][c] = I::fma(weight, value[c], acc[r][c]);
                }
            }
            row = row.wrapping_add(stride);
        }
        for r in 0..R {
            let to = numerator.add(r * HEAD_DIM + s * strip);
            for c in 0..C {
                let to = to.add(c * I::W);
                let sum = match rescale {
                    Some(rescale) => I::fma(I::load(to), I::splat(*rescale.add(r)), acc[r][c]),
                    None => acc[r][c],
                };
                I::store(to, sum);
            }
        }
    }
}

/// Adds weighted rows of `v` to the numerators of a block.
///
/// # Safety
///
/// The instructions of `I` are there.
#[inline(always)]
pub(super) unsafe fn accumulate<I: Isa, E: Element>(
    addend: Addend,
    v: &Rows,
    all: &[E],
    numerator: &mut BlockRows,
    ahead: &Addresses,
) {
    let (first, rows) = match addend.part {
        Part::First(rows) => (0, rows),
        Part::Only(row) => (row.min(BLOCK - 1), 1),
    };
    let token = addend.token.min(TILE);
    let tokens = v.len().min(TILE - token);
    let weights = addend.weights.as_ptr().wrapping_add(token * BLOCK + first);
    let rescale = addend.rescale.map(|rescale| rescale.as_ptr().add(first));
    let to = numerator.as_mut_ptr().add(first * HEAD_DIM);
    match rows {
        1 => accumulate_rows::<I, E, 1, 4>(weights, tokens, v, all, rescale, to, ahead),
        2 => accumulate_rows::<I, E, 2, 4>(weights, tokens, v, all, rescale, to, ahead),
        3 | 4 => accumulate_rows::<I, E, 4, 2>(weights, tokens, v, all, rescale, to, ahead),
        _ if I::W == 16 => {
            accumulate_rows::<I, E, 8, 2>(weights, tokens, v, all, rescale, to, ahead)
        }
        _ => {
            accumulate_rows::<I, E, 4, 2>(weights, tokens, v, all, rescale, to, ahead);
            let weights = weights.wrapping_add(4);
            let rescale = rescale.map(|rescale| rescale.add(4));
            let to = to.add(4 * HEAD_DIM);
            accumulate_rows::<I, E, 4, 2>(weights, tokens, v, all, rescale, to, ahead)
        }
    }
}

/// The rows in f32, in the order of their type.
///
/// # Safety
///
/// The instructions of `I` are there.
#[inline(always)]
pub(super) unsafe fn widen<I: Isa, E: Element>(rows: &Rows, all: &[E], to: &mut [[f32; HEAD_DIM]]) {
    let (first, stride) = rows.span(all);
    for (i, to) in to.iter_mut().enumerate().take(rows.len()) {
        let row = first.add(i * stride);
        for d in (0..HEAD_DIM).step_by(2 * I::W) {
            let [a, b] = E::load2::<I>(row.add(d));
            I::store(to.as_mut_ptr().add(d), a);
            I::store(to.as_mut_ptr().add(d + I::W), b);
        }
    }
}
