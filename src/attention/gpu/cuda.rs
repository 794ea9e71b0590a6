//! Which kernels of `cuda/` an NVIDIA GPU runs, on which grid, with how much shared memory.
//!
//! A block holds one to eight teams of warps. Each team has slots in shared memory, tiles of K and V rows go through them, and
//! the more slots the more bytes are on their way: a block takes all the shared memory that it can have.

use super::shared_kv::shared_params;
use super::states::{with_states, After};
use super::{first_pass_buffers, one_kv_dtype, params, Route, Sizes, LANES, OP};
use crate::attention::geometry::{AttentionGeometry, HEAD_DIM};
use crate::attention::keys::RotaryKeys;
use crate::attention::plan::Partitions;
use crate::backend::limits::narrow;
use crate::backend::plan::{Pass, Plan, Source, Target};
use candle::{bail, DType, Result};

/// What a plan has to know of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chip {
    /// How many blocks run at once, one each.
    pub multiprocessors: u32,
    /// Dynamic shared memory that a block can have, in bytes.
    pub shared_bytes: u32,
}

/// A partition shorter than this costs more to start and merge than it gains.
const MIN_PARTITION: usize = 32;

impl Chip {
    /// Partitions that fill the device: of those that leave no block waiting for a second turn, the most; if the heads alone
    /// nearly do, the number with the fewest idle multiprocessors in the last turn.
    pub fn partitions(&self, g: &AttentionGeometry) -> usize {
        let chip = (self.multiprocessors as usize).max(1);
        let blocks = g.batch * g.kv_heads * row_blocks(g, Family::of(g));
        let by_length = g.kv_len.div_ceil(MIN_PARTITION);
        // Idle multiprocessors of the last turn, as a fraction of all turns.
        let idle = |partitions: usize| {
            let work = blocks.saturating_mul(partitions);
            let turns = work.div_ceil(chip);
            (turns * chip - work) as f64 / (turns * chip) as f64
        };
        let most = (chip / blocks.max(1)).max(8).min(by_length).max(1);
        (1..=most)
            .rev()
            .min_by(|&a, &b| idle(a).total_cmp(&idle(b)))
            .unwrap_or(1)
    }
}

/// What multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    /// The f32 units: any types, any rows.
    Partial,
    /// The matrix units: half types, q in the type of K and V, query rows that see every key.
    Matrix,
}

impl Family {
    fn of(g: &AttentionGeometry) -> Self {
        match Self::matrix_refusal(g) {
            None => Self::Matrix,
            Some(_) => Self::Partial,
        }
    }

    fn matrix_refusal(g: &AttentionGeometry) -> Option<String> {
        if g.v.dtype == DType::F32 {
            Some("is for f16 and bf16, got F32".into())
        } else if g.q.dtype != g.v.dtype {
            Some(format!(
                "wants q in the dtype of k and v, got {:?} and {:?}",
                g.q.dtype, g.v.dtype
            ))
        } else if g.causal && g.q_len > 1 {
            Some(format!(
                "is for query rows that see every key, got {} causal rows",
                g.q_len
            ))
        } else {
            None
        }
    }

    /// Query rows of a warp.
    fn rows(self) -> usize {
        match self {
            Self::Partial => 4,
            Self::Matrix => 8,
        }
    }

    /// Tokens of a tile.
    fn tokens(self) -> u32 {
        match self {
            Self::Partial => 8,
            Self::Matrix => 16,
        }
    }
}

/// Query rows that share one read of a tile: 4 to 16, as many warps as that takes.
fn rows_together(g: &AttentionGeometry, family: Family) -> usize {
    g.rows_per_kv_head()
        .next_power_of_two()
        .clamp(family.rows(), 16)
}

fn row_blocks(g: &AttentionGeometry, family: Family) -> usize {
    g.rows_per_kv_head().div_ceil(rows_together(g, family))
}

/// Warps of a block: what the registers of a multiprocessor hold of these kernels.
const WARPS: u32 = 8;
/// Slots of a block that there are barriers for.
const MOST_SLOTS: u32 = 32;
/// Two barriers a slot.
const BARRIER_BYTES: u32 = 2 * 8 * MOST_SLOTS;

