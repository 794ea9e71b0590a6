//! One table of kernels per instruction set.

use candle::Result;

#[cfg(target_arch = "x86_64")]
use super::bf16;
use super::body::{self, Addend, BlockHalves, BlockRows, BlockState, Scores};
use super::rows::{Addresses, Elements, Rows};
use super::shared::{self, Shared, Strip};
use crate::attention::geometry::HEAD_DIM;
use crate::cpu::isa::{Isa, Order, Portable};
#[cfg(target_arch = "x86_64")]
use crate::cpu::x86::{Avx2, Avx512};
use crate::cpu::CpuKernel;

impl CpuKernel {
    pub(super) fn kernels(self) -> Result<Kernels> {
        self.check("attention_d512")?;
        Ok(match self {
            Self::Portable => portable::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => avx2::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => avx512::KERNELS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Bf16 => Kernels {
                halves: Some(bf16::scores),
                ..avx512::KERNELS
            },
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 | Self::Avx512Bf16 => portable::KERNELS,
        })
    }
}

type ScoresFn = unsafe fn(&BlockRows, usize, &Rows, f32, &mut Scores, &Addresses);
type HalvesFn = unsafe fn(&BlockHalves, usize, &Rows, f32, &mut Scores, &Addresses);
type SoftmaxFn = unsafe fn(&mut Scores, usize, &mut BlockState);
type AccumulateFn = unsafe fn(Addend, &Rows, &mut BlockRows, &Addresses);
type WidenFn = unsafe fn(&Rows, &mut [[f32; HEAD_DIM]]);
type RebuildFn = unsafe fn(&Shared, &mut [[f32; HEAD_DIM]]);
type SharedScoresFn =
    unsafe fn(&BlockRows, usize, &Shared, f32, &mut Strip, &mut Scores, &Addresses);

