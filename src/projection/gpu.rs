//! Which kernel a GPU runs for a projection, and on which grid: the only place that knows.

use super::geometry::{MatrixView, ProjectionGeometry};
use crate::backend::limits::{check_grid, narrow};
use crate::backend::params::{GemMatrix, GemProjection};
use crate::backend::plan::{Binding, Output, Pass, Plan, Slot, Source};
use candle::{bail, DType, Result};

const LANES: u32 = 32;
const OP: &str = "fused_projection";

/// Elements of the result that a threadgroup owns, and the SIMD groups that share them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tile {
    /// Rows of x.
    pub rows: u32,
    /// Rows of w: columns of the result.
    pub columns: u32,
    /// SIMD groups of the threadgroup.
    pub simd_groups: u32,
}

impl Tile {
    /// Those that have kernels. All give the same bits.
    pub const ALL: [Self; 6] = [
        Self::new(32, 64, 2),
        Self::new(32, 128, 2),
        Self::new(64, 64, 4),
        Self::new(64, 128, 4),
        Self::new(128, 64, 4),
        Self::new(128, 128, 4),
    ];

    const fn new(rows: u32, columns: u32, simd_groups: u32) -> Self {
        Self {
            rows,
            columns,
            simd_groups,
        }
    }
}

/// What computes a projection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    /// Few rows: every SIMD group streams rows of w once, for all rows of x.
    Decode,
    /// 8 x 8 matrices, x and w staged tile by tile.
    Tiled(Tile),
}

/// Most rows of x that decode takes.
pub(crate) const DECODE_ROWS: usize = 8;

/// Which route, for at most so many rows of x and of w. The first that fits.
struct Rule {
    most_m: usize,
    most_n: usize,
    route: Route,
}

const SMALL: Route = Route::Tiled(Tile::new(32, 128, 2));
const LARGE: Route = Route::Tiled(Tile::new(64, 128, 4));

/// For n up to 1664 the two tiles and where they change were measured, on an M5 Air with another implementation of the same
/// tiles: 128 x 64 was 10 % slower at 1024 rows, and 128 x 128 half as fast, with 128 sums a lane. The rest is inferred, not
/// measured:
///
/// * Up to 8 rows the time is that of reading w, and a tile would multiply rows that are not there.
/// * Below 768 rows the larger tile gives fewer than 156 threadgroups at n = 1664, too few to fill the device evenly. A
///   wide weight (Gemma 4 31B: 18,432 and 16,384 rows) gives 128 of them for every 64 rows of x, so there the smaller tile
///   is left only what would leave half of the larger one empty; each read of w then serves 64 rows instead of 32.
static RULES: [Rule; 5] = [
    Rule {
        most_m: DECODE_ROWS,
        most_n: usize::MAX,
        route: Route::Decode,
    },
    Rule {
        most_m: 767,
        most_n: 1664,
        route: SMALL,
    },
    Rule {
        most_m: usize::MAX,
        most_n: 1664,
        route: LARGE,
    },
    Rule {
        most_m: 32,
        most_n: usize::MAX,
        route: SMALL,
    },
    Rule {
        most_m: usize::MAX,
        most_n: usize::MAX,
        route: LARGE,
    },
];

/// Rows of tiles that share one sweep over w: it comes from memory once a band if a cache holds the band's rows of x, 512 of
/// them at 64 rows a tile (5.5 MB in half precision at 5376 columns). Inferred, not measured; it changes no bit.
const BAND: u32 = 8;

