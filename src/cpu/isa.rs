//! The few vector operations that the kernels are written in, and their portable form.

use half::{bf16, f16};

/// A vector of `W` f32 lanes.
///
/// # Safety
///
/// Every method may only be called on a CPU that has the instructions its implementor is named for, from inside a
/// function compiled for them (else the calls are not inlined); pointers must be valid for `W` elements (`store_sums`:
/// for 4, `load_bf16_pairs`: for `2 * W`). `prefetch` takes any address.
pub(crate) trait Isa: Copy {
    type V: Copy;
    const W: usize;

    unsafe fn splat(x: f32) -> Self::V;
    unsafe fn load(p: *const f32) -> Self::V;
    unsafe fn load_f16(p: *const f16) -> Self::V;
    unsafe fn load_bf16(p: *const bf16) -> Self::V;
    /// `2 * W` elements: those with an even index, those with an odd one. Two operations on whole words widen them,
    /// where keeping the order would take four; see [`Order`].
    unsafe fn load_bf16_pairs(p: *const bf16) -> [Self::V; 2];
    unsafe fn store(p: *mut f32, v: Self::V);
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger of `a` and `b`, `b` where `a` is NaN.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// `0` where `x < bound`, else `v`; so a NaN in `x` keeps `v`.
    unsafe fn zero_below(x: Self::V, bound: f32, v: Self::V) -> Self::V;
    /// `2^n` for `t = n + 1.5 * 2^23`, `n` an integer in `-126..=127`.
    unsafe fn pow2_of_rounded(t: Self::V) -> Self::V;
    /// Writes the four sums over lanes, each times `scale`.
    unsafe fn store_sums(v: [Self::V; 4], scale: f32, out: *mut f32);
    /// Asks for the cache line at `p` to be brought as far as the second-level cache.
    unsafe fn prefetch(p: *const u8);
}

/// A stored element type.
pub(crate) trait Element: Copy + 'static {
    const ZERO: Self;

    /// `2 * W` elements, in the [`Order`] of the type.
    ///
    /// # Safety
    ///
    /// As for [`Isa`].
    unsafe fn load2<I: Isa>(p: *const Self) -> [I::V; 2];

    /// `W` elements as they are, whatever the order of the type.
    ///
    /// # Safety
    ///
    /// As for [`Isa`].
    unsafe fn load<I: Isa>(p: *const Self) -> I::V;
}

impl Element for f32 {
    const ZERO: Self = 0.0;

    #[inline(always)]
    unsafe fn load2<I: Isa>(p: *const Self) -> [I::V; 2] {
        [I::load(p), I::load(p.add(I::W))]
    }

    #[inline(always)]
    unsafe fn load<I: Isa>(p: *const Self) -> I::V {
        I::load(p)
    }
}

impl Element for f16 {
    const ZERO: Self = f16::ZERO;

    #[inline(always)]
    unsafe fn load2<I: Isa>(p: *const Self) -> [I::V; 2] {
        [I::load_f16(p), I::load_f16(p.add(I::W))]
    }

    #[inline(always)]
    unsafe fn load<I: Isa>(p: *const Self) -> I::V {
        I::load_f16(p)
    }
}

impl Element for bf16 {
    const ZERO: Self = bf16::ZERO;

    #[inline(always)]
    unsafe fn load2<I: Isa>(p: *const Self) -> [I::V; 2] {
        I::load_bf16_pairs(p)
    }

    #[inline(always)]
    unsafe fn load<I: Isa>(p: *const Self) -> I::V {
        I::load_bf16(p)
    }
}

/// The order in which kernels see the elements of a row: as they are, or each group of `2 * W` with its even elements
/// before its odd ones. Queries are brought into the order of K, numerators come out in the order of V.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Plain,
    Pairs { lanes: usize },
}

impl Order {
    /// From plain to this order.
    pub fn apply(self, row: &mut [f32]) {
        match self {
            Self::Plain => {}
            Self::Pairs { lanes: 8 } => {
                regroup::<8, 16>(row, |i, half| 2 * i + half, |i, half| half * 8 + i)
            }
            Self::Pairs { .. } => {
                regroup::<16, 32>(row, |i, half| 2 * i + half, |i, half| half * 16 + i)
            }
        }
    }

    /// From this order to plain.
    pub fn undo(self, row: &mut [f32]) {
        match self {
            Self::Plain => {}
            Self::Pairs { lanes: 8 } => {
                regroup::<8, 16>(row, |i, half| half * 8 + i, |i, half| 2 * i + half)
            }
            Self::Pairs { .. } => {
                regroup::<16, 32>(row, |i, half| half * 16 + i, |i, half| 2 * i + half)
            }
        }
    }
}

