//! Which kernels of `cuda/` an NVIDIA GPU runs, on which grid, with how much shared memory.
//!
//! A block holds one to eight teams of warps. Each team has slots in shared memory, tiles of K and V rows go through them, and
//! the more slots the more bytes are on their way: a block takes all the shared memory that it can have.

mod block;
mod entries;

use super::shared_kv::shared_params;
use super::states::{with_states, After};
use super::{first_pass_buffers, inputs_into, one_kv_dtype, params, Route, Sizes, OP};
use crate::attention::geometry::AttentionGeometry;
use crate::attention::keys::RotaryKeys;
use crate::attention::plan::Partitions;
use crate::backend::limits::{check_grid, narrow};
use crate::backend::plan::{Output, Pass, Plan, Slot, Source, Target};
use block::{Block, Family};
use candle::{bail, Result};
use entries::entry;

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
    /// Partitions that fill the device. Of many query rows, whose states are large, the fewest that leave less than a tenth of
    /// it idle; else, of those that leave no block waiting for a second turn, the most. If the heads alone nearly fill it, the
    /// number with the fewest idle multiprocessors in the last turn.
    pub fn partitions(&self, g: &AttentionGeometry, keys: Option<&RotaryKeys>) -> usize {
        let chip = (self.multiprocessors as usize).max(1);
        let pairs = pairs(keys);
        let family = Family::of(g, pairs, *self);
        let blocks = g.batch * g.kv_heads * Block::new(g, pairs, family).row_blocks(g);
        let by_length = g.kv_len.div_ceil(MIN_PARTITION);
        // Idle multiprocessors of the last turn, as a fraction of all turns.
        let idle = |partitions: usize| {
            let work = blocks.saturating_mul(partitions);
            let turns = work.div_ceil(chip);
            (turns * chip - work) as f64 / (turns * chip) as f64
        };
        let enough = if family == Family::Tiled { 4 } else { 8 };
        let most = (chip / blocks.max(1)).max(enough).min(by_length).max(1);
        let few = (1..=most).find(|&partitions| family == Family::Tiled && idle(partitions) < 0.1);
        few.or_else(|| {
            let least_idle = |a: &usize, b: &usize| idle(*a).total_cmp(&idle(*b));
            (1..=most).rev().min_by(least_idle)
        })
        .unwrap_or(1)
    }
}

fn pairs(keys: Option<&RotaryKeys>) -> Option<u32> {
    keys.map(|keys| keys.tables().pairs() as u32)
}

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
    let pairs = pairs(keys);
    let family = match route {
        Route::Matrix => match Family::on_matrix_units(g, pairs, chip) {
            Ok(family) => family,
            Err(why) => bail!("{OP}: the matrix route {why}"),
        },
        own if own == Route::default() => Family::of(g, pairs, chip),
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
    let sizes = Sizes::new(g, &partitions)?;
    let block = Block::new(g, pairs, family);
    let Some(layout) = block.layout(chip) else {
        bail!(
            "{OP}: a block needs {} bytes of shared memory, this device has {}",
            block.least_bytes(),
            chip.shared_bytes
        )
    };
    let inputs = if keys.is_some() { 4 } else { 3 };
    // Many rows of one partition have nothing to merge, and large states to save.
    let whole = family == Family::Tiled && partitions.count() == 1 && !states;
    let first = Pass {
        source: match family {
            Family::Partial => Source::CudaD512,
            Family::Matrix => Source::CudaMatrix,
            Family::Tiled => Source::CudaTiled,
        },
        entry: entry(&block, g.v.dtype, whole)?,
        buffers: match whole {
            true => inputs_into(inputs, &[Slot::Output(0)]),
            false => first_pass_buffers(inputs),
        },
        params,
        threadgroups: [
            sizes.partitions,
            sizes.batch_heads,
            narrow(OP, "row blocks", block.row_blocks(g))?,
        ],
        threads: layout.threads,
        threadgroup_bytes: layout.shared_bytes,
    };
    if whole {
        check_grid(OP, &first)?;
        return Ok(Plan {
            outputs: vec![Output {
                dtype: g.q.dtype,
                elements: sizes.states.rows * sizes.states.dim,
            }],
            scratch: vec![],
            passes: vec![first],
        });
    }
    with_states(first, sizes.states, after, Target::Cuda)
}