/// Query rows of a block.
#[derive(Clone, Copy)]
pub(super) enum Queries<'a> {
    /// In the order of K.
    Wide(&'a BlockRows),
    Halves(&'a BlockHalves),
}

/// Kernels whose instructions this CPU has: only [`CpuKernel::kernels`] hands them out.
#[derive(Clone, Copy)]
pub(super) struct Kernels {
    scores: ScoresFn,
    /// Scores of bf16 queries on bf16 keys without widening.
    halves: Option<HalvesFn>,
    softmax: SoftmaxFn,
    accumulate: AccumulateFn,
    widen: WidenFn,
    rebuild: RebuildFn,
    shared_scores: SharedScoresFn,
    lanes: usize,
}

impl Kernels {
    /// The order in which these kernels see rows of `elements`.
    pub fn order(&self, elements: Elements) -> Order {
        match elements {
            Elements::BF16(_) => Order::Pairs { lanes: self.lanes },
            _ => Order::Plain,
        }
    }

    /// Whether queries of these elements on keys of those stay in bf16.
    pub fn keeps_halves(&self, q: Elements, k: Elements) -> bool {
        let bf16 = |e| matches!(e, Elements::BF16(_));
        self.halves.is_some() && bf16(q) && bf16(k)
    }

    /// See [`body::scores`].
    pub fn scores(
        &self,
        q: Queries,
        rows: usize,
        k: &Rows,
        scale: f32,
        out: &mut Scores,
        ahead: &Addresses,
    ) {
        match (q, self.halves) {
            // SAFETY: the CPU has the instructions, or there would be no table.
            (Queries::Wide(q), _) => unsafe { (self.scores)(q, rows, k, scale, out, ahead) },
            // SAFETY: as above.
            (Queries::Halves(q), Some(scores)) => unsafe { scores(q, rows, k, scale, out, ahead) },
            // `keeps_halves` said no.
            (Queries::Halves(_), None) => out.fill(f32::NAN),
        }
    }

    /// See [`body::softmax`].
    pub fn softmax(&self, scores: &mut Scores, tokens: usize, state: &mut BlockState) {
        // SAFETY: as above.
        unsafe { (self.softmax)(scores, tokens, state) }
    }

    /// See [`body::accumulate`].
    pub fn accumulate(&self, addend: Addend, v: &Rows, to: &mut BlockRows, ahead: &Addresses) {
        // SAFETY: as above.
        unsafe { (self.accumulate)(addend, v, to, ahead) }
    }

    /// See [`body::widen`].
    pub fn widen(&self, rows: &Rows, to: &mut [[f32; HEAD_DIM]]) {
        // SAFETY: as above.
        unsafe { (self.widen)(rows, to) }
    }

    /// See [`shared::rebuild`].
    pub fn rebuild(&self, k: &Shared, to: &mut [[f32; HEAD_DIM]]) {
        // SAFETY: as above.
        unsafe { (self.rebuild)(k, to) }
    }

    /// See [`shared::scores`].
    #[allow(clippy::too_many_arguments)]
    pub fn shared_scores(
        &self,
        q: Queries,
        rows: usize,
        k: &Shared,
        scale: f32,
        strip: &mut Strip,
        out: &mut Scores,
        ahead: &Addresses,
    ) {
        match q {
            // SAFETY: as above.
            Queries::Wide(q) => unsafe {
                (self.shared_scores)(q, rows, k, scale, strip, out, ahead)
            },
            // Keys that are rebuilt are f32, so queries are widened.
            Queries::Halves(_) => out.fill(f32::NAN),
        }
    }
}

macro_rules! kernels {
    ($module:ident, $isa:ty, $lanes8:ty $(, #[$features:meta])?) => {
        mod $module {
            use super::*;

            pub(super) const KERNELS: Kernels = Kernels {
                scores,
                halves: None,
                softmax,
                accumulate,
                widen,
                rebuild,
                shared_scores,
                lanes: <$isa>::W,
            };

            $(#[$features])?
            unsafe fn scores(
                q: &BlockRows,
                rows: usize,
                k: &Rows,
                scale: f32,
                out: &mut Scores,
                ahead: &Addresses,
            ) {
                match k.elements() {
                    Elements::F32(all) => body::scores::<$isa, _>(q, rows, k, all, scale, out, ahead),
                    Elements::F16(all) => body::scores::<$isa, _>(q, rows, k, all, scale, out, ahead),
                    Elements::BF16(all) => body::scores::<$isa, _>(q, rows, k, all, scale, out, ahead),
                }
            }

            $(#[$features])?
            unsafe fn softmax(scores: &mut Scores, tokens: usize, state: &mut BlockState) {
                body::softmax::<$lanes8>(scores, tokens, state)
            }

            $(#[$features])?
            unsafe fn accumulate(addend: Addend, v: &Rows, to: &mut BlockRows, ahead: &Addresses) {
                match v.elements() {
                    Elements::F32(all) => body::accumulate::<$isa, _>(addend, v, all, to, ahead),
                    Elements::F16(all) => body::accumulate::<$isa, _>(addend, v, all, to, ahead),
                    Elements::BF16(all) => body::accumulate::<$isa, _>(addend, v, all, to, ahead),
                }
            }

            $(#[$features])?
            unsafe fn widen(rows: &Rows, to: &mut [[f32; HEAD_DIM]]) {
                match rows.elements() {
                    Elements::F32(all) => body::widen::<$isa, _>(rows, all, to),
                    Elements::F16(all) => body::widen::<$isa, _>(rows, all, to),
                    Elements::BF16(all) => body::widen::<$isa, _>(rows, all, to),
                }
            }

            $(#[$features])?
            unsafe fn rebuild(k: &Shared, to: &mut [[f32; HEAD_DIM]]) {
                match k.values.elements() {
                    Elements::F32(all) => shared::rebuild::<$isa, _>(k, all, to),
                    Elements::F16(all) => shared::rebuild::<$isa, _>(k, all, to),
                    Elements::BF16(all) => shared::rebuild::<$isa, _>(k, all, to),
                }
            }

            $(#[$features])?
            unsafe fn shared_scores(
                q: &BlockRows,
                rows: usize,
                k: &Shared,
                scale: f32,
                strip: &mut Strip,
                out: &mut Scores,
                ahead: &Addresses,
            ) {
                match k.values.elements() {
                    Elements::F32(all) => {
                        shared::scores::<$isa, _, true>(q, rows, k, all, scale, strip, out, ahead)
                    }
                    Elements::F16(all) => {
                        shared::scores::<$isa, _, false>(q, rows, k, all, scale, strip, out, ahead)
                    }
                    Elements::BF16(all) => {
                        shared::scores::<$isa, _, false>(q, rows, k, all, scale, strip, out, ahead)
                    }
                }
            }
        }
    };
}

kernels!(portable, Portable, Portable);
#[cfg(target_arch = "x86_64")]
kernels!(avx2, Avx2, Avx2, #[target_feature(enable = "avx2,fma,f16c")]);
#[cfg(target_arch = "x86_64")]
kernels!(avx512, Avx512, Avx2, #[target_feature(enable = "avx512f,avx2,fma,f16c")]);
