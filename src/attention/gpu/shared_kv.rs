//! The plan where keys are rebuilt from values: another first pass, the same merge.

use super::super::keys::RotaryKeys;
use super::{
    aligned_params, first_pass_buffers, fused_grid, staged_bytes, tiling, with_states, After,
    Route, Sizes, Tiling,
};
use crate::attention::geometry::{AttentionGeometry, HEAD_DIM};
use crate::attention::plan::Partitions;
use crate::backend::params::{GemAttention, GemSharedKv};
use crate::backend::plan::{Pass, Plan, Source, Target};
use candle::{bail, DType, Result};

const OP: &str = "attention_d512_shared_kv";

type Entries = [(Tiling, &'static str); 6];

macro_rules! entry {
    ($name:literal, $tokens:literal, $heads:literal, $stage:literal, $how:literal) => {
        (
            tiling($tokens, $heads, $stage),
            concat!(
                "attention_d512_shared_kv_partial_",
                $name,
                "_tile",
                $tokens,
                "_heads",
                $heads,
                "_",
                $how
            ),
        )
    };
}

macro_rules! entries {
    ($name:literal) => {
        [
            entry!($name, 4, 1, true, "staged"),
            entry!($name, 4, 1, false, "direct"),
            entry!($name, 8, 1, true, "staged"),
            entry!($name, 8, 1, false, "direct"),
            entry!($name, 4, 2, true, "staged"),
            entry!($name, 4, 2, false, "direct"),
        ]
    };
}

static F32: Entries = entries!("f32");
static F16: Entries = entries!("f16");
static BF16: Entries = entries!("bf16");

/// As [`plan`](super::plan), for a geometry of values alone. The inputs are q, v, the weight of `keys` and the rows of their
/// tables.
///
/// # Errors
///
/// Sizes past the 32 bits of a grid or a parameter, or a route other than the fused one.
pub fn plan_shared_kv(
    g: &AttentionGeometry,
    keys: &RotaryKeys,
    partitions: &Partitions,
    softmax_scale: f32,
    route: Route,
) -> Result<Plan> {
    plan_then(
        g,
        keys,
        partitions,
        softmax_scale,
        route,
        After::Finish(g.q.dtype),
    )
}

/// As [`plan_states`](super::plan_states), for a geometry of values alone. Inputs and errors as [`plan_shared_kv`].
pub fn plan_shared_kv_states(
    g: &AttentionGeometry,
    keys: &RotaryKeys,
    partitions: &Partitions,
    softmax_scale: f32,
    route: Route,
) -> Result<Plan> {
    plan_then(g, keys, partitions, softmax_scale, route, After::Pack)
}

fn plan_then(
    g: &AttentionGeometry,
    keys: &RotaryKeys,
    partitions: &Partitions,
    softmax_scale: f32,
    route: Route,
    after: After,
) -> Result<Plan> {
    let tiling = match route {
        Route::Fused(tiling) => tiling,
        Route::Matrix => bail!(
            "{OP}: the matrix route takes keys from the device straight into matrices, and rebuilt ones are not there; want the fused route"
        ),
        Route::Staged => bail!(
            "{OP}: the unfused route reads keys that are stored, and rebuilt ones are not; want the fused route"
        ),
    };
    let entries = match g.v.dtype {
        DType::F16 => &F16,
        DType::BF16 => &BF16,
        _ => &F32,
    };
    let Some((_, entry)) = entries.iter().find(|(known, _)| *known == tiling) else {
        bail!("{OP}: no kernel for {tiling:?}, want tiles of 4 or 8 tokens with 1 head, or of 4 with 2");
    };
    keys.check(OP, g)?;
    let partitions = after.partitions(g, partitions)?;
    let attention = aligned_params(g, &partitions, softmax_scale)?;
    let sizes = Sizes::new(g, &partitions)?;
    let params = shared_params(attention, keys);
    let (threadgroups, threads) = fused_grid(&sizes, tiling);
    let first = Pass {
        source: Source::AttentionSharedKv,
        entry,
        buffers: first_pass_buffers(4),
        params: params.bytes(),
        threadgroups,
        threads,
        threadgroup_bytes: staged_bytes(
            tiling,
            HEAD_DIM as u32 * sizes.element + 2 * params.pairs * 4,
        ),
    };
    with_states(first, sizes.states, after, Target::Metal)
}

/// `attention` over the values, and where the keys' weight and angles are.
pub(super) fn shared_params(attention: GemAttention, keys: &RotaryKeys) -> GemSharedKv {
    let pairs = keys.tables().pairs();
    let row = 2 * pairs as u64;
    GemSharedKv {
        attention,
        weight: keys.weight().layout().start_offset() as u64,
        angles: keys.tables().rows().layout().start_offset() as u64 + keys.start() as u64 * row,
        pairs: pairs as u32,
        unused: 0,
    }
}