/// The plan on `chip`: attention in the dtype of q or, with `states`, the states of every partition as [`super::plan_states`]
/// packs them. Inputs are q, k and v; with `keys`, q, v, their weight and the rows of their tables.
///
/// # Errors
///
/// K and V of different dtypes, sizes past the 32 bits of a grid or a parameter, a route that CUDA or the geometry has no use for,
/// keys that do not reach as far as the values, less shared memory than one tile takes.
pub fn plan(
    g: &AttentionGeometry,
    keys: Option<&RotaryKeys>,
    chip: Chip,
    partitions: &Partitions,
    softmax_scale: f32,
    route: Route,
    states: bool,
) -> Result<Plan> {
    one_kv_dtype(g)?;
    let family = match route {
        Route::Matrix => match Family::matrix_refusal(g) {
            None => Family::Matrix,
            Some(why) => bail!("{OP}: the matrix route {why}"),
        },
        own if own == Route::default() => Family::of(g),
        other => bail!(
            "{OP}: CUDA has no kernels for {other:?}, want the default route or the matrix route"
        ),
    };
    let after = match states {
        true => After::Pack,
        false => After::Finish(g.q.dtype),
    };
    let partitions = after.partitions(g, partitions)?;
    let attention = params(g, &partitions, softmax_scale)?;
    let params = match keys {
        None => attention.bytes(),
        Some(keys) => {
            keys.check(OP, g)?;
            shared_params(attention, keys).bytes()
        }
    };
    let pairs = keys.map(|keys| keys.tables().pairs() as u32);
    let sizes = Sizes::new(g, &partitions)?;
    let together = rows_together(g, family);
    let team = (together / family.rows()) as u32;
    let before = header_bytes(family, team, pairs.is_some());
    let slot = slot_bytes(family, sizes.element, pairs.unwrap_or(0));
    let slots = (chip.shared_bytes.saturating_sub(before) / slot).min(MOST_SLOTS);
    // A team with no slot can't work, and the states of all teams must fit where the slots were.
    let bytes = |teams: u32| {
        let held = slots / teams * teams * slot;
        let states = teams * together as u32 * ((HEAD_DIM as u32 + 4) * 4 + 12);
        before + held.max(states)
    };
    let fits = |&teams: &u32| teams <= slots && bytes(teams) <= chip.shared_bytes;
    let Some(teams) = (1..=WARPS / team).rev().find(fits) else {
        bail!(
            "{OP}: a block needs {} bytes of shared memory, this device has {}",
            before + slot,
            chip.shared_bytes
        )
    };
    let first = Pass {
        source: match family {
            Family::Partial => Source::CudaD512,
            Family::Matrix => Source::CudaMatrix,
        },
        entry: entry(family, g.v.dtype, together, pairs)?,
        buffers: first_pass_buffers(if keys.is_some() { 4 } else { 3 }),
        params,
        threadgroups: [
            sizes.partitions,
            sizes.batch_heads,
            narrow(OP, "row blocks", row_blocks(g, family))?,
        ],
        threads: LANES * team * teams,
        threadgroup_bytes: bytes(teams),
    };
    with_states(first, sizes.states, after, Target::Cuda)
}

/// Shared memory before the slots.
fn header_bytes(family: Family, team: u32, rebuilt: bool) -> u32 {
    // q as 32 fragments a lane for each warp of a team.
    let fragment = if rebuilt { 16 } else { 8 };
    match family {
        // 32 weights of each of 16 warps.
        Family::Partial => BARRIER_BYTES + 16 * 32 * 4,
        // The fragments, the weight of a key norm, scales of the rows.
        Family::Matrix => BARRIER_BYTES + team * (32 * LANES * fragment + 64) + HEAD_DIM as u32 * 4,
    }
}

/// A tile of K or V rows, and the angles of rebuilt keys; rows of the matrix kernels lie apart, so that they fall into different
/// banks.
fn slot_bytes(family: Family, element: u32, pairs: u32) -> u32 {
    let row = HEAD_DIM as u32 * element;
    let angles = 2 * pairs * 4;
    match family {
        Family::Partial => family.tokens() * (row + angles),
        Family::Matrix if pairs > 0 => family.tokens() * (row + 16 + angles + 32),
        Family::Matrix => family.tokens() * (row + 16),
    }
}

/// The kernels of an element type; those for 4 rows, 8 and 16 that share a tile.
struct Entries {
    partial: [&'static str; 3],
    /// Of keys with angles for up to 128 pairs, and up to 256.
    rebuilt: [[&'static str; 3]; 2],
    matrix: Option<MatrixEntries>,
}

/// Those for 8 rows and 16.
struct MatrixEntries {
    stored: [&'static str; 2],
    rebuilt: [&'static str; 2],
}

macro_rules! partial {
    ($op:literal, $name:literal, $blocks:literal) => {
        [
            concat!($op, "_partial_", $name, "_rows4", $blocks),
            concat!($op, "_partial_", $name, "_rows8", $blocks),
            concat!($op, "_partial_", $name, "_rows16", $blocks),
        ]
    };
}

macro_rules! matrix {
    ($op:literal, $name:literal) => {
        [
            concat!($op, "_matrix_", $name, "_rows8"),
            concat!($op, "_matrix_", $name, "_rows16"),
        ]
    };
}

macro_rules! entries {
    ($name:literal, $matrix:expr) => {
        Entries {
            partial: partial!("attention_d512", $name, ""),
            rebuilt: [
                partial!("attention_d512_shared_kv", $name, "_blocks1"),
                partial!("attention_d512_shared_kv", $name, "_blocks2"),
            ],
            matrix: $matrix,
        }
    };
    ($name:literal) => {
        entries!(
            $name,
            Some(MatrixEntries {
                stored: matrix!("attention_d512", $name),
                rebuilt: matrix!("attention_d512_shared_kv", $name),
            })
        )
    };
}

static F32: Entries = entries!("f32", None);
static F16: Entries = entries!("f16");
static BF16: Entries = entries!("bf16");

fn entry(
    family: Family,
    dtype: DType,
    together: usize,
    pairs: Option<u32>,
) -> Result<&'static str> {
    let entries = match dtype {
        DType::F16 => &F16,
        DType::BF16 => &BF16,
        _ => &F32,
    };
    let size = match together {
        4 => 0,
        8 => 1,
        _ => 2,
    };
    Ok(match (family, &entries.matrix, pairs) {
        (Family::Partial, _, None) => entries.partial[size],
        (Family::Partial, _, Some(pairs)) => entries.rebuilt[(pairs > 128) as usize][size],
        (Family::Matrix, Some(matrix), None) => matrix.stored[size / 2],
        (Family::Matrix, Some(matrix), Some(_)) => matrix.rebuilt[size / 2],
        (Family::Matrix, None, _) => bail!("{OP}: the matrix units have no kernel for {dtype:?}"),
    })
}
