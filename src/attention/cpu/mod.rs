//! The CPU executor: obeys a geometry and its partitions.
//!
//! A task is one tile of query rows against one partition. Tasks share nothing that is written, and states merge in a
//! fixed order, so the bits of the result depend neither on the number of threads nor on who ran what.

#[cfg(target_arch = "x86_64")]
mod bf16;
mod body;
mod exp;
mod kernels;
mod rows;
mod scratch;
mod shared;
mod tile;

use std::cell::RefCell;
use std::ops::Range;

use candle::{bail, CpuStorage, Result};
use rayon::prelude::*;

use body::BlockState;
use kernels::Kernels;
use rows::Elements;
use scratch::Scratch;
use shared::Turns;
use tile::{attend, state_of, Keys, RowTile, Work};

use super::geometry::{AttentionGeometry, RowView, HEAD_DIM};
use super::partial::finish_row;
use super::plan::{Partitions, ROW_TILE};
use super::store::Stored;
use crate::cpu::lines::Lines;
use crate::cpu::CpuKernel;
use crate::memory;

/// Tasks whose states are held at once. Bounds scratch whatever the query length, and is no function of the threads.
const TASKS_AT_ONCE: usize = 128;

/// Multiply-adds that one core does in the time that waking the others takes, about 30 us.
const SERIAL_WORK: usize = 1 << 21;

/// One call: the problem, how it is cut, and the stored elements.
pub(super) struct Call<'a> {
    geometry: &'a AttentionGeometry,
    partitions: Partitions,
    scale: f32,
    kernels: Kernels,
    q: Elements<'a>,
    /// Of the values, where keys are rebuilt from them.
    k: Elements<'a>,
    v: Elements<'a>,
    turns: Option<Turns<'a>>,
}

/// What a thread keeps from task to task.
struct Thread {
    tile: RowTile,
    numerators: Lines,
    work: Work,
}

thread_local! {
    static THREAD: RefCell<Thread> = RefCell::new(Thread {
        tile: RowTile::new(),
        numerators: Lines::zeros(0),
        work: Work::new(),
    });
}

/// [`finish_row`] of a row that has seen keys: if they all scored -inf, softmax has no value, and neither has the row.
fn finish_seen<'a>(states: impl Iterator<Item = (f32, f32, &'a [f32])> + Clone, out: &mut [f32]) {
    if finish_row(states, out) == 0.0 {
        out.fill(f32::NAN);
    }
}

/// States of tasks: the numerators of task `t` start at `t * slot`.
struct States {
    blocks: Vec<Vec<BlockState>>,
    numerators: Scratch,
    slot: usize,
}

impl States {
    /// `(max, denominator, numerator)` of a row of a task.
    fn row(&self, task: usize, row: usize) -> (f32, f32, &[f32]) {
        let (max, denominator) = state_of(&self.blocks[task], row);
        let start = task * self.slot + row * HEAD_DIM;
        (max, denominator, &self.numerators[start..start + HEAD_DIM])
    }
}

