//! The product, written once over [`Multiply`] and compiled once per instruction set and pair of types by `kernels.rs`.
//!
//! An element of y is one chain of multiply-adds per vector lane, over all of k in ascending order, and one sum of the lanes
//! at the end. Tiles, slices of k and threads decide only when a step of the chain is taken, so its bits depend on
//! nothing but its row of x and its row of w.

// Plain index loops over constant bounds are what becomes registers.
#![allow(clippy::needless_range_loop, clippy::manual_memcpy)]

use std::any::TypeId;
use std::marker::PhantomData;

use crate::cpu::isa::{Element, Isa, Order};

/// The most rows of x that share one pass over w.
const ROWS: usize = 8;

/// Elements of x that are worked on between two columns: half of a first-level cache, the rest is for the weights.
const SLICE: usize = 4096;

/// Elements of the widest pair of vectors.
const PAIR: usize = 32;

/// Weights are fetched into the second-level cache so many rows before they are multiplied: 8 and 12 were the best of 3 to
/// 48, by little.
const ROWS_AHEAD: usize = 12;

/// Vectors of f32 sums, and what is added to them at a time: a pair of vectors of x times a pair of w.
///
/// # Safety
///
/// As for [`Isa`]; pointers are valid for a pair, `2 * W` elements.
pub(super) trait Multiply {
    type I: Isa;
    type X: Element;
    type W: Element;
    /// What x is kept as while columns go by.
    type Staged: Copy;
    type Pair: Copy;

    unsafe fn stage(from: *const Self::X, order: Order, to: *mut Self::Staged);
    unsafe fn staged(p: *const Self::Staged) -> Self::Pair;
    unsafe fn weights(p: *const Self::W) -> Self::Pair;
    unsafe fn multiply_add(x: Self::Pair, w: Self::Pair, sum: Vector<Self>) -> Vector<Self>;
}

type Vector<M> = <<M as Multiply>::I as Isa>::V;

/// Everything is widened to f32.
pub(super) struct Wide<I, X, W>(PhantomData<(I, X, W)>);

impl<I: Isa, X: Element, W: Element> Multiply for Wide<I, X, W> {
    type I = I;
    type X = X;
    type W = W;
    type Staged = f32;
    type Pair = [I::V; 2];

    #[inline(always)]
    unsafe fn stage(from: *const X, order: Order, to: *mut f32) {
        let [a, b] = X::load2::<I>(from);
        I::store(to, a);
        I::store(to.add(I::W), b);
        order.apply(std::slice::from_raw_parts_mut(to, 2 * I::W));
    }

    #[inline(always)]
    unsafe fn staged(p: *const f32) -> [I::V; 2] {
        [I::load(p), I::load(p.add(I::W))]
    }

    #[inline(always)]
    unsafe fn weights(p: *const W) -> [I::V; 2] {
        W::load2::<I>(p)
    }

    #[inline(always)]
    unsafe fn multiply_add(x: [I::V; 2], w: [I::V; 2], sum: I::V) -> I::V {
        I::fma(x[1], w[1], I::fma(x[0], w[0], sum))
    }
}

/// A rectangle of y: `rows` rows of x times `columns` rows of w.
pub(super) struct Block {
    /// Offset of the first element and distance between rows, in elements.
    pub x_start: usize,
    pub x_stride: usize,
    pub rows: usize,
    /// As those of x.
    pub w_start: usize,
    pub w_stride: usize,
    pub columns: usize,
    pub k: usize,
    /// What brings elements of x into the order of those of w.
    pub order: Order,
    /// The first element of the rectangle.
    pub y: *mut f32,
    pub y_stride: usize,
}

impl Block {
    /// Elements of k that `R` rows take between two columns. One or two rows take all of them, since then the weights come
    /// from far away and are best read in one go.
    #[inline(always)]
    fn slice<const R: usize>(&self) -> usize {
        match R {
            1 | 2 => self.k,
            _ => SLICE / R / PAIR * PAIR,
        }
    }

    /// Elements of a staged slice, its last pairs filled up.
    fn x_len(&self) -> usize {
        SLICE.max(2 * self.k) + ROWS * PAIR
    }

    /// f32 that [`product`] works in.
    pub fn scratch_len(&self) -> usize {
        // The last tile may reach past the end, by less than its 8 columns.
        self.x_len() + ROWS * (self.columns + 8) * (PAIR / 2)
    }
}

