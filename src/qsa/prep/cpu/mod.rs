//! The op on the CPU: the sums of `metal/qsa_prep.metal`, in its order, so that both give the same bits.
//!
//! A row is held as a SIMD group of a GPU holds it: lane `l` has the dimensions `32 j + l`. Tokens are shared out to threads; no
//! sum is, so the number of threads does not change a bit.

mod rows;

use super::geometry::{
    PrepGeometry, RowsView, BLOCK, GROUP, HEADS, HEAD_DIM, INDEX_DIM, INDEX_HEADS, KV_HEADS, NAME,
    Q_HEAD_ROWS, ROPE_DIM,
};
use crate::memory;
use candle::{bail, CpuStorage, DType, Result, Storage};
use half::f16;
use rayon::prelude::*;
use rows::{Coded, Indexed, Isa, Queries, Query};

/// Fewer tokens than this are not worth a second thread.
const MIN_TOKENS: usize = 8;

/// The outputs of [`PrepGeometry::outputs`], in its order.
pub(super) fn run(g: &PrepGeometry, operands: &[&Storage]) -> Result<Vec<Storage>> {
    let made = match g.q.dtype {
        DType::F16 => Call::<f16>::new(g, operands)?.run(Isa::best())?,
        _ => Call::<f32>::new(g, operands)?.run(Isa::best())?,
    };
    Ok(made.into_iter().map(Storage::Cpu).collect())
}

/// The operands of a call, each known to be as long as the geometry says.
struct Call<'a, Q> {
    g: &'a PrepGeometry,
    q: &'a [Q],
    k: &'a [f32],
    v: &'a [f32],
    ik: &'a [f32],
    g_q: &'a [f32],
    g_k: &'a [f32],
    g_iq: &'a [f32],
    g_ik: &'a [f32],
    angles: &'a [f32],
    state: &'a [f32],
    iq: Option<(&'a RowsView, &'a [f32])>,
}