/// Moves `from(i, half)` to `to(i, half)` in each group of `G = 2 * W`.
#[inline(always)]
fn regroup<const W: usize, const G: usize>(
    row: &mut [f32],
    from: impl Fn(usize, usize) -> usize,
    to: impl Fn(usize, usize) -> usize,
) {
    for group in row.as_chunks_mut::<G>().0 {
        let old = *group;
        for i in 0..W {
            for half in 0..2 {
                group[to(i, half)] = old[from(i, half)];
            }
        }
    }
}

/// Plain arrays, which LLVM turns into whatever vectors the target has.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

macro_rules! lanes {
    (|$i:ident| $e:expr) => {{
        let mut out = [0f32; 8];
        for $i in 0..8 {
            out[$i] = $e;
        }
        out
    }};
}

/// Branch-free, so that it vectorises: the exponent is rebiased by a multiplication, which is exact for subnormals too.
#[inline(always)]
fn f16_to_f32(h: u16) -> f32 {
    const REBIAS: f32 = f32::from_bits((254 - 15) << 23);
    let sign = ((h & 0x8000) as u32) << 16;
    let magnitude = ((h & 0x7fff) as u32) << 13;
    let scaled = (f32::from_bits(magnitude) * REBIAS).to_bits();
    let not_finite = if h & 0x7c00 == 0x7c00 { 0xff << 23 } else { 0 };
    f32::from_bits(scaled | not_finite | sign)
}

impl Isa for Portable {
    type V = [f32; 8];
    const W: usize = 8;

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::V {
        [x; 8]
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::V {
        p.cast::<Self::V>().read()
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const f16) -> Self::V {
        let bits = p.cast::<[u16; 8]>().read();
        lanes!(|i| f16_to_f32(bits[i]))
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const bf16) -> Self::V {
        let bits = p.cast::<[u16; 8]>().read();
        lanes!(|i| f32::from_bits((bits[i] as u32) << 16))
    }

    #[inline(always)]
    unsafe fn load_bf16_pairs(p: *const bf16) -> [Self::V; 2] {
        let bits = p.cast::<[u16; 16]>().read();
        [
            lanes!(|i| f32::from_bits((bits[2 * i] as u32) << 16)),
            lanes!(|i| f32::from_bits((bits[2 * i + 1] as u32) << 16)),
        ]
    }

    #[inline(always)]
    unsafe fn store(p: *mut f32, v: Self::V) {
        p.cast::<Self::V>().write(v);
    }

    #[inline(always)]
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V {
        lanes!(|i| a[i] + b[i])
    }

    #[inline(always)]
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V {
        lanes!(|i| a[i] - b[i])
    }

    #[inline(always)]
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V {
        lanes!(|i| a[i] * b[i])
    }

    #[inline(always)]
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Without the instruction, mul_add is a call into libm.
        if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
            lanes!(|i| a[i].mul_add(b[i], c[i]))
        } else {
            lanes!(|i| a[i] * b[i] + c[i])
        }
    }

    #[inline(always)]
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V {
        lanes!(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }

    #[inline(always)]
    unsafe fn zero_below(x: Self::V, bound: f32, v: Self::V) -> Self::V {
        lanes!(|i| if x[i] < bound { 0.0 } else { v[i] })
    }

    #[inline(always)]
    unsafe fn pow2_of_rounded(t: Self::V) -> Self::V {
        lanes!(|i| f32::from_bits((t[i].to_bits() << 23).wrapping_add(1f32.to_bits())))
    }

    #[inline(always)]
    unsafe fn store_sums(v: [Self::V; 4], scale: f32, out: *mut f32) {
        for (i, v) in v.into_iter().enumerate() {
            let half = [v[0] + v[4], v[1] + v[5], v[2] + v[6], v[3] + v[7]];
            let sum = (half[0] + half[2]) + (half[1] + half[3]);
            out.add(i).write(sum * scale);
        }
    }

    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_widens_to_its_value() {
        for bits in 0..=u16::MAX {
            let want = f16::from_bits(bits).to_f32();
            let got = f16_to_f32(bits);
            assert!(
                got == want || got.is_nan() && want.is_nan(),
                "{bits:#06x}: {got} {want}"
            );
        }
    }

    #[test]
    fn undoing_an_order_gives_the_plain_row_back() {
        let plain: Vec<f32> = (0..512).map(|i| i as f32).collect();
        for order in [
            Order::Plain,
            Order::Pairs { lanes: 8 },
            Order::Pairs { lanes: 16 },
        ] {
            let mut row = plain.clone();
            order.apply(&mut row);
            assert_eq!(row == plain, order == Order::Plain);
            order.undo(&mut row);
            assert_eq!(row, plain);
        }
    }
}
