//! What is done with one row: the order of every sum, the same on every device.

use super::Held;
use crate::qsa::prep::geometry::{GROUP, HEAD_DIM, INDEX_DIM, Q_HEAD_ROWS, ROPE_DIM};
use candle::CpuStorage;
use half::f16;
use half::slice::HalfFloatSliceExt;

const LANES: usize = 32;
const EPSILON: f32 = 1e-6;

/// What rows are computed with: the same text, compiled twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Right everywhere; slow where a fused multiply-add is a call.
    Portable,
}

impl Isa {
    pub fn best() -> Self {
        #[cfg(target_arch = "x86_64")]
        if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
            return Self::Avx2;
        }
        Self::Portable
    }

    pub fn run(self, work: impl Work) {
        match self {
            // SAFETY: `best` has found the instructions.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { avx2(work) },
            Self::Portable => work.run(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2(work: impl Work) {
    work.run();
}

/// A part of the work of one token, inlined into a function that is compiled for an [`Isa`].
pub(super) trait Work {
    fn run(self);
}

/// A row of `N * 32` elements by lanes.
type Row<const N: usize> = [[f32; LANES]; N];

#[inline(always)]
fn load<const N: usize>(from: &[f32]) -> Row<N> {
    let mut row = [[0.0; LANES]; N];
    for (to, from) in row.iter_mut().zip(from.as_chunks().0) {
        *to = *from;
    }
    row
}

/// Over the elements of a lane, then over lanes by halves.
#[inline(always)]
fn norm<const N: usize>(x: &mut Row<N>, weight: &[f32]) {
    let mut squares = [0f32; LANES];
    for part in x.iter() {
        for (sum, x) in squares.iter_mut().zip(part) {
            *sum = x.mul_add(*x, *sum);
        }
    }
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            squares[lane] += squares[lane + half];
        }
        half /= 2;
    }
    // An infinity, or squares past f32, would make the others 0: no row has such a norm.
    let root = match squares[0].is_finite() {
        true => (squares[0] / (LANES * N) as f32 + EPSILON).sqrt(),
        false => f32::NAN,
    };
    for (part, weight) in x.iter_mut().zip(weight.as_chunks::<LANES>().0) {
        for (x, weight) in part.iter_mut().zip(weight) {
            *x = *x / root * *weight;
        }
    }
}

/// Turns the pairs `(lane, lane + 32)` by the angles of a position.
#[inline(always)]
fn rotate<const N: usize>(x: &mut Row<N>, angles: &[f32]) {
    let (cosines, sines) = angles.split_at(ROPE_DIM / 2);
    let [first, second, ..] = &mut x[..] else {
        return;
    };
    let pairs = first.iter_mut().zip(second);
    for ((first, second), (cos, sin)) in pairs.zip(cosines.iter().zip(sines)) {
        let (a, b) = (*first, *second);
        *first = a.mul_add(*cos, -(b * *sin));
        *second = a.mul_add(*sin, b * *cos);
    }
}

/// Magnitudes are compared as integers, which sorts infinity and NaN behind every number.
#[inline(always)]
fn quantize(x: &Row<{ HEAD_DIM / LANES }>, codes: &mut [u8], scales: &mut [f16]) {
    let groups = x.as_chunks::<{ GROUP / LANES }>().0;
    let out = codes.as_chunks_mut::<GROUP>().0.iter_mut().zip(scales);
    for (group, (codes, scale)) in groups.iter().zip(out) {
        let mut largest = [0u32; LANES];
        for part in group {
            for (largest, x) in largest.iter_mut().zip(part) {
                *largest = (*largest).max(x.to_bits() & 0x7fff_ffff);
            }
        }
        let largest = largest.into_iter().fold(0, u32::max);
        let rounded = f16::from_f32(f32::from_bits(largest) / 127.0);
        // Infinity, NaN and what passes f16.
        if !rounded.is_finite() {
            *scale = f16::NAN;
            codes.fill(0);
            continue;
        }
        *scale = rounded;
        let wide = rounded.to_f32();
        if wide == 0.0 {
            codes.fill(0);
            continue;
        }
        for (code, x) in codes.iter_mut().zip(group.as_flattened()) {
            *code = (x / wide).round_ties_even().clamp(-127.0, 127.0) as i32 as u8;
        }
    }
}

/// The query heads of a token.
pub(super) struct Queries<'a, Q> {
    pub from: &'a [Q],
    pub weight: &'a [f32],
    pub angles: &'a [f32],
    pub to: &'a mut [Q],
}

impl<Q: Query> Work for Queries<'_, Q> {
    #[inline(always)]
    fn run(self) {
        let heads = self.from.chunks_exact(Q_HEAD_ROWS);
        for (from, to) in heads.zip(self.to.chunks_exact_mut(HEAD_DIM)) {
            let mut x = Q::load(&from[..HEAD_DIM]);
            norm(&mut x, self.weight);
            rotate(&mut x, self.angles);
            Q::store(&x, to);
        }
    }
}

