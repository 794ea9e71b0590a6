//! What a GPU would be asked to do for a projection, and what is refused.

use crate::attention_support::refusal;
use crate::metal_projection::PAIRS;
use candle::DType;
use gem::projection::geometry::MatrixView;
use gem::projection::gpu::{plan, Tile};
use gem::projection::ProjectionGeometry;

fn geometry(m: usize, n: usize, k: usize, (x, w): (DType, DType)) -> ProjectionGeometry {
    let view = |dtype, rows: usize| MatrixView {
        dtype,
        start: 0,
        row_stride: k as u64,
        end: (rows * k) as u64,
    };
    ProjectionGeometry {
        m,
        k,
        n,
        x: view(x, m),
        w: view(w, n),
    }
}

const F16: (DType, DType) = (DType::F16, DType::F16);

#[test]
fn the_rule_takes_decode_for_few_rows_and_the_larger_tile_for_many() {
    let small = "projection_f16_32x128";
    let large = "projection_f16_64x128";
    // Rows of x, rows of w, kernel, threadgroups.
    let cases = [
        (1, 1664, "projection_f16_decode1", 208),
        (2, 1664, "projection_f16_decode2", 208),
        (3, 1152, "projection_f16_decode4", 144),
        (5, 18_432, "projection_f16_decode8", 2304),
        (8, 1664, "projection_f16_decode8", 208),
        (9, 1664, small, 13),
        (256, 1152, small, 72),
        (767, 1664, small, 312),
        (768, 1664, large, 156),
        (2048, 1664, large, 416),
        (32, 16_384, small, 128),
        (33, 16_384, large, 128),
        (2048, 18_432, large, 4608),
    ];
    for (m, n, entry, threadgroups) in cases {
        let plan = plan(&geometry(m, n, 2560, F16), None).unwrap();
        let pass = &plan.passes[0];
        assert_eq!(
            (pass.entry, pass.threadgroups),
            (entry, [threadgroups, 1, 1]),
            "{m} x {n}"
        );
        assert_eq!(plan.outputs[0].elements, m * n);
    }
}

#[test]
fn every_tile_fits_threadgroup_memory_and_has_a_kernel_for_every_pair_of_types() {
    let mut entries = vec![];
    for pair in PAIRS {
        for tile in Tile::ALL {
            let plan = plan(&geometry(2048, 1664, 2560, pair), Some(tile)).unwrap();
            let pass = &plan.passes[0];
            assert!(pass.threadgroup_bytes <= 32_768, "{pair:?} {tile:?}");
            assert_eq!(pass.threadgroup_bytes % 16, 0, "{pair:?} {tile:?}");
            let size = format!("_{}x{}", tile.rows, tile.columns);
            assert!(pass.entry.ends_with(&size), "{tile:?}: {}", pass.entry);
            entries.push(pass.entry);
        }
    }
    entries.sort();
    entries.dedup();
    assert_eq!(entries.len(), PAIRS.len() * Tile::ALL.len());
}

#[test]
fn offsets_past_32_bits_reach_the_kernel_whole() {
    let mut g = geometry(3, 7, 50, F16);
    g.w.start = 5 << 32;
    g.x.row_stride = 3 << 33;
    for tile in [None, Some(Tile::ALL[0])] {
        let params = &plan(&g, tile).unwrap().passes[0].params;
        let wide = |at: usize| u64::from_ne_bytes(params[at..at + 8].try_into().unwrap());
        assert_eq!([0, 8, 16, 24].map(wide), [0, 3 << 33, 5 << 32, 50]);
    }
}

#[test]
fn what_has_no_kernel_and_what_does_not_fit_is_refused() {
    let refused = |g: &ProjectionGeometry, tile| refusal(plan(g, tile));
    let mixed = geometry(4, 4, 4, (DType::BF16, DType::F16));
    assert_eq!(
        refused(&mixed, None),
        "fused_projection: no kernel for xs of BF16 and a weight of F16, want xs in the dtype of the weight or in F32"
    );
    let odd = Tile {
        rows: 16,
        columns: 128,
        simd_groups: 2,
    };
    let error = refused(&geometry(4, 4, 4, F16), Some(odd));
    assert!(
        error.starts_with("fused_projection: no kernel for Tile { rows: 16, columns: 128, simd_groups: 2 }, want one of [Tile { rows: 32, columns: 64"),
        "{error}"
    );
    let too_long = 1 << 31;
    for (g, what) in [
        (geometry(4, 4, too_long, F16), "the hidden size"),
        (geometry(4, too_long, 4, F16), "weight rows"),
        (geometry(too_long, 4, 4, F16), "rows of xs"),
    ] {
        assert_eq!(
            refused(&g, None),
            format!("fused_projection: {what} is 2147483648, want less than 2^31 on a GPU")
        );
    }
    // 2^25 rows of tiles times 2^8 columns of them.
    let error = refused(&geometry(1 << 30, 1 << 14, 4, F16), Some(Tile::ALL[0]));
    assert_eq!(
        error,
        "fused_projection: the number of tiles is 8589934592, want less than 2^31 on a GPU"
    );
}