impl<'a, Q: Query> Call<'a, Q> {
    fn new(g: &'a PrepGeometry, operands: &[&'a Storage]) -> Result<Self> {
        let [q, k, v, ik, norms, angles, state, ref iq @ ..] = *operands else {
            bail!("{NAME}: got {} operands, want 7 or 8", operands.len());
        };
        let norms = held("norms", norms, 2 * (HEAD_DIM + INDEX_DIM) as u64)?;
        let (g_q, norms) = norms.split_at(HEAD_DIM);
        let (g_k, norms) = norms.split_at(HEAD_DIM);
        let (g_iq, g_ik) = norms.split_at(INDEX_DIM);
        let angle_count = (g.phase + g.tokens) * ROPE_DIM;
        Ok(Self {
            g,
            q: held("q", q, g.q.end)?,
            k: held("k", k, g.k.end)?,
            v: held("v", v, g.v.end)?,
            ik: held("ik", ik, g.ik.end)?,
            g_q,
            g_k,
            g_iq,
            g_ik,
            angles: held("chunk", angles, angle_count as u64)?,
            state: held("state", state, (BLOCK * INDEX_DIM) as u64)?,
            iq: match (&g.iq, iq) {
                (Some(rows), [iq]) => Some((rows, held("iq", iq, rows.end)?)),
                (None, []) => None,
                _ => bail!("{NAME}: the operands and the geometry differ on iq"),
            },
        })
    }

    fn run(&self, isa: Isa) -> Result<Vec<CpuStorage>> {
        let g = self.g;
        let q_width = HEADS * Q_HEAD_ROWS;
        let mut qcur = memory::zeros::<Q>(NAME, "qcur", g.tokens * HEADS * HEAD_DIM)?;
        each_token(&mut qcur, HEADS * HEAD_DIM, |token, to| {
            isa.run(Queries {
                from: row(self.q, &g.q, token, q_width),
                weight: self.g_q,
                angles: self.turn(token),
                to,
            });
        });
        let (kq, ksc) = self.coded(isa, self.k, &g.k, Some(self.g_k))?;
        let (vq, vsc) = self.coded(isa, self.v, &g.v, None)?;
        let (pooled, state) = self.pooled(isa)?;
        let mut made = vec![
            Q::into_storage(qcur),
            CpuStorage::U8(kq),
            CpuStorage::F16(ksc),
            CpuStorage::U8(vq),
            CpuStorage::F16(vsc),
            CpuStorage::F32(pooled),
            CpuStorage::F32(state),
        ];
        if let Some((rows, iq)) = self.iq {
            let width = INDEX_HEADS * INDEX_DIM;
            let mut qidx = memory::zeros::<f32>(NAME, "qidx", g.tokens * width)?;
            each_token(&mut qidx, width, |token, to| {
                isa.run(Indexed {
                    from: row(iq, rows, token, width),
                    weight: self.g_iq,
                    angles: self.turn(token),
                    to,
                });
            });
            made.push(CpuStorage::F32(qidx));
        }
        Ok(made)
    }

    /// The angles of a token of the chunk.
    fn turn(&self, token: usize) -> &'a [f32] {
        &self.angles[(self.g.phase + token) * ROPE_DIM..][..ROPE_DIM]
    }

    fn coded(
        &self,
        isa: Isa,
        from: &[f32],
        rows: &RowsView,
        weight: Option<&[f32]>,
    ) -> Result<(Vec<u8>, Vec<f16>)> {
        const WIDTH: usize = KV_HEADS * HEAD_DIM;
        let mut codes = memory::zeros::<u8>(NAME, "codes", self.g.tokens * WIDTH)?;
        let mut scales = memory::zeros::<f16>(NAME, "scales", self.g.tokens * WIDTH / GROUP)?;
        codes
            .par_chunks_exact_mut(WIDTH)
            .zip(scales.par_chunks_exact_mut(WIDTH / GROUP))
            .with_min_len(MIN_TOKENS)
            .enumerate()
            .for_each(|(token, (codes, scales))| {
                isa.run(Coded {
                    from: row(from, rows, token, WIDTH),
                    turn: weight.map(|weight| (weight, self.turn(token))),
                    codes,
                    scales,
                });
            });
        Ok((codes, scales))
    }

    /// The rows of the blocks that the chunk completes, the dead row, and the new state.
    fn pooled(&self, isa: Isa) -> Result<(Vec<f32>, Vec<f32>)> {
        let g = self.g;
        let dead_row = g.blocks() * INDEX_DIM;
        let indexed = |from: &[f32], position: usize, to: &mut [f32]| {
            isa.run(Indexed {
                from,
                weight: self.g_ik,
                angles: &self.angles[position * ROPE_DIM..][..ROPE_DIM],
                to,
            });
        };
        let mut pooled = memory::zeros::<f32>(NAME, "pooled", dead_row + INDEX_DIM)?;
        let (complete, dead) = pooled.split_at_mut(dead_row);
        each_token(complete, INDEX_DIM, |block, to| {
            let mut mean = [0f32; INDEX_DIM];
            mean.copy_from_slice(self.member(BLOCK * block));
            for member in 1..BLOCK {
                let member = self.member(BLOCK * block + member);
                mean.iter_mut().zip(member).for_each(|(sum, x)| *sum += x);
            }
            mean.iter_mut().for_each(|sum| *sum /= BLOCK as f32);
            indexed(&mean, BLOCK * block, to);
        });
        if g.starts {
            indexed(row(self.ik, &g.ik, 0, INDEX_DIM), 0, dead);
        } else {
            dead.copy_from_slice(&self.state[(BLOCK - 1) * INDEX_DIM..]);
        }
        let mut state = vec![0f32; BLOCK * INDEX_DIM];
        let (tail, new_dead) = state.split_at_mut((BLOCK - 1) * INDEX_DIM);
        let open = BLOCK * g.blocks()..g.phase + g.tokens;
        for (token, slot) in open.zip(tail.chunks_exact_mut(INDEX_DIM)) {
            slot.copy_from_slice(self.member(token));
        }
        new_dead.copy_from_slice(dead);
        Ok((pooled, state))
    }

    /// The ik of a token, counted from the first of the block in which the chunk begins.
    fn member(&self, token: usize) -> &'a [f32] {
        match token.checked_sub(self.g.phase) {
            Some(token) => row(self.ik, &self.g.ik, token, INDEX_DIM),
            None => &self.state[token * INDEX_DIM..][..INDEX_DIM],
        }
    }
}

/// Hands out rows of `width` results to threads.
fn each_token<T: Send>(
    results: &mut [T],
    width: usize,
    make: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    results
        .par_chunks_exact_mut(width)
        .with_min_len(MIN_TOKENS)
        .enumerate()
        .for_each(|(token, to)| make(token, to));
}

/// The row of a token; in bounds, since the geometry has checked the last one.
fn row<'a, T>(from: &'a [T], rows: &RowsView, token: usize, width: usize) -> &'a [T] {
    let at = rows.start + token as u64 * rows.row_stride;
    &from[at as usize..][..width]
}

/// The elements of an operand up to `end`.
fn held<'a, T: Held>(name: &str, storage: &'a Storage, end: u64) -> Result<&'a [T]> {
    let Storage::Cpu(storage) = storage else {
        bail!("{NAME}: {name} is not on the CPU, where q is");
    };
    match T::of(storage).and_then(|elements| elements.get(..usize::try_from(end).ok()?)) {
        Some(elements) => Ok(elements),
        None => bail!("{NAME}: the storage of {name} does not hold {end} elements of its dtype"),
    }
}

trait Held: Sized {
    fn of(storage: &CpuStorage) -> Option<&[Self]>;
}

impl Held for f32 {
    fn of(storage: &CpuStorage) -> Option<&[Self]> {
        match storage {
            CpuStorage::F32(elements) => Some(elements),
            _ => None,
        }
    }
}

impl Held for f16 {
    fn of(storage: &CpuStorage) -> Option<&[Self]> {
        match storage {
            CpuStorage::F16(elements) => Some(elements),
            _ => None,
        }
    }
}
