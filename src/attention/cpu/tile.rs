//! One tile of query rows against one partition of keys.

use std::ops::Range;

use super::body::{BlockRows, BlockState, Part, Scores, BLOCK, TILE};
use super::kernels::Kernels;
use super::rows::Rows;
use crate::attention::geometry::HEAD_DIM;

/// f32 values that start on a cache line.
pub(super) struct Lines {
    values: Vec<f32>,
    start: usize,
    len: usize,
}

impl Lines {
    pub fn zeros(len: usize) -> Self {
        let values = vec![0f32; len + 15];
        let start = values.as_ptr().align_offset(64).min(15);
        Self { values, start, len }
    }
}

impl std::ops::Deref for Lines {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values[self.start..self.start + self.len]
    }
}

impl std::ops::DerefMut for Lines {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values[self.start..self.start + self.len]
    }
}

impl Lines {
    fn blocks(&self) -> &[BlockRows] {
        self.as_chunks().0
    }

    fn blocks_mut(&mut self) -> &mut [BlockRows] {
        self.as_chunks_mut().0
    }
}

/// Query rows that share their KV head.
pub(super) struct RowTile {
    /// Rows in f32, filled up with zeros to whole blocks.
    q: Lines,
    /// Keys that each row sees, counted from the first.
    visible: Vec<usize>,
}

impl RowTile {
    /// Rows given as `(rows of its head, row, visible keys)`.
    pub fn new<'a>(rows: impl ExactSizeIterator<Item = (Rows<'a>, usize, usize)>) -> Self {
        let mut q = Lines::zeros(rows.len().next_multiple_of(BLOCK) * HEAD_DIM);
        let visible = rows
            .zip(q.chunks_exact_mut(HEAD_DIM))
            .map(|((head, row, visible), to)| {
                head.widen(row, to);
                visible
            })
            .collect();
        Self { q, visible }
    }
}

/// Partial states of the rows of a tile.
pub(super) struct TileState {
    blocks: Vec<BlockState>,
    numerator: Lines,
}

impl TileState {
    /// `(max, denominator, numerator)` of a row.
    pub fn row(&self, row: usize) -> (f32, f32, &[f32]) {
        let block = &self.blocks[row / BLOCK];
        (
            block.max[row % BLOCK],
            block.denominator[row % BLOCK],
            &self.numerator[row * HEAD_DIM..(row + 1) * HEAD_DIM],
        )
    }
}

/// The states of `tile` over the keys in `range`.
pub(super) fn attend(
    kernels: &Kernels,
    tile: &RowTile,
    k: Rows,
    v: Rows,
    range: Range<usize>,
    scale: f32,
) -> TileState {
    let blocks = tile.visible.chunks(BLOCK).len();
    let mut state = TileState {
        blocks: vec![BlockState::EMPTY; blocks],
        numerator: Lines::zeros(tile.q.len()),
    };
    let mut scores = vec![[0f32; TILE * BLOCK]; blocks];
    // No row sees past the last one's keys.
    let seen = tile.visible.iter().fold(0, |seen, n| seen.max(*n));
    let end = range.end.min(seen);
    let mut wide = Wide::new(blocks);

    for first in range.clone().step_by(TILE).take_while(|t| *t < end) {
        let len = TILE.min(end - first);
        let keys = k.slice(first, len);
        let values = v.slice(first, len);
        // Each half of a tile brings in what the other half will read next.
        let next_keys = k.slice(first + len, TILE).addresses();
        let next_values = values.addresses();

        let keys = wide.stage(keys);
        for (b, (scores, q)) in scores.iter_mut().zip(tile.q.blocks()).enumerate() {
            let ahead = if b == 0 {
                next_values
            } else {
                keys.addresses()
            };
            kernels.scores(q, tile.rows(b), &keys, scale, scores, &ahead);
            tile.hide(b, first, len, scores);
            kernels.softmax(scores, len, &mut state.blocks[b]);
        }
        let values = wide.stage(values);
        for (b, (scores, to)) in scores.iter().zip(state.numerator.blocks_mut()).enumerate() {
            let ahead = if b == 0 {
                next_keys
            } else {
                values.addresses()
            };
            let mut add = |part, seen, ahead| {
                let values = values.slice(0, seen);
                kernels.accumulate(scores, part, &values, &state.blocks[b], to, ahead);
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
        let denominator = &mut state.blocks[row / BLOCK].denominator[row % BLOCK];
        // The largest score has weight 1, so only scores that are all -inf can leave 0, and softmax has no value there.
        if *visible > range.start && !range.is_empty() && *denominator == 0.0 {
            *denominator = f32::NAN;
        }
    }
    state
}

impl RowTile {
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

    fn stage<'a>(&'a mut self, rows: Rows<'a>) -> Rows<'a> {
        match &mut self.rows {
            Some(wide) if !rows.is_f32() => {
                for (row, to) in wide.chunks_mut(HEAD_DIM).take(rows.len()).enumerate() {
                    rows.widen(row, to);
                }
                Rows::contiguous(&wide[..rows.len() * HEAD_DIM])
            }
            _ => rows,
        }
    }
}
