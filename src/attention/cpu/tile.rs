//! One tile of query rows against one partition of keys.

use std::ops::Range;

use half::bf16;

use super::body::{Addend, BlockRows, BlockState, Part, Scores, BLOCK, TILE};
use super::kernels::{Kernels, Queries};
use super::rows::{Addresses, Elements, Rows};
use super::shared::{Shared, Strip, Turns, HALF};
use crate::attention::geometry::HEAD_DIM;
use crate::attention::plan::ROW_TILE;
use crate::cpu::lines::Lines;

/// Query rows that share their KV head.
pub(super) struct RowTile {
    /// Rows filled up with zeros to whole blocks: in f32, or left in bf16.
    wide: Lines,
    halves: Vec<bf16>,
    keeps_halves: bool,
    /// Keys that each row sees, counted from the first.
    visible: Vec<usize>,
}

impl RowTile {
    pub fn new() -> Self {
        Self {
            wide: Lines::zeros(0),
            halves: Vec::new(),
            keeps_halves: false,
            visible: Vec::new(),
        }
    }

    /// Takes the rows of `q` given as `(element offset, visible keys)`, made ready for keys of type `k`, or for keys that
    /// `turns` rebuilds from values of type `k`.
    pub fn load(
        &mut self,
        kernels: &Kernels,
        q: Elements,
        k: Elements,
        turns: Option<&Turns>,
        rows: impl Iterator<Item = (u64, usize)>,
    ) {
        let (starts, visible): (Vec<u64>, Vec<usize>) = rows.unzip();
        self.visible = visible;
        self.keeps_halves = turns.is_none() && kernels.keeps_halves(q, k);
        let (used, len) = (starts.len() * HEAD_DIM, self.len());
        let rows = starts.iter().map(|start| q.rows(*start, 0, 1));
        if self.keeps_halves {
            self.halves.resize(len, bf16::ZERO);
            self.halves[used..].fill(bf16::ZERO);
            for (row, to) in rows.zip(self.halves.chunks_exact_mut(HEAD_DIM)) {
                row.copy_halves(to);
            }
        } else {
            if self.wide.len() < len {
                self.wide = Lines::zeros(len);
            }
            self.wide[used..len].fill(0.0);
            let order = kernels.order(k);
            for (row, to) in rows.zip(self.wide.chunks_exact_mut(HEAD_DIM)) {
                row.widen(to);
                match turns {
                    None => order.apply(to),
                    // Several blocks score whole keys, in plain order.
                    Some(_) if len > BLOCK * HEAD_DIM => {}
                    Some(turns) => {
                        for half in 0..2 {
                            // What turns is rebuilt in plain order, weight and all.
                            let still = half * HALF + turns.pairs..(half + 1) * HALF;
                            if !k.is_f32() {
                                let weight = &turns.weight[still.clone()];
                                let pairs = to[still.clone()].iter_mut().zip(weight);
                                pairs.for_each(|(q, weight)| *q *= weight);
                            }
                            order.apply(&mut to[still]);
                        }
                    }
                }
            }
        }
    }

    /// Elements of its rows, and of their numerators.
    pub fn len(&self) -> usize {
        self.visible.len().next_multiple_of(BLOCK) * HEAD_DIM
    }

    fn block(&self, b: usize) -> Queries<'_> {
        if self.keeps_halves {
            Queries::Halves(&self.halves.as_chunks().0[b])
        } else {
            Queries::Wide(&self.wide.as_chunks().0[b])
        }
    }

    fn blocks(&self) -> usize {
        self.visible.len().div_ceil(BLOCK)
    }

    /// How many of the keys `first..first + len` each row of block `b` sees.
    fn seen(&self, b: usize, first: usize, len: usize) -> impl Iterator<Item = usize> + Clone + '_ {
        let rows = &self.visible[b * BLOCK..self.visible.len().min((b + 1) * BLOCK)];
        rows.iter()
            .map(move |visible| visible.saturating_sub(first).min(len))
    }
}

/// Buffers of one thread.
pub(super) struct Work {
    scores: Vec<Scores>,
    wide: Lines,
    strip: Lines,
}

impl Work {
    pub fn new() -> Self {
        Self {
            scores: vec![[0.0; TILE * BLOCK]; ROW_TILE.div_ceil(BLOCK)],
            wide: Lines::zeros(TILE * HEAD_DIM),
            strip: Lines::zeros(size_of::<Strip>() / size_of::<f32>()),
        }
    }
}

