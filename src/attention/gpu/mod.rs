//! Which kernels a GPU runs for a geometry, on which grid, with which scratch: the only place that knows.

pub mod cuda;
mod shared_kv;
pub mod states;

use super::geometry::{AttentionGeometry, RowView, HEAD_DIM};
use super::plan::Partitions;
use crate::backend::limits::{check_grid, narrow};
use crate::backend::params::{type_number, GemAttention, GemRows};
use crate::backend::plan::{Binding, Output, Pass, Plan, Slot, Source, Target};
use candle::{bail, DType, Result};
use states::{with_states, After, StateSizes};
use Binding::{Read, Update, Write};

pub use shared_kv::{plan_shared_kv, plan_shared_kv_states};

const LANES: u32 = 32;
const THREADS: u32 = 256;
const SIMD_GROUPS: usize = 8;
const OP: &str = "attention_d512";

/// Which kernels compute attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// One pass over the cache and a merge.
    Fused(Tiling),
    /// As `Fused`, on the matrix units; for query rows that see every key. A row that is not finite makes the up to 8 rows that share
    /// its matrices NaN or infinite too; on the other routes it stays alone.
    Matrix,
    /// Scores, softmax and values as passes of their own: the unfused baseline.
    Staged,
}

/// How a threadgroup of the fused route shares a tile of K and V rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiling {
    /// Tokens of a tile: 4 or 8.
    pub tokens: u32,
    /// Query rows that a SIMD group serves from one read of the tile: 1, or 2 with tiles of 4 tokens.
    pub heads: u32,
    /// Stage the tile in threadgroup memory; else every SIMD group reads the device.
    pub stage: bool,
}

impl Default for Route {
    fn default() -> Self {
        Self::Fused(Tiling {
            tokens: 4,
            heads: 1,
            stage: true,
        })
    }
}

