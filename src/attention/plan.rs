//! How the work is cut: partitions of the sequence, tiles of query rows, and the scratch that follows from them.
//!
//! Everything here is a pure function of the shape, never of timing or thread count, and shared by every backend.

use std::ops::Range;

use candle::{bail, Result};

/// Partitions of a production decode.
pub const DEFAULT_PARTITIONS: usize = 32;

/// Query rows (query row x query head of one KV head) that share one read of a K/V row.
pub const ROW_TILE: usize = 64;

/// Below this many keys a partition costs more to start and merge than it gains.
const MIN_PARTITION: usize = 256;

/// Contiguous partitions of `len` keys. Trailing ones may be empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partitions {
    len: usize,
    count: usize,
}

impl Partitions {
    /// `count` partitions of `ceil(len / count)` keys each. Refuses a count of 0.
    pub fn new(len: usize, count: usize) -> Result<Self> {
        if count == 0 {
            bail!("attention_d512: got 0 partitions, want at least 1");
        }
        Ok(Self { len, count })
    }

    /// The count used where the caller gives none: 32 for a long decode, fewer where partitions would be shorter than
    /// 256 keys or where the query rows already make enough tasks, which also keeps scratch linear in `q_len`.
    pub fn default_count(kv_len: usize, rows_per_kv_head: usize) -> usize {
        let row_tiles = rows_per_kv_head.div_ceil(ROW_TILE).max(1);
        let by_length = kv_len.div_ceil(MIN_PARTITION);
        (DEFAULT_PARTITIONS / row_tiles).min(by_length).max(1)
    }

    /// How many, empty ones included.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Partitions that have a key; those after them are empty.
    pub fn live(&self) -> usize {
        let size = self.len.div_ceil(self.count).max(1);
        self.len.div_ceil(size)
    }

    /// Keys of partition `p`, empty past the end of the sequence.
    pub fn range(&self, p: usize) -> Range<usize> {
        let size = self.len.div_ceil(self.count);
        let bound = |p: usize| p.saturating_mul(size).min(self.len);
        bound(p)..bound(p.saturating_add(1))
    }
}

/// Bytes of the three partial buffers, all f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScratchBytes {
    /// One f32 a state.
    pub maxima: u64,
    /// One f32 a state.
    pub denominators: u64,
    /// `dim` f32 a state.
    pub numerators: u64,
    /// Their sum.
    pub total: u64,
}

impl ScratchBytes {
    /// For `rows` query rows (batch x query heads x query length) of `dim` elements in `partitions` partitions.
    /// A size that passes 64 bits is an error.
    pub fn new(rows: u64, partitions: u64, dim: u64) -> Result<Self> {
        let sizes = || {
            let maxima = rows.checked_mul(partitions)?.checked_mul(4)?;
            let numerators = maxima.checked_mul(dim)?;
            let total = maxima.checked_mul(2)?.checked_add(numerators)?;
            Some(Self {
                maxima,
                denominators: maxima,
                numerators,
                total,
            })
        };
        match sizes() {
            Some(sizes) => Ok(sizes),
            None => bail!(
                "attention_d512: scratch for {rows} query rows of {dim} in {partitions} partitions passes 64 bits"
            ),
        }
    }
}