/// The key or value heads of a token.
pub(super) struct Coded<'a> {
    pub from: &'a [f32],
    /// Norm weights and angles, for keys.
    pub turn: Option<(&'a [f32], &'a [f32])>,
    pub codes: &'a mut [u8],
    pub scales: &'a mut [f16],
}

impl Work for Coded<'_> {
    #[inline(always)]
    fn run(self) {
        let codes = self.codes.chunks_exact_mut(HEAD_DIM);
        let out = codes.zip(self.scales.chunks_exact_mut(HEAD_DIM / GROUP));
        for (from, (codes, scales)) in self.from.chunks_exact(HEAD_DIM).zip(out) {
            let mut x = load(from);
            if let Some((weight, angles)) = self.turn {
                norm(&mut x, weight);
                rotate(&mut x, angles);
            }
            quantize(&x, codes, scales);
        }
    }
}

/// Heads of the indexer.
pub(super) struct Indexed<'a> {
    pub from: &'a [f32],
    pub weight: &'a [f32],
    pub angles: &'a [f32],
    pub to: &'a mut [f32],
}

impl Work for Indexed<'_> {
    #[inline(always)]
    fn run(self) {
        let heads = self.from.chunks_exact(INDEX_DIM);
        for (from, to) in heads.zip(self.to.chunks_exact_mut(INDEX_DIM)) {
            let mut x = load::<{ INDEX_DIM / LANES }>(from);
            norm(&mut x, self.weight);
            rotate(&mut x, self.angles);
            to.copy_from_slice(x.as_flattened());
        }
    }
}

/// A type of q and qcur.
pub(super) trait Query: Held + Copy + Default + Send + Sync {
    fn load(from: &[Self]) -> Row<{ HEAD_DIM / LANES }>;
    /// Rounded once, to nearest even.
    fn store(row: &Row<{ HEAD_DIM / LANES }>, to: &mut [Self]);
    fn into_storage(values: Vec<Self>) -> CpuStorage;
}

impl Query for f32 {
    #[inline(always)]
    fn load(from: &[Self]) -> Row<{ HEAD_DIM / LANES }> {
        load(from)
    }

    #[inline(always)]
    fn store(row: &Row<{ HEAD_DIM / LANES }>, to: &mut [Self]) {
        to.copy_from_slice(row.as_flattened());
    }

    fn into_storage(values: Vec<Self>) -> CpuStorage {
        CpuStorage::F32(values)
    }
}

impl Query for f16 {
    #[inline(always)]
    fn load(from: &[Self]) -> Row<{ HEAD_DIM / LANES }> {
        let mut row = [[0.0; LANES]; HEAD_DIM / LANES];
        from.convert_to_f32_slice(row.as_flattened_mut());
        row
    }

    #[inline(always)]
    fn store(row: &Row<{ HEAD_DIM / LANES }>, to: &mut [Self]) {
        to.convert_from_f32_slice(row.as_flattened());
    }

    fn into_storage(values: Vec<Self>) -> CpuStorage {
        CpuStorage::F16(values)
    }
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;

    #[test]
    fn both_compilations_give_the_same_bits() {
        if Isa::best() == Isa::Portable {
            return;
        }
        let value = |i: usize| ((i * 2_654_435_761) % 100_003) as f32 / 3e4 - 1.5;
        let values: Vec<f32> = (0..Q_HEAD_ROWS).map(value).collect();
        let halves: Vec<f16> = values.iter().map(|x| f16::from_f32(*x)).collect();
        let (weight, angles) = (&values[..HEAD_DIM], &values[100..100 + ROPE_DIM]);
        let made = |isa: Isa| {
            let (mut q, mut indexed) = ([0f32; HEAD_DIM], [0f32; INDEX_DIM]);
            let mut q_half = [f16::ZERO; HEAD_DIM];
            let (mut codes, mut scales) = ([0u8; HEAD_DIM], [f16::ZERO; HEAD_DIM / GROUP]);
            isa.run(Queries {
                from: &values,
                weight,
                angles,
                to: &mut q,
            });
            isa.run(Queries {
                from: &halves,
                weight,
                angles,
                to: &mut q_half,
            });
            isa.run(Coded {
                from: weight,
                turn: Some((weight, angles)),
                codes: &mut codes,
                scales: &mut scales,
            });
            isa.run(Indexed {
                from: &values[..INDEX_DIM],
                weight,
                angles,
                to: &mut indexed,
            });
            (
                q.map(f32::to_bits),
                q_half,
                codes,
                scales,
                indexed.map(f32::to_bits),
            )
        };
        assert_eq!(made(Isa::best()), made(Isa::Portable));
    }
}
