//! bf16 times bf16 with AVX512_BF16, which multiplies pairs: twice the products of an FMA, and nothing to widen.
//!
//! Products of bf16 are exact in f32 and sums are kept in f32, so this is as exact as the f32 kernels; subnormal inputs count
//! as 0.

use std::arch::x86_64::*;

use half::bf16;

use super::body::{self, Block, Multiply};
use crate::cpu::isa::Order;
use crate::cpu::x86::Avx512;

/// Needs `avx512f` and `avx512bf16`.
struct Halves;

#[inline(always)]
unsafe fn pair(p: *const bf16) -> __m512bh {
    std::mem::transmute(_mm512_loadu_si512(p.cast()))
}

impl Multiply for Halves {
    type I = Avx512;
    type X = bf16;
    type W = bf16;
    type Staged = bf16;
    type Pair = __m512bh;

    #[inline(always)]
    unsafe fn stage(from: *const bf16, _: Order, to: *mut bf16) {
        _mm512_storeu_si512(to.cast(), _mm512_loadu_si512(from.cast()));
    }

    #[inline(always)]
    unsafe fn staged(p: *const bf16) -> __m512bh {
        pair(p)
    }

    #[inline(always)]
    unsafe fn weights(p: *const bf16) -> __m512bh {
        pair(p)
    }

    #[inline(always)]
    unsafe fn multiply_add(x: __m512bh, w: __m512bh, sum: __m512) -> __m512 {
        _mm512_dpbf16_ps(sum, x, w)
    }
}

/// As [`body::product`].
///
/// # Safety
///
/// As for it; the CPU has AVX512F and AVX512_BF16.
#[target_feature(enable = "avx512f,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn product(b: &Block, x: &[bf16], w: &[bf16], scratch: &mut [f32]) {
    body::product::<Halves>(b, x, w, scratch)
}
