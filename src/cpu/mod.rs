//! What the CPU executors share: the choice of instructions, and vectors of them.

pub(crate) mod isa;
pub(crate) mod lines;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

use candle::{bail, Result};

/// The instructions that a CPU executor may use.
///
/// Results agree within rounding between kernels and repeat bit for bit with one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum CpuKernel {
    /// What the crate was compiled for: every CPU, SSE2 or NEON and up.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512F, and what [`CpuKernel::Avx2`] needs.
    Avx512,
    /// x86-64 with AVX512_BF16 too, which serves bf16 on bf16; the rest as [`CpuKernel::Avx512`].
    Avx512Bf16,
}

impl CpuKernel {
    /// From the slowest to the fastest.
    pub const ALL: [Self; 4] = [Self::Portable, Self::Avx2, Self::Avx512, Self::Avx512Bf16];

    /// The fastest one that this CPU can run.
    pub fn best() -> Self {
        Self::ALL
            .into_iter()
            .rfind(|kernel| kernel.is_available())
            .unwrap_or(Self::Portable)
    }

    /// Whether this CPU can run it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => is_x86_feature_detected!("avx512f") && Self::Avx2.is_available(),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => {
                is_x86_feature_detected!("avx512bf16") && Self::Avx512.is_available()
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Avx512Bf16 => false,
        }
    }

    /// Fails if this CPU cannot run it; `op` prefixes the error.
    pub(crate) fn check(self, op: &str) -> Result<()> {
        if !self.is_available() {
            bail!(
                "{op}: this CPU cannot run the {self:?} kernel, the best it has is {:?}",
                Self::best()
            );
        }
        Ok(())
    }
}
