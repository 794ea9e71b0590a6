//! x86-64 vectors: AVX2 with FMA and F16C, and AVX-512F.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::isa::Isa;

/// Needs `avx2`, `fma` and `f16c`.
#[derive(Clone, Copy)]
pub(crate) struct Avx2;

impl Isa for Avx2 {
    type V = __m256;
    const W: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        _mm256_set1_ps(x)
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        _mm256_loadu_ps(p)
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self::V {
        _mm256_cvtph_ps(_mm_loadu_si128(p.cast()))
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self::V {
        let wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const bf16) -> [Self::V; 2] {
        let pairs = _mm256_loadu_si256(p.cast());
        let odd = _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff_0000u32 as i32));
        [
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(pairs)),
            _mm256_castsi256_ps(odd),
        ]
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        _mm256_storeu_ps(p, v);
    }

    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        _mm256_add_ps(a, b)
    }

    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        _mm256_sub_ps(a, b)
    }

    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        _mm256_mul_ps(a, b)
    }

    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        _mm256_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        _mm256_max_ps(a, b)
    }

    #[inline(always)]
    unsafe fn zero_below(x: Self::V, bound: f32, v: Self::V) -> Self::V {
        let below = _mm256_cmp_ps::<_CMP_LT_OQ>(x, _mm256_set1_ps(bound));
        _mm256_andnot_ps(below, v)
    }

    #[inline(always)]
    unsafe fn pow2_of_rounded(t: Self::V) -> Self::V {
        let n = _mm256_slli_epi32::<23>(_mm256_castps_si256(t));
        let one = _mm256_castps_si256(_mm256_set1_ps(1.0));
        _mm256_castsi256_ps(_mm256_add_epi32(n, one))
    }

    #[inline(always)]
    unsafe fn store_sums([a, b, c, d]: [Self::V; 4], scale: f32, out: *mut f32) {
        let ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        let abcd = _mm256_add_ps(
            _mm256_shuffle_ps::<0x44>(ab, cd),
            _mm256_shuffle_ps::<0xee>(ab, cd),
        );
        let sums = _mm_add_ps(
            _mm256_castps256_ps128(abcd),
            _mm256_extractf128_ps::<1>(abcd),
        );
        _mm_storeu_ps(out, _mm_mul_ps(sums, _mm_set1_ps(scale)));
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        _mm_prefetch::<_MM_HINT_T1>(p.cast());
    }
}

/// Needs `avx512f`.
#[derive(Clone, Copy)]
pub(crate) struct Avx512;

impl Isa for Avx512 {
    type V = __m512;
    const W: usize = 16;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        _mm512_set1_ps(x)
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        _mm512_loadu_ps(p)
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self::V {
        _mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self::V {
        let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const bf16) -> [Self::V; 2] {
        let pairs = _mm512_loadu_si512(p.cast());
        let odd = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000u32 as i32));
        [
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)),
            _mm512_castsi512_ps(odd),
        ]
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        _mm512_storeu_ps(p, v);
    }

    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        _mm512_add_ps(a, b)
    }

    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        _mm512_sub_ps(a, b)
    }

    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        _mm512_mul_ps(a, b)
    }

    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        _mm512_fmadd_ps(a, b, c)
    }

    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        _mm512_max_ps(a, b)
    }

    #[inline(always)]
    unsafe fn zero_below(x: Self::V, bound: f32, v: Self::V) -> Self::V {
        let keep = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(bound));
        _mm512_maskz_mov_ps(keep, v)
    }

    #[inline(always)]
    unsafe fn pow2_of_rounded(t: Self::V) -> Self::V {
        let n = _mm512_slli_epi32::<23>(_mm512_castps_si512(t));
        let one = _mm512_castps_si512(_mm512_set1_ps(1.0));
        _mm512_castsi512_ps(_mm512_add_epi32(n, one))
    }

    #[inline(always)]
    unsafe fn store_sums([a, b, c, d]: [Self::V; 4], scale: f32, out: *mut f32) {
        let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        let abcd = _mm512_add_ps(
            _mm512_shuffle_ps::<0x44>(ab, cd),
            _mm512_shuffle_ps::<0xee>(ab, cd),
        );
        let high = _mm512_shuffle_f32x4::<0x4e>(abcd, abcd);
        let half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_castps512_ps256(high));
        let sums = _mm_add_ps(
            _mm256_castps256_ps128(half),
            _mm256_extractf128_ps::<1>(half),
        );
        _mm_storeu_ps(out, _mm_mul_ps(sums, _mm_set1_ps(scale)));
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        _mm_prefetch::<_MM_HINT_T1>(p.cast());
    }
}