/// The kernels of one K/V element type: partial first passes by tiling, the matrix first pass, staged scores and values.
struct Entries {
    partial: [(Tiling, &'static str); 6],
    matrix: &'static str,
    scores: &'static str,
    values: &'static str,
}

macro_rules! entries {
    ($name:literal) => {
        Entries {
            partial: [
                (
                    tiling(4, 1, true),
                    concat!("attention_d512_partial_", $name, "_tile4_heads1_staged"),
                ),
                (
                    tiling(4, 1, false),
                    concat!("attention_d512_partial_", $name, "_tile4_heads1_direct"),
                ),
                (
                    tiling(8, 1, true),
                    concat!("attention_d512_partial_", $name, "_tile8_heads1_staged"),
                ),
                (
                    tiling(8, 1, false),
                    concat!("attention_d512_partial_", $name, "_tile8_heads1_direct"),
                ),
                (
                    tiling(4, 2, true),
                    concat!("attention_d512_partial_", $name, "_tile4_heads2_staged"),
                ),
                (
                    tiling(4, 2, false),
                    concat!("attention_d512_partial_", $name, "_tile4_heads2_direct"),
                ),
            ],
            matrix: concat!("attention_d512_matrix_", $name),
            scores: concat!("attention_staged_scores_", $name),
            values: concat!("attention_staged_values_", $name),
        }
    };
}

const fn tiling(tokens: u32, heads: u32, stage: bool) -> Tiling {
    Tiling {
        tokens,
        heads,
        stage,
    }
}

static F32: Entries = entries!("f32");
static F16: Entries = entries!("f16");
static BF16: Entries = entries!("bf16");

/// The plan of `route`; `partitions` are those of the CPU, so that a fault of the merge shows everywhere.
///
/// # Errors
///
/// K and V of different dtypes, sizes past the 32 bits of a grid or a parameter, or a route that the geometry has no use for.
pub fn plan(
    g: &AttentionGeometry,
    partitions: &Partitions,
    softmax_scale: f32,
    route: Route,
) -> Result<Plan> {
    plan_then(
        g,
        partitions,
        softmax_scale,
        route,
        After::Finish(g.q.dtype),
    )
}

/// As [`plan`], up to the states of every partition: maxima, denominators, numerators, packed into one output.
///
/// # Errors
///
/// As [`plan`], and for the staged route, which has no states.
pub fn plan_states(
    g: &AttentionGeometry,
    partitions: &Partitions,
    softmax_scale: f32,
    route: Route,
) -> Result<Plan> {
    plan_then(g, partitions, softmax_scale, route, After::Pack)
}

/// No GPU kernel reads keys and values of different types.
fn one_kv_dtype(g: &AttentionGeometry) -> Result<()> {
    if g.k.dtype != g.v.dtype {
        bail!(
            "{OP}: k is {:?} and v {:?}, want one dtype for both on a GPU",
            g.k.dtype,
            g.v.dtype
        );
    }
    Ok(())
}

fn plan_then(
    g: &AttentionGeometry,
    partitions: &Partitions,
    softmax_scale: f32,
    route: Route,
    after: After,
) -> Result<Plan> {
    one_kv_dtype(g)?;
    let entries = match g.k.dtype {
        DType::F16 => &F16,
        DType::BF16 => &BF16,
        _ => &F32,
    };
    let partitions = after.partitions(g, partitions)?;
    let params = aligned_params(g, &partitions, softmax_scale)?.bytes();
    let sizes = Sizes::new(g, &partitions)?;
    let first = match (route, after) {
        (Route::Fused(tiling), _) => fused(&sizes, params, entries, tiling)?,
        (Route::Matrix, _) => matrix(g, &partitions, &sizes, params, entries)?,
        (Route::Staged, After::Finish(_)) => return staged(g, &sizes, &params, entries),
        (Route::Staged, After::Pack) => {
            bail!("{OP}: the staged route leaves no partial states, want the fused or the matrix route")
        }
    };
    with_states(first, sizes.states, after, Target::Metal)
}

/// Numbers of a grid, known to fit.
struct Sizes {
    partitions: u32,
    batch_heads: u32,
    /// Query rows of one KV head.
    rows: u32,
    /// Query rows in all.
    all_rows: u32,
    kv_len: u32,
    element: u32,
    states: StateSizes,
}

impl Sizes {
    fn new(g: &AttentionGeometry, partitions: &Partitions) -> Result<Self> {
        let all_rows = g.batch * g.q_heads * g.q_len;
        Ok(Self {
            partitions: narrow(OP, "partitions", partitions.count())?,
            batch_heads: narrow(OP, "batch * kv_heads", g.batch * g.kv_heads)?,
            rows: narrow(OP, "group * q_len", g.rows_per_kv_head())?,
            all_rows: narrow(OP, "batch * q_heads * q_len", all_rows)?,
            kv_len: narrow(OP, "kv_len", g.kv_len)?,
            element: g.k.dtype.size_in_bytes() as u32,
            states: StateSizes {
                rows: all_rows,
                partitions: partitions.count(),
                dim: HEAD_DIM,
            },
        })
    }
}

fn fused(s: &Sizes, params: Vec<u8>, entries: &Entries, tiling: Tiling) -> Result<Pass> {
    let Some((_, entry)) = entries.partial.iter().find(|(known, _)| *known == tiling) else {
        bail!("{OP}: no kernel for {tiling:?}, want tiles of 4 or 8 tokens with 1 head, or of 4 with 2");
    };
    let (threadgroups, threads) = fused_grid(s, tiling);
    Ok(Pass {
        source: Source::AttentionD512,
        entry,
        buffers: first_pass_buffers(3),
        params,
        threadgroups,
        threads,
        threadgroup_bytes: staged_bytes(tiling, 2 * HEAD_DIM as u32 * s.element),
    })
}

/// Threadgroups and threads of a first pass. A SIMD group that owns no row would only help to load, so there are no more of
/// them than rows.
fn fused_grid(s: &Sizes, tiling: Tiling) -> ([u32; 3], u32) {
    let simd_groups = s.rows.div_ceil(tiling.heads).min(SIMD_GROUPS as u32);
    let row_blocks = s.rows.div_ceil(simd_groups * tiling.heads);
    (
        [s.partitions, s.batch_heads, row_blocks],
        LANES * simd_groups,
    )
}

/// Threadgroup memory of a tile whose tokens take `token` bytes each.
fn staged_bytes(tiling: Tiling, token: u32) -> u32 {
    if tiling.stage {
        tiling.tokens * token
    } else {
        // Unused, but a kernel's argument must be bound.
        16
    }
}

fn matrix(
    g: &AttentionGeometry,
    partitions: &Partitions,
    s: &Sizes,
    params: Vec<u8>,
    entries: &Entries,
) -> Result<Pass> {
    if g.causal && g.q_len > 1 {
        bail!(
            "{OP}: the matrix route is for query rows that see every key, got {} causal rows",
            g.q_len
        );
    }
    let shortest = partitions.range(0).len();
    if shortest < 8 {
        bail!(
            "{OP}: the matrix route wants partitions of at least 8 keys, got {shortest} of {} keys",
            g.kv_len
        );
    }
    Ok(Pass {
        source: Source::AttentionMatrix,
        entry: entries.matrix,
        buffers: first_pass_buffers(3),
        params,
        threadgroups: [s.partitions, s.batch_heads, s.rows.div_ceil(8)],
        threads: THREADS,
        threadgroup_bytes: 8 * HEAD_DIM as u32 * 4,
    })
}

fn first_pass_buffers(inputs: usize) -> Vec<Binding> {
    inputs_into(inputs, &[0, 1, 2].map(Slot::Scratch))
}

/// Buffers of a pass that reads so many inputs and writes `results`.
fn inputs_into(inputs: usize, results: &[Slot]) -> Vec<Binding> {
    let inputs = (0..inputs).map(|input| Read(Slot::Input(input)));
    inputs.chain(results.iter().copied().map(Write)).collect()
}

/// Dimensions of a value tile, and slices of the sequence, of the staged route.
const VALUE_DIMS: u32 = 32;
const VALUE_PARTITIONS: u32 = 16;
const SCORE_TOKENS: u32 = 64;

fn staged(g: &AttentionGeometry, s: &Sizes, params: &[u8], entries: &Entries) -> Result<Plan> {
    let bytes = |elements: [usize; 3]| {
        let product = elements
            .iter()
            .try_fold(4u64, |bytes, &n| bytes.checked_mul(n as u64));
        match product {
            Some(bytes) => Ok(bytes),
            None => bail!("{OP}: scratch of {elements:?} f32 passes 64 bits"),
        }
    };
    let (rows, row_blocks) = (s.all_rows as usize, s.rows.div_ceil(8));
    let pass = |entry, buffers, threadgroups, threadgroup_bytes| Pass {
        source: Source::AttentionStaged,
        entry,
        buffers,
        params: params.to_vec(),
        threadgroups,
        threads: THREADS,
        threadgroup_bytes,
    };
    let (scores, sums) = (Slot::Scratch(0), Slot::Scratch(1));
    let value_heads = match s.batch_heads.checked_mul(row_blocks) {
        Some(n) => n,
        None => bail!(
            "{OP}: {} KV heads of {row_blocks} row blocks pass 32 bits",
            s.batch_heads
        ),
    };
    let passes = vec![
        pass(
            entries.scores,
            vec![Read(Slot::Input(0)), Read(Slot::Input(1)), Write(scores)],
            [s.kv_len.div_ceil(SCORE_TOKENS), s.batch_heads, row_blocks],
            4 * HEAD_DIM as u32 * s.element,
        ),
        pass(
            "attention_staged_softmax",
            vec![Update(scores)],
            [s.all_rows, 1, 1],
            64,
        ),
        pass(
            entries.values,
            vec![Read(Slot::Input(2)), Read(scores), Write(sums)],
            [HEAD_DIM as u32 / VALUE_DIMS, VALUE_PARTITIONS, value_heads],
            VALUE_DIMS * 32 * s.element,
        ),
        pass(
            "attention_staged_reduce",
            vec![Read(sums), Write(Slot::Output(0))],
            [s.all_rows, 1, 1],
            0,
        ),
    ];
    for pass in &passes {
        check_grid(OP, pass)?;
    }
    let scratch = vec![
        bytes([rows, g.kv_len, 1])?,
        bytes([rows, VALUE_PARTITIONS as usize, HEAD_DIM])?,
    ];
    Ok(Plan {
        outputs: vec![Output {
            dtype: g.q.dtype,
            elements: s.states.rows * HEAD_DIM,
        }],
        scratch,
        passes,
    })
}

/// Its kernels load four elements at a time, and a device may not take such a load anywhere.
fn check_alignment(name: &str, view: &RowView) -> Result<()> {
    let offsets = [
        view.start,
        view.batch_stride,
        view.head_stride,
        view.row_stride,
    ];
    if offsets.iter().any(|offset| offset % 4 != 0) {
        bail!(
            "{OP}: {name} starts at element {} with strides {:?}, want multiples of 4 on Metal",
            view.start,
            &offsets[1..]
        );
    }
    Ok(())
}

/// What Metal's kernels take.
fn aligned_params(
    g: &AttentionGeometry,
    partitions: &Partitions,
    softmax_scale: f32,
) -> Result<GemAttention> {
    for (name, view) in [("q", &g.q), ("k", &g.k), ("v", &g.v)] {
        check_alignment(name, view)?;
    }
    params(g, partitions, softmax_scale)
}

fn params(
    g: &AttentionGeometry,
    partitions: &Partitions,
    softmax_scale: f32,
) -> Result<GemAttention> {
    let rows = |view: &RowView| GemRows {
        start: view.start,
        batch_stride: view.batch_stride,
        head_stride: view.head_stride,
        row_stride: view.row_stride,
    };
    Ok(GemAttention {
        q: rows(&g.q),
        k: rows(&g.k),
        v: rows(&g.v),
        batch: narrow(OP, "batch", g.batch)?,
        q_heads: narrow(OP, "q_heads", g.q_heads)?,
        kv_heads: narrow(OP, "kv_heads", g.kv_heads)?,
        group: narrow(OP, "group", g.group)?,
        q_len: narrow(OP, "q_len", g.q_len)?,
        kv_len: narrow(OP, "kv_len", g.kv_len)?,
        causal: g.causal as u32,
        partitions: narrow(OP, "partitions", partitions.count())?,
        partition_len: narrow(OP, "partition length", partitions.range(0).len())?,
        q_type: type_number(g.q.dtype),
        out_type: type_number(g.q.dtype),
        softmax_scale,
    })
}