/// Where the keys of a head come from.
#[derive(Clone, Copy)]
pub(super) enum Keys<'a> {
    Stored(Rows<'a>),
    /// Rebuilt from the values.
    Rebuilt(Turns<'a>),
}

/// The keys of a tile, ready to be scored.
#[derive(Clone, Copy)]
enum TileKeys<'a> {
    Rows(Rows<'a>),
    Shared(Shared<'a>),
}

impl TileKeys<'_> {
    /// Of the first `keys`.
    #[allow(clippy::too_many_arguments)]
    fn scores(
        &self,
        kernels: &Kernels,
        (q, rows): (Queries, usize),
        keys: usize,
        scale: f32,
        strip: &mut Strip,
        out: &mut Scores,
        ahead: &Addresses,
    ) {
        match *self {
            Self::Rows(all) => kernels.scores(q, rows, &all.slice(0, keys), scale, out, ahead),
            Self::Shared(all) => {
                let values = all.values.slice(0, keys);
                let first = Shared { values, ..all };
                kernels.shared_scores(q, rows, &first, scale, strip, out, ahead)
            }
        }
    }

    fn addresses(&self) -> Addresses {
        match self {
            Self::Rows(rows) => rows.addresses(),
            Self::Shared(shared) => shared.values.addresses(),
        }
    }
}

/// The running softmax of a row, once all of its keys are in: `(max, denominator)`.
pub(super) fn state_of(blocks: &[BlockState], row: usize) -> (f32, f32) {
    let block = &blocks[row / BLOCK];
    (block.max[row % BLOCK], block.denominator[row % BLOCK])
}

/// The states of `tile` over the keys in `range`: returns the running softmax, writes all of `numerators`.
#[allow(clippy::too_many_arguments)]
pub(super) fn attend(
    kernels: &Kernels,
    tile: &RowTile,
    keys: Keys,
    v: Rows,
    range: Range<usize>,
    scale: f32,
    numerators: &mut [f32],
    work: &mut Work,
) -> Vec<BlockState> {
    let mut state = vec![BlockState::EMPTY; tile.blocks()];
    let numerators: &mut [BlockRows] = numerators.as_chunks_mut().0;
    for (b, numerators) in numerators.iter_mut().enumerate() {
        let any = |seen| seen > 0;
        if !tile.seen(b, range.start, range.len()).any(any) {
            numerators.fill(0.0);
        }
    }
    // No row sees past the last one's keys.
    let seen = tile.visible.iter().fold(0, |seen, n| seen.max(*n));
    let end = range.end.min(seen);
    for first in range.clone().step_by(TILE).take_while(|t| *t < end) {
        let len = TILE.min(end - first);
        let values = v.slice(first, len);
        // Each half of the work on a tile brings in what the other half will read next.
        let next_keys;
        let tile_keys = match &keys {
            Keys::Stored(k) => {
                let keys = k.slice(first, len);
                next_keys = k.slice(first + len, TILE).addresses();
                match tile.keeps_halves {
                    true => TileKeys::Rows(keys),
                    false => TileKeys::Rows(stage(kernels, keys, tile, &mut work.wide)),
                }
            }
            Keys::Rebuilt(turns) => {
                let token = first;
                let shared = Shared {
                    values,
                    token,
                    turns,
                };
                next_keys = v.slice(first + len, TILE).addresses();
                match tile.blocks() {
                    1 => TileKeys::Shared(shared),
                    _ => {
                        kernels.rebuild(&shared, work.wide.as_chunks_mut().0);
                        TileKeys::Rows(Rows::contiguous(&work.wide[..len * HEAD_DIM]))
                    }
                }
            }
        };
        // Values that keys are rebuilt from are there already.
        let next_values = match keys {
            Keys::Stored(_) => values.addresses(),
            Keys::Rebuilt(_) => next_keys,
        };
        for (b, scores) in work.scores.iter_mut().enumerate().take(tile.blocks()) {
            let seen = tile.seen(b, first, len);
            let most = seen.clone().fold(0, usize::max);
            if most == 0 {
                continue;
            }
            let ahead = if b == 0 {
                next_values
            } else {
                tile_keys.addresses()
            };
            let q = (tile.block(b), seen.clone().count());
            let strip = &mut work.strip.as_chunks_mut().0[0];
            tile_keys.scores(kernels, q, most, scale, strip, scores, &ahead);
            for (row, seen) in seen.enumerate() {
                // Takes the keys that a row does not see out of its softmax.
                (seen..most).for_each(|t| scores[t * BLOCK + row] = f32::NEG_INFINITY);
            }
            kernels.softmax(scores, most, &mut state[b]);
        }
        let values = stage(kernels, values, tile, &mut work.wide);
        for (b, (weights, to)) in work.scores.iter().zip(numerators.iter_mut()).enumerate() {
            let seen = tile.seen(b, first, len);
            if seen.clone().all(|seen| seen == 0) {
                continue;
            }
            let ahead = if b == 0 {
                next_keys
            } else {
                values.addresses()
            };
            let common = seen.clone().fold(len, usize::min);
            let together = Addend {
                weights,
                token: 0,
                part: Part::First(seen.clone().count()),
                rescale: (first > range.start).then_some(&state[b].rescale),
            };
            kernels.accumulate(together, &values.slice(0, common), to, &ahead);
            // The rest row by row: a weight of 0 would not keep out a NaN of a key that the row does not see.
            for (row, seen) in seen.enumerate().filter(|(_, seen)| *seen > common) {
                let alone = Addend {
                    token: common,
                    part: Part::Only(row),
                    rescale: Some(&[1.0; BLOCK]),
                    ..together
                };
                let rest = values.slice(common, seen - common);
                kernels.accumulate(alone, &rest, to, &values.addresses());
            }
        }
    }
    // A row whose scores here are all -inf is left with the empty state, as if it had seen no key: others may still count.
    let order = kernels.order(v.elements());
    numerators
        .as_flattened_mut()
        .chunks_mut(HEAD_DIM)
        .for_each(|row| order.undo(row));
    state
}

/// Half-precision rows in f32, for tiles of more than one block, which would widen them again for each.
fn stage<'a>(kernels: &Kernels, rows: Rows<'a>, tile: &RowTile, wide: &'a mut Lines) -> Rows<'a> {
    if tile.blocks() == 1 || rows.is_f32() {
        return rows;
    }
    kernels.widen(&rows, wide.as_chunks_mut().0);
    Rows::contiguous(&wide[..rows.len() * HEAD_DIM])
}
