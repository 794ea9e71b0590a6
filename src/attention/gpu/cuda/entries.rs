//! Names of the kernels in `cuda/`.

use super::block::{Block, Family};
use crate::attention::gpu::OP;
use candle::{bail, DType, Result};

/// The kernels of an element type; those for 4 rows, 8 and 16 that share a tile.
struct Entries {
    partial: [&'static str; 3],
    /// Of keys with angles for up to 128 pairs, and up to 256.
    rebuilt: [[&'static str; 3]; 2],
    /// Of half types.
    units: Option<MatrixUnits>,
}

/// Of stored keys and of rebuilt ones.
struct MatrixUnits {
    /// For 8 rows and 16.
    matrix: [[&'static str; 2]; 2],
    /// Up to the states of a partition, and, of all there is, up to the output.
    tiled: [[&'static str; 2]; 2],
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

macro_rules! tiled {
    ($op:literal, $name:literal) => {
        [
            concat!($op, "_tiled_", $name),
            concat!($op, "_tiled_", $name, "_whole"),
        ]
    };
}

macro_rules! entries {
    ($name:literal, $units:expr) => {
        Entries {
            partial: partial!("attention_d512", $name, ""),
            rebuilt: [
                partial!("attention_d512_shared_kv", $name, "_blocks1"),
                partial!("attention_d512_shared_kv", $name, "_blocks2"),
            ],
            units: $units,
        }
    };
    ($name:literal) => {
        entries!(
            $name,
            Some(MatrixUnits {
                matrix: [
                    matrix!("attention_d512", $name),
                    matrix!("attention_d512_shared_kv", $name),
                ],
                tiled: [
                    tiled!("attention_d512", $name),
                    tiled!("attention_d512_shared_kv", $name),
                ],
            })
        )
    };
}

static F32: Entries = entries!("f32", None);
static F16: Entries = entries!("f16");
static BF16: Entries = entries!("bf16");

/// The kernel of a block, for K and V of `dtype`; with `whole`, one that leaves the output.
pub fn entry(block: &Block, dtype: DType, whole: bool) -> Result<&'static str> {
    let entries = match dtype {
        DType::F16 => &F16,
        DType::BF16 => &BF16,
        _ => &F32,
    };
    let size = match block.rows {
        4 => 0,
        8 => 1,
        _ => 2,
    };
    let rebuilt = block.pairs.is_some() as usize;
    Ok(match (block.family, &entries.units, block.pairs) {
        (Family::Partial, _, None) => entries.partial[size],
        (Family::Partial, _, Some(pairs)) => entries.rebuilt[(pairs > 128) as usize][size],
        (Family::Matrix, Some(units), _) => units.matrix[rebuilt][size / 2],
        (Family::Tiled, Some(units), _) => units.tiled[rebuilt][whole as usize],
        (_, None, _) => bail!("{OP}: the matrix units have no kernel for {dtype:?}"),
    })
}
