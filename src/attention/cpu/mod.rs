//! The CPU executor: obeys a geometry and its partitions.
//!
//! A task is one tile of query rows against one partition. Tasks share nothing that is written, and states merge in a
//! fixed order, so the bits of the result depend neither on the number of threads nor on who ran what.

#[cfg(target_arch = "x86_64")]
mod bf16;
mod body;
mod exp;
mod isa;
mod kernels;
mod rows;
mod scratch;
mod tile;
#[cfg(target_arch = "x86_64")]
mod x86;

use candle::{CpuStorage, Result};
use rayon::prelude::*;

use body::BlockState;
pub use kernels::CpuKernel;
use kernels::Kernels;
use rows::Elements;
use scratch::Scratch;
use tile::{attend, state_of, RowTile};

use super::geometry::{AttentionGeometry, RowView, HEAD_DIM};
use super::partial::finish_row;
use super::plan::{Partitions, ROW_TILE};
use super::store::Stored;

/// Tasks whose states are held at once. Bounds scratch whatever the query length, and is no function of the threads.
const TASKS_AT_ONCE: usize = 128;

/// Multiply-adds below which waking other threads costs more than it saves.
const SERIAL_WORK: usize = 1 << 18;

/// One call: the problem, how it is cut, and the stored elements.
pub(super) struct Call<'a> {
    geometry: &'a AttentionGeometry,
    partitions: Partitions,
    scale: f32,
    kernels: Kernels,
    q: Elements<'a>,
    k: Elements<'a>,
    v: Elements<'a>,
}

