//! `exp` for arguments that are not positive, which is all that an online softmax needs.

use crate::cpu::isa::Isa;

/// Below this `2^n` would be subnormal. `exp` is below 1.2e-38 there, and 0 is returned.
const SMALLEST: f32 = -87.3;

/// Rounds to an integer when added: 1.5 * 2^23.
const ROUND: f32 = 12_582_912.0;

/// ln 2 in two parts: the first has 9 bits, so that its product with `n` is exact without a fused multiply.
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// `exp(x)` for `x <= 0`, and NaN for NaN. Relative error below 1.5e-7 down to -87.3, then 0.
///
/// `x = n ln 2 + r` with `|r| <= ln(2) / 2`, and the Taylor series of degree 7 for `exp(r)`, whose remainder is below
/// 6e-9: its coefficients need no tuning.
///
/// # Safety
///
/// As for [`Isa`].
#[inline(always)]
pub(super) unsafe fn exp<I: Isa>(x: I::V) -> I::V {
    let t = I::fma(x, I::splat(std::f32::consts::LOG2_E), I::splat(ROUND));
    let n = I::sub(t, I::splat(ROUND));
    let r = I::fma(n, I::splat(-LN2_HIGH), x);
    let r = I::fma(n, I::splat(-LN2_LOW), r);
    let mut y = I::splat(1.0 / 5040.0);
    y = I::fma(y, r, I::splat(1.0 / 720.0));
    y = I::fma(y, r, I::splat(1.0 / 120.0));
    y = I::fma(y, r, I::splat(1.0 / 24.0));
    y = I::fma(y, r, I::splat(1.0 / 6.0));
    y = I::fma(y, r, I::splat(0.5));
    y = I::fma(y, r, I::splat(1.0));
    y = I::fma(y, r, I::splat(1.0));
    I::zero_below(x, SMALLEST, I::mul(y, I::pow2_of_rounded(t)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::isa::Portable;

    fn portable(x: f32) -> f32 {
        // SAFETY: Portable runs on every CPU and takes no pointer here.
        unsafe { exp::<Portable>([x; 8])[0] }
    }

    #[test]
    fn relative_error_is_below_1_5e_7_where_the_result_is_normal() {
        let mut worst = 0f64;
        for i in 0..1_000_000 {
            let x = -87.3 * (i as f32 / 999_999.0);
            let want = (x as f64).exp();
            worst = worst.max((portable(x) as f64 / want - 1.0).abs());
        }
        assert!(worst < 1.5e-7, "{worst:e}");
    }

    #[test]
    fn zero_gives_exactly_one_and_the_far_end_exactly_zero() {
        assert_eq!(portable(0.0), 1.0);
        for x in [-88.0, -1e30, f32::MIN, f32::NEG_INFINITY] {
            assert_eq!(portable(x), 0.0, "{x}");
        }
    }

    #[test]
    fn nan_stays_nan() {
        assert!(portable(f32::NAN).is_nan());
    }
}