/// Takes `len` elements further, which are whole pairs; what a later tile will read of w lies `ahead` bytes further on.
///
/// # Safety
///
/// `x` is valid for the pairs of `R` rows, each of `w` for `len` elements, and the instructions of `M` are there.
#[inline(always)]
unsafe fn steps<M: Multiply, const R: usize, const N: usize>(
    mut x: *const M::Staged,
    w: &[*const M::W; N],
    len: usize,
    ahead: usize,
    sums: &mut [[Vector<M>; N]; R],
) {
    let pair = 2 * M::I::W;
    for d in (0..len).step_by(pair) {
        let mut weights = [M::weights(w[0].add(d)); N];
        for n in 0..N {
            let at = w[n].add(d);
            weights[n] = M::weights(at);
            let next = at.cast::<u8>().wrapping_add(ahead);
            for line in 0..(pair * size_of::<M::W>()).div_ceil(64) {
                M::I::prefetch(next.wrapping_add(64 * line));
            }
        }
        for r in 0..R {
            let x = M::staged(x.add(r * pair));
            for n in 0..N {
                sums[r][n] = M::multiply_add(x, weights[n], sums[r][n]);
            }
        }
        x = x.add(R * pair);
    }
}

/// `len` elements, fewer than a pair, and zeros.
///
/// # Safety
///
/// `from` is valid for `len` elements.
#[inline(always)]
unsafe fn filled_up<E: Element>(from: *const E, len: usize) -> [E; PAIR] {
    let mut copy = [E::ZERO; PAIR];
    std::ptr::copy_nonoverlapping(from, copy.as_mut_ptr(), len.min(PAIR));
    copy
}

/// `len` elements of `R` rows of x as [`steps`] takes them: a pair of each row, then the next pairs; in the order of w,
/// filled up with zeros.
///
/// # Safety
///
/// `x` is valid for `R` rows of `len` elements, `to` for what comes out, and the instructions of `M` are there.
#[inline(always)]
unsafe fn stage<M: Multiply, const R: usize>(
    x: *const M::X,
    stride: usize,
    len: usize,
    order: Order,
    mut to: *mut M::Staged,
) {
    let pair = 2 * M::I::W;
    for d in (0..len).step_by(pair) {
        for r in 0..R {
            let from = x.add(r * stride + d);
            match len - d < pair {
                true => M::stage(filled_up(from, len - d).as_ptr(), order, to),
                false => M::stage(from, order, to),
            }
            to = to.add(pair);
        }
    }
}

/// A slice of `R` rows of x that will be staged next. Fetched bit by bit while columns go by, for it lies further away than
/// the weights, which many rows share.
struct Next {
    first: *const u8,
    stride: usize,
    /// Cache lines of a row.
    lines: usize,
}

impl Next {
    /// # Safety
    ///
    /// The instructions of `I` are there.
    #[inline(always)]
    unsafe fn fetch<I: Isa>(&self, lines: std::ops::Range<usize>) {
        for line in lines {
            let row = line / self.lines * self.stride;
            I::prefetch(self.first.wrapping_add(row + line % self.lines * 64));
        }
    }
}