/// A tile of query rows: rows `first..` of one KV head of one batch row.
#[derive(Clone, Copy)]
struct Unit {
    batch: usize,
    kv_head: usize,
    first: usize,
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
        })
    }

    /// `(batch, q_heads, q_len, 512)`.
    pub fn forward<E: Stored>(&self) -> Vec<E> {
        if self.is_small() {
            self.attention()
        } else {
            // One entry into the thread pool instead of one for each parallel step.
            rayon::scope(|_| self.attention())
        }
    }

    fn attention<E: Stored>(&self) -> Vec<E> {
        let g = self.geometry;
        let mut out = vec![E::ZERO; g.batch * g.q_heads * g.q_len * HEAD_DIM];
        let units_at_once = TASKS_AT_ONCE.div_ceil(self.partitions.count());
        for first in (0..self.units()).step_by(units_at_once) {
            let units = first..self.units().min(first + units_at_once);
            let states = self.states(units.clone());
            let finish = |(row, to): (usize, &mut [E])| {
                let (unit, tile_row) = self.place(row);
                if units.contains(&unit) {
                    let first = (unit - units.start) * self.partitions.count();
                    let partitions = first..first + self.partitions.count();
                    let mut wide = [0f32; HEAD_DIM];
                    finish_row(partitions.map(|task| states.row(task, tile_row)), &mut wide);
                    E::store(&wide, to);
                }
            };
            if self.is_small() {
                out.chunks_mut(HEAD_DIM).enumerate().for_each(finish);
            } else {
                out.par_chunks_mut(HEAD_DIM).enumerate().for_each(finish);
            }
        }
        out
    }

    /// Maxima, denominators and numerators, each partition-major, one after the other.
    pub fn partials(&self) -> Vec<f32> {
        let g = self.geometry;
        let rows = g.batch * g.q_heads * g.q_len;
        let count = rows * self.partitions.count();
        let states = self.states(0..self.units());
        let mut packed = vec![0f32; count * (2 + HEAD_DIM)];
        let (maxima, rest) = packed.split_at_mut(count);
        let (denominators, numerators) = rest.split_at_mut(count);
        maxima
            .par_iter_mut()
            .zip(denominators)
            .zip(numerators.par_chunks_mut(HEAD_DIM))
            .enumerate()
            .for_each(|(i, ((max, denominator), numerator))| {
                let (unit, tile_row) = self.place(i % rows);
                let task = unit * self.partitions.count() + i / rows;
                let (m, d, n) = states.row(task, tile_row);
                (*max, *denominator) = (m, d);
                numerator.copy_from_slice(n);
            });
        packed
    }

    fn is_small(&self) -> bool {
        let g = self.geometry;
        let pairs = (g.batch * g.q_heads * g.q_len).saturating_mul(g.kv_len);
        pairs.saturating_mul(2 * HEAD_DIM) < SERIAL_WORK
    }

    /// States of `units`, unit-major, partitions ascending.
    fn states(&self, units: std::ops::Range<usize>) -> States {
        let partitions = self.partitions.count();
        let small = self.is_small();
        let tiles: Vec<_> = if small {
            units.map(|unit| self.tile(unit)).collect()
        } else {
            units.into_par_iter().map(|unit| self.tile(unit)).collect()
        };
        let slot = tiles
            .iter()
            .map(|(_, tile)| tile.numerators())
            .max()
            .unwrap_or(0);
        let tasks = tiles.len() * partitions;
        let mut numerators = Scratch::take(tasks * slot);
        let run = |(task, numerators): (usize, &mut [f32])| {
            let (unit, tile) = &tiles[task / partitions];
            self.run(
                *unit,
                tile,
                self.partitions.range(task % partitions),
                numerators,
            )
        };
        let slots = &mut numerators[..tasks * slot];
        let blocks = if small {
            slots.chunks_mut(slot).enumerate().map(run).collect()
        } else {
            slots.par_chunks_mut(slot).enumerate().map(run).collect()
        };
        States {
            blocks,
            numerators,
            slot,
        }
    }

    /// One task.
    fn run(
        &self,
        unit: Unit,
        tile: &RowTile,
        range: std::ops::Range<usize>,
        numerators: &mut [f32],
    ) -> Vec<BlockState> {
        let g = self.geometry;
        let rows = |elements: Elements<'a>, view: &RowView| {
            elements.rows(
                view.head_start(unit.batch, unit.kv_head),
                view.row_stride,
                g.kv_len,
            )
        };
        let (k, v) = (rows(self.k, &g.k), rows(self.v, &g.v));
        let numerators = &mut numerators[..tile.numerators()];
        attend(&self.kernels, tile, k, v, range, self.scale, numerators)
    }

    fn tiles_per_kv_head(&self) -> usize {
        self.geometry.rows_per_kv_head().div_ceil(ROW_TILE)
    }

    fn units(&self) -> usize {
        self.geometry.batch * self.geometry.kv_heads * self.tiles_per_kv_head()
    }

    fn tile(&self, unit: usize) -> (Unit, RowTile) {
        let g = self.geometry;
        let head = unit / self.tiles_per_kv_head();
        let unit = Unit {
            batch: head / g.kv_heads,
            kv_head: head % g.kv_heads,
            first: unit % self.tiles_per_kv_head() * ROW_TILE,
        };
        let last = g.rows_per_kv_head().min(unit.first + ROW_TILE);
        let rows = (unit.first..last).map(|i| {
            let (row, q_head) = (i / g.group, unit.kv_head * g.group + i % g.group);
            let start = g.q.head_start(unit.batch, q_head) + row as u64 * g.q.row_stride;
            (start, g.visible(row))
        });
        (unit, RowTile::new(&self.kernels, self.q, self.k, rows))
    }

    /// The unit that a row of the output is in, and its row there.
    fn place(&self, out_row: usize) -> (usize, usize) {
        let g = self.geometry;
        let (row, q_head) = (out_row % g.q_len, out_row / g.q_len % g.q_heads);
        let batch = out_row / g.q_len / g.q_heads;
        let i = row * g.group + q_head % g.group;
        let head = batch * g.kv_heads + q_head / g.group;
        (head * self.tiles_per_kv_head() + i / ROW_TILE, i % ROW_TILE)
    }
}
