//! Which family of kernels, and how a block of it shares out its warps and its shared memory.

use super::Chip;
use crate::attention::gpu::LANES;
use crate::attention::{AttentionGeometry, HEAD_DIM};
use candle::DType;

/// What multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// The f32 units: any types, any rows.
    Partial,
    /// The matrix units, a few query rows that see every key: half types, q in the type of K and V.
    Matrix,
    /// The matrix units, many query rows, causal or not: the same types.
    Tiled,
}

/// Query rows up to which [`Family::Matrix`] reads K and V once.
const MATRIX_ROWS: usize = 16;

impl Family {
    /// The fastest that `chip` can run.
    pub fn of(g: &AttentionGeometry, pairs: Option<u32>, chip: Chip) -> Self {
        Self::on_matrix_units(g, pairs, chip).unwrap_or(Self::Partial)
    }

    /// The one on the matrix units, or why there is none.
    pub fn on_matrix_units(
        g: &AttentionGeometry,
        pairs: Option<u32>,
        chip: Chip,
    ) -> Result<Self, String> {
        if g.v.dtype == DType::F32 {
            return Err("is for f16 and bf16, got F32".into());
        }
        if g.q.dtype != g.v.dtype {
            return Err(format!(
                "wants q in the dtype of k and v, got {:?} and {:?}",
                g.q.dtype, g.v.dtype
            ));
        }
        let all_see_all = !g.causal || g.q_len == 1;
        if all_see_all && g.rows_per_kv_head() <= MATRIX_ROWS {
            return Ok(Self::Matrix);
        }
        let block = Block::new(g, pairs, Self::Tiled);
        if block.layout(chip).is_some() {
            Ok(Self::Tiled)
        } else if all_see_all {
            Ok(Self::Matrix)
        } else {
            Err(format!(
                "needs {} bytes of shared memory for causal rows, this device has {}",
                block.least_bytes(),
                chip.shared_bytes
            ))
        }
    }
}

/// Warps of a block: what the registers of a multiprocessor hold of these kernels.
const WARPS: u32 = 8;
/// Slots of a block that there are barriers for.
const MOST_SLOTS: u32 = 32;
/// Two barriers a slot.
const BARRIER_BYTES: u32 = 2 * 8 * MOST_SLOTS;
/// A row of half types as the matrix units read it: rows fall into different banks.
const PITCH: u32 = HEAD_DIM as u32 * 2 + 16;

/// A block of a family for one geometry.
#[derive(Debug, Clone, Copy)]
pub struct Block {
    pub family: Family,
    /// Query rows that share one read of a tile.
    pub rows: usize,
    /// Angles of a row of rebuilt keys.
    pub pairs: Option<u32>,
    /// Bytes of an element of K and V.
    element: u32,
}

/// What a block is launched with.
#[derive(Debug, Clone, Copy)]
pub struct BlockLayout {
    pub threads: u32,
    pub shared_bytes: u32,
}

impl Block {
    pub fn new(g: &AttentionGeometry, pairs: Option<u32>, family: Family) -> Self {
        let up_to_16 = |least| g.rows_per_kv_head().next_power_of_two().clamp(least, 16);
        Self {
            family,
            rows: match family {
                Family::Partial => up_to_16(4),
                Family::Matrix => up_to_16(8),
                Family::Tiled => 64,
            },
            pairs,
            element: g.v.dtype.size_in_bytes() as u32,
        }
    }

    /// Blocks that a KV head takes.
    pub fn row_blocks(&self, g: &AttentionGeometry) -> usize {
        g.rows_per_kv_head().div_ceil(self.rows)
    }

    /// Shared memory that it can't do without.
    pub fn least_bytes(&self) -> u32 {
        self.header_bytes() + self.slot_bytes()
    }

    /// As many teams as find a slot each, and as many slots as the chip has memory for; none if that is not one.
    pub fn layout(&self, chip: Chip) -> Option<BlockLayout> {
        let (before, slot) = (self.header_bytes(), self.slot_bytes());
        let slots = (chip.shared_bytes.saturating_sub(before) / slot).min(MOST_SLOTS);
        let bytes =
            |teams: u32| before + (slots / teams * teams * slot).max(self.states_bytes(teams));
        let team = self.team();
        let fits = |&teams: &u32| teams <= slots && bytes(teams) <= chip.shared_bytes;
        (1..=WARPS / team)
            .rev()
            .find(fits)
            .map(|teams| BlockLayout {
                threads: LANES * team * teams,
                shared_bytes: bytes(teams),
            })
    }

    /// Warps that share a tile.
    fn team(&self) -> u32 {
        let warps = match self.family {
            Family::Partial => self.rows / 4,
            Family::Matrix => self.rows / 8,
            Family::Tiled => return WARPS,
        };
        warps as u32
    }

    /// Shared memory before the slots.
    fn header_bytes(&self) -> u32 {
        let rows = self.rows as u32;
        match self.family {
            // 32 weights of each of 16 warps.
            Family::Partial => BARRIER_BYTES + 16 * 32 * 4,
            // q as 32 fragments a lane for each warp of a team, scales of the rows, the weight of a key norm.
            Family::Matrix => {
                let fragment = if self.pairs.is_some() { 16 } else { 8 };
                BARRIER_BYTES + self.team() * (32 * LANES * fragment + 64) + HEAD_DIM as u32 * 4
            }
            // Weights of a tile in two halves, maxima of two groups of its tokens, one f32 more a row, q, rebuilt keys.
            Family::Tiled => {
                let keys = self.pairs.map_or(0, |_| self.tokens() * PITCH);
                BARRIER_BYTES
                    + 2 * rows * (self.tokens() * 2 + 16)
                    + 3 * rows * 4
                    + rows * PITCH
                    + keys
            }
        }
    }

    /// A tile of K or V rows, and the angles of rebuilt keys.
    fn slot_bytes(&self) -> u32 {
        let angles = self.pairs.map_or(0, |pairs| 2 * pairs * 4);
        let row = match self.family {
            Family::Partial => HEAD_DIM as u32 * self.element + angles,
            Family::Matrix if self.pairs.is_some() => PITCH + angles + 32,
            Family::Matrix => PITCH,
            Family::Tiled => PITCH + angles,
        };
        self.tokens() * row
    }

    /// Tokens of a tile.
    fn tokens(&self) -> u32 {
        match self.family {
            Family::Partial => 8,
            Family::Matrix => 16,
            Family::Tiled => 32,
        }
    }

    /// What teams leave where the slots were, for the block to merge; one team alone has nothing to merge with.
    fn states_bytes(&self, teams: u32) -> u32 {
        match self.family {
            Family::Tiled => 0,
            Family::Partial | Family::Matrix => {
                teams * self.rows as u32 * ((HEAD_DIM as u32 + 4) * 4 + 12)
            }
        }
    }
}
