//! One table of kernels per instruction set.

use candle::Result;
use half::bf16;

use super::body::{self, Block, Wide};
#[cfg(target_arch = "x86_64")]
use super::halves;
use super::Elements;
use crate::cpu::isa::{Isa, Portable};
#[cfg(target_arch = "x86_64")]
use crate::cpu::x86::{Avx2, Avx512};
use crate::cpu::CpuKernel;

type ProductFn = unsafe fn(&Block, Elements, Elements, &mut [f32]);
type HalvesFn = unsafe fn(&Block, &[bf16], &[bf16], &mut [f32]);

/// Kernels whose instructions this CPU has: only [`Kernels::new`] hands them out.
#[derive(Clone, Copy)]
pub(super) struct Kernels {
    product: ProductFn,
    /// bf16 times bf16 without widening.
    halves: Option<HalvesFn>,
    /// f32 lanes of a vector.
    pub lanes: usize,
}

impl Kernels {
    pub fn new(kernel: CpuKernel, op: &str) -> Result<Self> {
        kernel.check(op)?;
        Ok(match kernel {
            #[cfg(target_arch = "x86_64")]
            CpuKernel::Avx2 => avx2::KERNELS,
            #[cfg(target_arch = "x86_64")]
            CpuKernel::Avx512 => avx512::KERNELS,
            #[cfg(target_arch = "x86_64")]
            CpuKernel::Avx512Bf16 => Self {
                halves: Some(halves::product),
                ..avx512::KERNELS
            },
            _ => portable::KERNELS,
        })
    }

    /// See [`body::product`].
    ///
    /// # Safety
    ///
    /// `y` of the block is valid for its rectangle, and no one else uses it meanwhile.
    pub unsafe fn product(&self, block: &Block, x: Elements, w: Elements, scratch: &mut [f32]) {
        match (self.halves, x, w) {
            (Some(product), Elements::BF16(x), Elements::BF16(w)) => product(block, x, w, scratch),
            _ => (self.product)(block, x, w, scratch),
        }
    }
}

macro_rules! kernels {
    ($module:ident, $isa:ty $(, #[$features:meta])?) => {
        mod $module {
            use super::*;

            pub(super) const KERNELS: Kernels = Kernels {
                product,
                halves: None,
                lanes: <$isa>::W,
            };

            $(#[$features])?
            unsafe fn product(b: &Block, x: Elements, w: Elements, scratch: &mut [f32]) {
                use Elements::{BF16, F16, F32};
                match (x, w) {
                    (F32(x), F32(w)) => body::product::<Wide<$isa, _, _>>(b, x, w, scratch),
                    (F32(x), F16(w)) => body::product::<Wide<$isa, _, _>>(b, x, w, scratch),
                    (F32(x), BF16(w)) => body::product::<Wide<$isa, _, _>>(b, x, w, scratch),
                    (F16(x), F16(w)) => body::product::<Wide<$isa, _, _>>(b, x, w, scratch),
                    (BF16(x), BF16(w)) => body::product::<Wide<$isa, _, _>>(b, x, w, scratch),
                    // The geometry admits no other.
                    (F16(_) | BF16(_), _) => {}
                }
            }
        }
    };
}

kernels!(portable, Portable);
#[cfg(target_arch = "x86_64")]
kernels!(avx2, Avx2, #[target_feature(enable = "avx2,fma,f16c")]);
#[cfg(target_arch = "x86_64")]
kernels!(avx512, Avx512, #[target_feature(enable = "avx512f,avx2,fma,f16c")]);
