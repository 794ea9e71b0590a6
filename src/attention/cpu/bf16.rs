//! Scores of bf16 queries against bf16 keys with AVX512_BF16, which multiplies pairs: twice the products of an FMA.
//!
//! Products of bf16 are exact in f32 and sums are kept in f32, so this is as exact as the f32 kernels; subnormal inputs
//! count as 0. The weights of the value pass are f32, so there it would not pay.

// Plain index loops over constant bounds are what becomes registers.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use half::bf16;

use super::body::{BlockHalves, Scores, BLOCK, TILE};
use super::rows::{Addresses, Elements, Rows};
use crate::attention::geometry::HEAD_DIM;
use crate::cpu::isa::Isa;
use crate::cpu::x86::Avx512;

/// As `body::scores`. Keys of another type than bf16 leave `out` as it is.
///
/// # Safety
///
/// The CPU has AVX512F and AVX512_BF16.
#[target_feature(enable = "avx512f,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn scores(
    q: &BlockHalves,
    rows: usize,
    k: &Rows,
    scale: f32,
    out: &mut Scores,
    ahead: &Addresses,
) {
    let Elements::BF16(all) = k.elements() else {
        return;
    };
    let (q, out) = (q.as_ptr(), out.as_mut_ptr());
    match rows {
        1 => scores_rows::<1, 8>(q, k, all, scale, out, ahead),
        2 => scores_rows::<2, 4>(q, k, all, scale, out, ahead),
        3 | 4 => scores_rows::<4, 3>(q, k, all, scale, out, ahead),
        _ => scores_rows::<8, 3>(q, k, all, scale, out, ahead),
    }
}

/// # Safety
///
/// `q` is valid for `R` rows, `R` rows fit into `out`, the CPU has AVX512F and AVX512_BF16.
#[inline(always)]
unsafe fn scores_rows<const R: usize, const N: usize>(
    q: *const bf16,
    k: &Rows,
    all: &[bf16],
    scale: f32,
    out: *mut f32,
    ahead: &Addresses,
) {
    let pairs = |p: *const bf16| -> __m512bh { std::mem::transmute(_mm512_loadu_si512(p.cast())) };
    let (first, stride) = k.span(all);
    let last = k.len().saturating_sub(1);
    for t in (0..k.len().min(TILE)).step_by(N) {
        let mut keys = [first; N];
        let mut next = [std::ptr::null::<u8>(); N];
        for n in 0..N {
            keys[n] = first.add((t + n).min(last) * stride);
            next[n] = ahead.row(t + n);
        }
        let mut acc = [[_mm512_setzero_ps(); N]; R];
        for d in (0..HEAD_DIM).step_by(32) {
            let mut key = [pairs(keys[0].add(d)); N];
            for n in 1..N {
                key[n] = pairs(keys[n].add(d));
            }
            for n in 0..N {
                Avx512::prefetch(next[n].wrapping_add(d * ahead.size));
            }
            for r in 0..R {
                let q = pairs(q.add(r * HEAD_DIM + d));
                for n in 0..N {
                    acc[r][n] = _mm512_dpbf16_ps(acc[r][n], q, key[n]);
                }
            }
        }
        for n in 0..N {
            for r4 in (0..R).step_by(4) {
                let mut four = [_mm512_setzero_ps(); 4];
                for r in r4..R.min(r4 + 4) {
                    four[r - r4] = acc[r][n];
                }
                Avx512::store_sums(four, scale, out.add((t + n) * BLOCK + r4));
            }
        }
    }
}