impl<'a> Call<'a> {
    pub fn new(
        geometry: &'a AttentionGeometry,
        partitions: Partitions,
        scale: f32,
        kernel: CpuKernel,
        [q, k, v]: [&'a CpuStorage; 3],
    ) -> Result<Self> {
        Ok(Self {
            geometry,
            partitions,
            scale,
            kernels: kernel.kernels()?,
            q: Elements::new("q", q, &geometry.q)?,
            k: Elements::new("k", k, &geometry.k)?,
            v: Elements::new("v", v, &geometry.v)?,
            turns: None,
        })
    }

    /// As [`Call::new`] with keys that are rebuilt from the values: `weight` has 512 elements, `angles` a row for each cached
    /// token, of as many cosines as sines.
    pub fn rebuilding(
        geometry: &'a AttentionGeometry,
        partitions: Partitions,
        scale: f32,
        kernel: CpuKernel,
        [q, v]: [&'a CpuStorage; 2],
        weight: &'a [f32],
        angles: &'a [f32],
    ) -> Result<Self> {
        let pairs = angles.len() / geometry.kv_len / 2;
        let turns = match weight.try_into() {
            Ok(weight) if angles.len() == 2 * pairs * geometry.kv_len && pairs.is_multiple_of(32) => {
                Turns {
                    weight,
                    rows: angles,
                    pairs,
                }
            }
            _ => bail!(
                "attention_d512_shared_kv: got {} weights and {} angles for {} tokens, want {HEAD_DIM} and whole vectors a token",
                weight.len(),
                angles.len(),
                geometry.kv_len
            ),
        };
        let call = Self::new(geometry, partitions, scale, kernel, [q, v, v])?;
        Ok(Self {
            turns: Some(turns),
            ..call
        })
    }

    /// `(batch, q_heads, q_len, 512)`.
    pub fn forward<E: Stored>(&self) -> Result<Vec<E>> {
        if self.is_serial() {
            self.attention()
        } else {
            // One entry into the thread pool instead of one for each parallel step.
            rayon::scope(|_| self.attention())
        }
    }

    fn attention<E: Stored>(&self) -> Result<Vec<E>> {
        let g = self.geometry;
        let dims = [g.batch, g.q_heads, g.q_len, HEAD_DIM];
        let what = format_args!("the result of shape {dims:?}");
        let mut out = memory::zeros::<E>(self.op(), what, dims.iter().product())?;
        // The rows of a tile are neighbours in the output, tiles do not cross KV heads.
        let mut tiles: Vec<&mut [E]> = out
            .chunks_mut(g.rows_per_kv_head() * HEAD_DIM)
            .flat_map(|head| head.chunks_mut(ROW_TILE * HEAD_DIM))
            .collect();
        // Merging with an empty state is the identity, so those need not be made.
        let partitions = self.partitions.live();
        if partitions == 1 {
            self.each(tiles.into_iter().enumerate().collect(), |(unit, out)| {
                self.whole(unit, out)
            });
            return Ok(out);
        }
        let at_once = TASKS_AT_ONCE.div_ceil(partitions);
        for (i, tiles) in tiles.chunks_mut(at_once).enumerate() {
            let first = i * at_once;
            let states = self.states(first..first + tiles.len(), partitions)?;
            self.each(tiles.iter_mut().enumerate().collect(), |(unit, out)| {
                let tasks = unit * partitions..(unit + 1) * partitions;
                for (row, out) in out.chunks_mut(HEAD_DIM).enumerate() {
                    let states = tasks.clone().map(|task| states.row(task, row));
                    E::fill(out, |wide| finish_seen(states, wide));
                }
            });
        }
        Ok(out)
    }

    /// A tile that is not partitioned, straight into the output.
    fn whole<E: Stored>(&self, unit: usize, out: &mut [E]) {
        THREAD.with_borrow_mut(|thread| {
            let Thread {
                tile,
                numerators,
                work,
            } = thread;
            self.load(unit, tile);
            if numerators.len() < tile.len() {
                *numerators = Lines::zeros(tile.len());
            }
            let numerators = &mut numerators[..tile.len()];
            let range = self.partitions.range(0);
            let blocks = self.run(unit, tile, range, numerators, work);
            for (row, out) in out.chunks_mut(HEAD_DIM).enumerate() {
                let (max, denominator) = state_of(&blocks, row);
                let numerator = &numerators[row * HEAD_DIM..(row + 1) * HEAD_DIM];
                let state = std::iter::once((max, denominator, numerator));
                E::fill(out, |wide| finish_seen(state, wide));
            }
        });
    }

    /// Maxima, denominators and numerators, each partition-major, one after the other.
    pub fn partials(&self) -> Result<Vec<f32>> {
        let g = self.geometry;
        let rows = g.batch * g.q_heads * g.q_len;
        let count = rows * self.partitions.count();
        let len = count * (2 + HEAD_DIM);
        let what = format_args!("{count} partial states");
        let mut packed = memory::zeros::<f32>(self.op(), what, len)?;
        // They are held twice for a moment: by task, and packed.
        let states = self.states(0..self.units(), self.partitions.count())?;
        let (maxima, rest) = packed.split_at_mut(count);
        let (denominators, numerators) = rest.split_at_mut(count);
        maxima
            .par_iter_mut()
            .zip(denominators)
            .zip(numerators.par_chunks_mut(HEAD_DIM))
            .enumerate()
            .for_each(|(i, ((max, denominator), numerator))| {
                let (partition, row) = (i / rows, i % rows);
                let (head, row) = (row / g.rows_per_kv_head(), row % g.rows_per_kv_head());
                let unit = head * self.tiles_per_kv_head() + row / ROW_TILE;
                let task = unit * self.partitions.count() + partition;
                let (m, d, n) = states.row(task, row % ROW_TILE);
                (*max, *denominator) = (m, d);
                numerator.copy_from_slice(n);
            });
        Ok(packed)
    }

    /// Runs `f` on each item: on all threads, or on this one where that is quicker.
    fn each<T: Send>(&self, items: Vec<T>, f: impl Fn(T) + Send + Sync) {
        if self.is_serial() {
            items.into_iter().for_each(f);
        } else {
            items.into_par_iter().for_each(f);
        }
    }

    /// Decides who computes, never what.
    fn is_serial(&self) -> bool {
        let g = self.geometry;
        let pairs = (g.batch * g.q_heads * g.q_len).saturating_mul(g.kv_len);
        pairs.saturating_mul(2 * HEAD_DIM) < SERIAL_WORK || rayon::current_num_threads() == 1
    }

    /// States of `units` in the first `partitions`, unit-major, partitions ascending.
    fn states(&self, units: Range<usize>, partitions: usize) -> Result<States> {
        let mut tiles: Vec<_> = units.map(|unit| (unit, RowTile::new())).collect();
        self.each(tiles.iter_mut().collect(), |(unit, tile)| {
            self.load(*unit, tile)
        });
        let slot = tiles.iter().map(|(_, tile)| tile.len()).max().unwrap_or(0);
        let mut numerators = Scratch::take(self.op(), tiles.len() * partitions * slot)?;
        let mut blocks = vec![Vec::new(); tiles.len() * partitions];
        let tasks = numerators.chunks_mut(slot).zip(&mut blocks).enumerate();
        let mut tasks: Vec<_> = tasks.collect();
        if self.turns.is_some() {
            // The heads of a batch row share the angles of a partition while they are in the cache.
            tasks.sort_by_key(|(task, _)| task % partitions);
        }
        self.each(tasks, |(task, (numerators, blocks))| {
            let (unit, tile) = &tiles[task / partitions];
            let range = self.partitions.range(task % partitions);
            let numerators = &mut numerators[..tile.len()];
            *blocks = THREAD.with_borrow_mut(|thread| {
                self.run(*unit, tile, range, numerators, &mut thread.work)
            });
        });
        Ok(States {
            blocks,
            numerators,
            slot,
        })
    }

    fn op(&self) -> &'static str {
        match self.turns {
            Some(_) => "attention_d512_shared_kv",
            None => "attention_d512",
        }
    }

    /// One task.
    fn run(
        &self,
        unit: usize,
        tile: &RowTile,
        range: Range<usize>,
        numerators: &mut [f32],
        work: &mut Work,
    ) -> Vec<BlockState> {
        let g = self.geometry;
        let head = unit / self.tiles_per_kv_head();
        let rows = |elements: Elements<'a>, view: &RowView| {
            let start = view.head_start(head / g.kv_heads, head % g.kv_heads);
            elements.rows(start, view.row_stride, g.kv_len)
        };
        let v = rows(self.v, &g.v);
        let keys = match self.turns {
            Some(turns) => Keys::Rebuilt(turns),
            None => Keys::Stored(rows(self.k, &g.k)),
        };
        attend(
            &self.kernels,
            tile,
            keys,
            v,
            range,
            self.scale,
            numerators,
            work,
        )
    }

    /// Unit `u` is tile `u % tiles` of KV head `u / tiles`; the rows of a KV head are ordered as in q.
    fn load(&self, unit: usize, tile: &mut RowTile) {
        let g = self.geometry;
        let head = unit / self.tiles_per_kv_head();
        let (batch, kv_head) = (head / g.kv_heads, head % g.kv_heads);
        let first = unit % self.tiles_per_kv_head() * ROW_TILE;
        let last = g.rows_per_kv_head().min(first + ROW_TILE);
        let rows = (first..last).map(|i| {
            let (q_head, row) = (kv_head * g.group + i / g.q_len, i % g.q_len);
            let start = g.q.head_start(batch, q_head) + row as u64 * g.q.row_stride;
            (start, g.visible(row))
        });
        tile.load(&self.kernels, self.q, self.k, self.turns.as_ref(), rows);
    }

    fn tiles_per_kv_head(&self) -> usize {
        self.geometry.rows_per_kv_head().div_ceil(ROW_TILE)
    }

    fn units(&self) -> usize {
        self.geometry.batch * self.geometry.kv_heads * self.tiles_per_kv_head()
    }
}
