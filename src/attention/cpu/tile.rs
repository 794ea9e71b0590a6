//! One tile of query rows against one partition of keys.

use std::ops::Range;

use half::bf16;

use super::body::{BlockRows, BlockState, Part, Scores, BLOCK, TILE};
use super::kernels::{Kernels, Queries};
use super::rows::{Elements, Rows};
use super::scratch::Lines;
use crate::attention::geometry::HEAD_DIM;

/// Query rows that share their KV head.
pub(super) struct RowTile {
    q: QueryRows,
    /// Keys that each row sees, counted from the first.
    visible: Vec<usize>,
}

/// Rows of queries, filled up with zeros to whole blocks.
enum QueryRows {
    Wide(Lines),
    Halves(Vec<bf16>),
}

impl RowTile {
    /// Rows of `q` given as `(element offset, visible keys)`, made ready for keys of type `k`.
    pub fn new(
        kernels: &Kernels,
        q: Elements,
        k: Elements,
        rows: impl ExactSizeIterator<Item = (u64, usize)>,
    ) -> Self {
        let len = rows.len().next_multiple_of(BLOCK) * HEAD_DIM;
        let (starts, visible): (Vec<u64>, Vec<usize>) = rows.unzip();
        let rows = starts.iter().map(|start| q.rows(*start, 0, 1));
        let q = if kernels.keeps_halves(q, k) {
            let mut halves = vec![bf16::ZERO; len];
            rows.zip(halves.chunks_exact_mut(HEAD_DIM))
                .for_each(|(row, to)| row.copy_halves(to));
            QueryRows::Halves(halves)
        } else {
            let order = kernels.order(k);
            let mut wide = Lines::zeros(len);
            for (row, to) in rows.zip(wide.chunks_exact_mut(HEAD_DIM)) {
                row.widen(to);
                order.apply(to);
            }
            QueryRows::Wide(wide)
        };
        Self { q, visible }
    }

    fn block(&self, b: usize) -> Queries<'_> {
        match &self.q {
            QueryRows::Wide(q) => Queries::Wide(&q.as_chunks().0[b]),
            QueryRows::Halves(q) => Queries::Halves(&q.as_chunks().0[b]),
        }
    }
}

/// The running softmax of a row, once all of its keys are in: `(max, denominator)`.
pub(super) fn state_of(blocks: &[BlockState], row: usize) -> (f32, f32) {
    let block = &blocks[row / BLOCK];
    (block.max[row % BLOCK], block.denominator[row % BLOCK])
}

/// The states of `tile` over the keys in `range`: returns the running softmax, writes all of `numerators`.
pub(super) fn attend(
    kernels: &Kernels,
    tile: &RowTile,
    k: Rows,
    v: Rows,
    range: Range<usize>,
    scale: f32,
    numerators: &mut [f32],
) -> Vec<BlockState> {
    let blocks = tile.visible.chunks(BLOCK).len();
    let mut state = vec![BlockState::EMPTY; blocks];
    let mut scores = vec![[0f32; TILE * BLOCK]; blocks];
    // No row sees past the last one's keys.
    let seen = tile.visible.iter().fold(0, |seen, n| seen.max(*n));
    let end = range.end.min(seen);
    let mut wide = Wide::new(blocks);
    if range.start >= end {
        numerators.fill(0.0);
    }

    for first in range.clone().step_by(TILE).take_while(|t| *t < end) {
        let len = TILE.min(end - first);
        let keys = k.slice(first, len);
        let values = v.slice(first, len);
        // Each half of a tile brings in what the other half will read next.
        let next_keys = k.slice(first + len, TILE).addresses();
        let next_values = values.addresses();

        let keys = match tile.q {
            QueryRows::Wide(_) => wide.stage(kernels, keys),
            QueryRows::Halves(_) => keys,
        };
        for (b, scores) in scores.iter_mut().enumerate() {
            let ahead = if b == 0 {
                next_values
            } else {
                keys.addresses()
            };
            kernels.scores(tile.block(b), tile.rows(b), &keys, scale, scores, &ahead);
            tile.hide(b, first, len, scores);
            kernels.softmax(scores, len, &mut state[b]);
        }
        let values = wide.stage(kernels, values);
        let numerators: &mut [BlockRows] = numerators.as_chunks_mut().0;
        for (b, (scores, to)) in scores.iter().zip(numerators).enumerate() {
            let ahead = if b == 0 {
                next_keys
            } else {
                values.addresses()
            };
            let mut add = |part, seen, ahead| {
                let values = values.slice(0, seen);
                let fresh = first == range.start;
                kernels.accumulate(scores, part, &values, &state[b], fresh, to, ahead);
            };
            let rows = tile.rows(b);
            let seen = |row| tile.seen(b, row, first, len);
            if (1..rows).all(|row| seen(row) == seen(0)) {
                add(Part::First(rows), seen(0), &ahead);
            } else {
                // One by one: a weight of 0 would not keep out a NaN of a key that the row does not see.
                for row in 0..rows {
                    add(Part::Only(row), seen(row), &ahead);
                }
            }
        }
    }
    for (row, visible) in tile.visible.iter().enumerate() {
        let denominator = &mut state[row / BLOCK].denominator[row % BLOCK];
        // The largest score has weight 1, so only scores that are all -inf can leave 0, and softmax has no value there.
        if *visible > range.start && !range.is_empty() && *denominator == 0.0 {
            *denominator = f32::NAN;
        }
    }
    let order = kernels.order(v.elements());
    numerators
        .chunks_mut(HEAD_DIM)
        .for_each(|row| order.undo(row));
    state
}

impl RowTile {
    /// Elements of its numerators.
    pub fn numerators(&self) -> usize {
        self.visible.len().next_multiple_of(BLOCK) * HEAD_DIM
    }

    /// Rows in block `b`.
    fn rows(&self, b: usize) -> usize {
        BLOCK.min(self.visible.len() - b * BLOCK)
    }

    /// Keys among `first..first + len` that a row of block `b` sees.
    fn seen(&self, b: usize, row: usize, first: usize, len: usize) -> usize {
        let visible = self.visible[b * BLOCK + row];
        visible.saturating_sub(first).min(len)
    }

    /// Takes the scores of keys that a row does not see out of its softmax.
    fn hide(&self, b: usize, first: usize, len: usize, scores: &mut Scores) {
        for row in 0..self.rows(b) {
            for t in self.seen(b, row, first, len)..len {
                scores[t * BLOCK + row] = f32::NEG_INFINITY;
            }
        }
    }
}

/// Half-precision rows in f32, for tiles of more than one block, which would widen them again for each.
struct Wide {
    rows: Option<Lines>,
}

impl Wide {
    fn new(blocks: usize) -> Self {
        let rows = (blocks > 1).then(|| Lines::zeros(TILE * HEAD_DIM));
        Self { rows }
    }

    fn stage<'a>(&'a mut self, kernels: &Kernels, rows: Rows<'a>) -> Rows<'a> {
        match &mut self.rows {
            Some(wide) if !rows.is_f32() => {
                kernels.widen(&rows, wide.as_chunks_mut().0);
                Rows::contiguous(&wide[..rows.len() * HEAD_DIM])
            }
            _ => rows,
        }
    }
}