/// The kernels of a pair of element types, tiles as in [`Tile::ALL`].
struct Entries {
    x: DType,
    w: DType,
    tiles: [&'static str; Tile::ALL.len()],
    decode: [(usize, &'static str); 4],
}

macro_rules! entries {
    ($x:ident, $w:ident, $name:literal) => {
        Entries {
            x: DType::$x,
            w: DType::$w,
            tiles: [
                concat!("projection_", $name, "_32x64"),
                concat!("projection_", $name, "_32x128"),
                concat!("projection_", $name, "_64x64"),
                concat!("projection_", $name, "_64x128"),
                concat!("projection_", $name, "_128x64"),
                concat!("projection_", $name, "_128x128"),
            ],
            decode: [
                (1, concat!("projection_", $name, "_decode1")),
                (2, concat!("projection_", $name, "_decode2")),
                (4, concat!("projection_", $name, "_decode4")),
                (DECODE_ROWS, concat!("projection_", $name, "_decode8")),
            ],
        }
    };
}

static ENTRIES: [Entries; 5] = [
    entries!(F32, F32, "f32"),
    entries!(F16, F16, "f16"),
    entries!(BF16, BF16, "bf16"),
    entries!(F32, F16, "f32_f16"),
    entries!(F32, BF16, "f32_bf16"),
];

/// The plan for `g`: inputs x and w, one output of `(m, n)` f32. With a `tile`, that one; without, what the rule says.
///
/// # Errors
///
/// A pair of dtypes or a tile without a kernel, or sizes past the 32 bits of a grid or a parameter.
pub fn plan(g: &ProjectionGeometry, tile: Option<Tile>) -> Result<Plan> {
    let Some(entries) = ENTRIES
        .iter()
        .find(|known| (known.x, known.w) == (g.x.dtype, g.w.dtype))
    else {
        return no_kernel(g);
    };
    let route = tile.map_or_else(|| rule(g.m, g.n), Route::Tiled);
    let pass = match route {
        Route::Decode => decode(g, entries)?,
        Route::Tiled(tile) => tiled(g, entries, tile)?,
    };
    one_pass(g, pass)
}

fn rule(m: usize, n: usize) -> Route {
    RULES
        .iter()
        .find(|rule| m <= rule.most_m && n <= rule.most_n)
        .map_or(LARGE, |rule| rule.route)
}

/// The kernels of `cuda/`, of a pair of element types: for 1, 2, 4 and 8 rows of x.
struct CudaEntries {
    x: DType,
    w: DType,
    rows: [(usize, &'static str); 4],
}

macro_rules! cuda_entries {
    ($x:ident, $w:ident, $name:literal) => {
        CudaEntries {
            x: DType::$x,
            w: DType::$w,
            rows: [
                (1, concat!("projection_", $name, "_rows1")),
                (2, concat!("projection_", $name, "_rows2")),
                (4, concat!("projection_", $name, "_rows4")),
                (DECODE_ROWS, concat!("projection_", $name, "_rows8")),
            ],
        }
    };
}

static CUDA: [CudaEntries; 5] = [
    cuda_entries!(F32, F32, "f32"),
    cuda_entries!(F16, F16, "f16"),
    cuda_entries!(BF16, BF16, "bf16"),
    cuda_entries!(F32, F16, "f32_f16"),
    cuda_entries!(F32, BF16, "f32_bf16"),
];

/// What computes a projection on CUDA.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CudaRoute {
    /// Kernels of `cuda/`.
    Kernels(Plan),
    /// cuBLAS, in one product.
    Library,
}

/// Most rows of f32 for which the kernels of `cuda/` are faster than cuBLAS: by 4 to 26 % with the 31B's projections on an H200.
const F32_ROWS: usize = 4;

/// What CUDA runs for `g`: cuBLAS, which in half precision reads the weight faster at one row (49 against 87 us there) and keeps
/// the matrix units busy at many. Kernels of `cuda/` are for a few rows of f32, and for what it does not take: two dtypes, or rows less
/// far apart than they are long.
///
/// # Errors
///
/// As [`plan`].
pub fn cuda_route(g: &ProjectionGeometry) -> Result<CudaRoute> {
    let apart = |view: &MatrixView, rows| rows == 1 || view.row_stride >= g.k as u64;
    let few = g.w.dtype == DType::F32 && g.m <= F32_ROWS;
    if g.x.dtype == g.w.dtype && !few && apart(&g.x, g.m) && apart(&g.w, g.n) {
        return Ok(CudaRoute::Library);
    }
    plan_cuda(g).map(CudaRoute::Kernels)
}

/// As [`plan`], for CUDA: blocks of 16 columns and up to 8 rows, whatever the shape.
fn plan_cuda(g: &ProjectionGeometry) -> Result<Plan> {
    let Some(entries) = CUDA
        .iter()
        .find(|known| (known.x, known.w) == (g.x.dtype, g.w.dtype))
    else {
        return no_kernel(g);
    };
    let together = g.m.min(DECODE_ROWS).next_power_of_two();
    let Some((rows, entry)) = entries.rows.iter().find(|(rows, _)| together == *rows) else {
        return no_kernel(g);
    };
    let blocks = [g.n.div_ceil(16), g.m.div_ceil(*rows)];
    let pass = Pass {
        source: Source::CudaProjection,
        entry,
        buffers: buffers(),
        params: params(g, 0)?,
        threadgroups: [
            narrow(OP, "blocks of weight rows", blocks[0])?,
            narrow(OP, "blocks of rows of xs", blocks[1])?,
            1,
        ],
        threads: 4 * LANES,
        threadgroup_bytes: 0,
    };
    one_pass(g, pass)
}

fn one_pass(g: &ProjectionGeometry, pass: Pass) -> Result<Plan> {
    check_grid(OP, &pass)?;
    Ok(Plan {
        outputs: vec![Output {
            dtype: DType::F32,
            elements: g.m * g.n,
        }],
        scratch: vec![],
        passes: vec![pass],
    })
}

fn no_kernel(g: &ProjectionGeometry) -> Result<Plan> {
    bail!(
        "{OP}: no kernel for xs of {:?} and a weight of {:?}, want xs in the dtype of the weight or in F32",
        g.x.dtype,
        g.w.dtype
    )
}

/// A SIMD group owns 4 columns, a threadgroup has 2: many small ones, as no memory is shared.
fn decode(g: &ProjectionGeometry, entries: &Entries) -> Result<Pass> {
    let Some((_, entry)) = entries.decode.iter().find(|(rows, _)| g.m <= *rows) else {
        bail!("{OP}: decode takes at most {DECODE_ROWS} rows, got {}", g.m);
    };
    Ok(Pass {
        source: Source::Projection,
        entry,
        buffers: buffers(),
        params: params(g, 0)?,
        threadgroups: [narrow(OP, "weight rows", g.n)?.div_ceil(8), 1, 1],
        threads: 2 * LANES,
        threadgroup_bytes: 0,
    })
}

fn tiled(g: &ProjectionGeometry, entries: &Entries, tile: Tile) -> Result<Pass> {
    let Some(index) = Tile::ALL.iter().position(|known| *known == tile) else {
        bail!("{OP}: no kernel for {tile:?}, want one of {:?}", Tile::ALL);
    };
    let row_tiles = narrow(OP, "rows of xs", g.m)?.div_ceil(tile.rows);
    let column_tiles = narrow(OP, "weight rows", g.n)?.div_ceil(tile.columns);
    let tiles = row_tiles as usize * column_tiles as usize;
    Ok(Pass {
        source: Source::Projection,
        entry: entries.tiles[index],
        buffers: buffers(),
        params: params(g, BAND.min(row_tiles))?,
        threadgroups: [narrow(OP, "the number of tiles", tiles)?, 1, 1],
        threads: tile.simd_groups * LANES,
        threadgroup_bytes: threadgroup_bytes(g, tile),
    })
}

/// A step stages 64 bytes of each row of w and as many elements of each row of x, and 16 bytes lie between rows.
fn threadgroup_bytes(g: &ProjectionGeometry, tile: Tile) -> u32 {
    let depth = 64 / g.w.dtype.size_in_bytes();
    let row = |dtype: DType| (depth * dtype.size_in_bytes() + 16) as u32;
    tile.rows * row(g.x.dtype) + tile.columns * row(g.w.dtype)
}

fn buffers() -> Vec<Binding> {
    vec![
        Binding::Read(Slot::Input(0)),
        Binding::Read(Slot::Input(1)),
        Binding::Write(Slot::Output(0)),
    ]
}

fn params(g: &ProjectionGeometry, band: u32) -> Result<Vec<u8>> {
    let matrix = |view: &MatrixView| GemMatrix {
        start: view.start,
        row_stride: view.row_stride,
    };
    let params = GemProjection {
        x: matrix(&g.x),
        w: matrix(&g.w),
        m: narrow(OP, "rows of xs", g.m)?,
        n: narrow(OP, "weight rows", g.n)?,
        k: narrow(OP, "the hidden size", g.k)?,
        band,
    };
    Ok(params.bytes())
}