/// `R` rows, whose first is `row`, times all columns of the block, `N` at a time.
///
/// # Safety
///
/// `x` and `w` are valid for the rows of the block, `scratch` for what it asks for, and the instructions of `M` are there.
#[inline(always)]
unsafe fn rows<M: Multiply, const R: usize, const N: usize>(
    b: &Block,
    x: *const M::X,
    w: *const M::W,
    row: usize,
    scratch: *mut f32,
) {
    const { assert!(R <= ROWS && N <= 8 && 2 * M::I::W <= PAIR) }
    let lanes = M::I::W;
    let (x, staged) = (x.add(row * b.x_stride), scratch.cast::<M::Staged>());
    let slice = b.slice::<R>();
    for from in (0..b.k).step_by(slice) {
        let len = slice.min(b.k - from);
        let whole = len / (2 * lanes) * (2 * lanes);
        let last = from + len == b.k;
        stage::<M, R>(x.add(from), b.x_stride, len, b.order, staged);
        let next = Next {
            first: match last {
                true => x.wrapping_add(R * b.x_stride).cast(),
                false => x.add(from + len).cast(),
            },
            stride: b.x_stride * size_of::<M::X>(),
            lines: (slice * size_of::<M::X>()).div_ceil(64),
        };
        let share = (R * next.lines).div_ceil(b.columns.div_ceil(N));
        for (i, column) in (0..b.columns).step_by(N).enumerate() {
            if R == ROWS {
                next.fetch::<M::I>(i * share..(i + 1) * share);
            }
            let mut tile = [w; N];
            for n in 0..N {
                // Past the end the last column again: no one looks at its sum.
                tile[n] = w.add((column + n).min(b.columns - 1) * b.w_stride + from);
            }
            let kept = scratch.add(b.x_len() + column * R * lanes);
            let mut sums = [[M::I::splat(0.0); N]; R];
            if from > 0 {
                for r in 0..R {
                    for n in 0..N {
                        sums[r][n] = M::I::load(kept.add((r * N + n) * lanes));
                    }
                }
            }
            let ahead = ROWS_AHEAD * b.w_stride * size_of::<M::W>();
            steps::<M, R, N>(staged, &tile, whole, ahead, &mut sums);
            if whole < len {
                let mut ends = [[M::W::ZERO; PAIR]; N];
                for n in 0..N {
                    ends[n] = filled_up(tile[n].add(whole), len - whole);
                    tile[n] = ends[n].as_ptr();
                }
                steps::<M, R, N>(staged.add(R * whole), &tile, 2 * lanes, 0, &mut sums);
            }
            if !last {
                for r in 0..R {
                    for n in 0..N {
                        M::I::store(kept.add((r * N + n) * lanes), sums[r][n]);
                    }
                }
                continue;
            }
            for r in 0..R {
                let mut out = [0f32; 8];
                for n4 in (0..N).step_by(4) {
                    let mut four = [M::I::splat(0.0); 4];
                    for n in n4..N.min(n4 + 4) {
                        four[n - n4] = sums[r][n];
                    }
                    M::I::store_sums(four, 1.0, out.as_mut_ptr().add(n4));
                }
                let y = b.y.add((row + r) * b.y_stride + column);
                std::ptr::copy_nonoverlapping(out.as_ptr(), y, N.min(b.columns - column));
            }
        }
    }
}

fn is_bf16<E: 'static>() -> bool {
    TypeId::of::<E>() == TypeId::of::<half::bf16>()
}

/// Writes the rectangle.
///
/// # Safety
///
/// `y` is valid for the rectangle, and the instructions of `M` are there.
#[inline(always)]
pub(super) unsafe fn product<M: Multiply>(b: &Block, x: &[M::X], w: &[M::W], scratch: &mut [f32]) {
    if b.rows == 0 || b.columns == 0 {
        return;
    }
    // Checked once here, so that tiles need no check.
    let x = x[b.x_start..b.x_start + (b.rows - 1) * b.x_stride + b.k].as_ptr();
    let w = w[b.w_start..b.w_start + (b.columns - 1) * b.w_stride + b.k].as_ptr();
    let scratch = scratch[..b.scratch_len()].as_mut_ptr();
    let mut row = 0;
    while row < b.rows {
        let rest = b.rows - row;
        if M::I::W == 16 {
            match rest {
                1 => rows::<M, 1, 8>(b, x, w, row, scratch),
                2 => rows::<M, 2, 8>(b, x, w, row, scratch),
                3 => rows::<M, 3, 6>(b, x, w, row, scratch),
                4 => rows::<M, 4, 6>(b, x, w, row, scratch),
                5 => rows::<M, 5, 4>(b, x, w, row, scratch),
                6 => rows::<M, 6, 4>(b, x, w, row, scratch),
                7 => rows::<M, 7, 3>(b, x, w, row, scratch),
                _ => rows::<M, 8, 3>(b, x, w, row, scratch),
            }
            row += rest.min(8);
        } else {
            // 16 registers hold 4 x 3 sums.
            match rest {
                1 => rows::<M, 1, 8>(b, x, w, row, scratch),
                2 => rows::<M, 2, 4>(b, x, w, row, scratch),
                3 => rows::<M, 3, 3>(b, x, w, row, scratch),
                // Both vectors of a bf16 pair come of one load, and both are held.
                _ if is_bf16::<M::W>() => rows::<M, 4, 2>(b, x, w, row, scratch),
                _ => rows::<M, 4, 3>(b, x, w, row, scratch),
            }
            row += rest.min(4);
        }
    }
}
