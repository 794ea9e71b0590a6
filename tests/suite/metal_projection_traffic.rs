//! How many bytes each route of the projection moves, counted by the harness, not asserted from the design.

use crate::metal_projection::{operands, project_counted};
use candle::DType;
use gem::projection::gpu::Tile;
use msl::{Flow, Mode};

const F16: (DType, DType) = (DType::F16, DType::F16);

struct Moved {
    x: Flow,
    w: Flow,
    written: Flow,
    threadgroup: u64,
}

fn moved(shape: (usize, usize, usize), pair: (DType, DType), tile: Option<Tile>) -> Moved {
    let [x, w] = operands(shape, pair);
    let (_, stats) = project_counted(&x, &w, tile, Mode::Checked);
    let memory = stats.memory.unwrap();
    let threadgroup = memory.threadgroup;
    Moved {
        x: memory.device[&0].read,
        w: memory.device[&1].read,
        written: memory.device[&2].written,
        threadgroup: threadgroup.read.bytes + threadgroup.written.bytes,
    }
}

fn bytes(rows: usize, columns: usize, dtype: DType) -> u64 {
    (rows * columns * dtype.size_in_bytes()) as u64
}

#[test]
fn decode_reads_the_weight_exactly_once_for_any_number_of_rows() {
    for pair in [F16, (DType::F32, DType::F32), (DType::F32, DType::BF16)] {
        // Whole blocks of columns and steps of k, and neither.
        for (n, k) in [(64, 640), (29, 333)] {
            for m in 1..=8 {
                let moved = moved((m, n, k), pair, None);
                let once = bytes(n, k, pair.1);
                assert_eq!(
                    (moved.w.bytes, moved.w.unique_bytes),
                    (once, once),
                    "{pair:?}, {m} x {n} x {k}"
                );
                let result = bytes(m, n, DType::F32);
                assert_eq!(
                    (moved.written.bytes, moved.written.unique_bytes),
                    (result, result)
                );
                assert_eq!(moved.threadgroup, 0);
            }
        }
    }
}

#[test]
fn a_tile_reads_w_once_a_row_of_tiles_and_x_once_a_column_of_tiles() {
    let (m, n, k) = (150, 200, 70);
    for tile in Tile::ALL {
        let moved = moved((m, n, k), F16, Some(tile));
        let (down, across) = (
            m.div_ceil(tile.rows as usize) as u64,
            n.div_ceil(tile.columns as usize) as u64,
        );
        assert_eq!(
            (moved.w.bytes, moved.w.unique_bytes),
            (down * bytes(n, k, DType::F16), bytes(n, k, DType::F16)),
            "{tile:?}"
        );
        assert_eq!(
            (moved.x.bytes, moved.x.unique_bytes),
            (across * bytes(m, k, DType::F16), bytes(m, k, DType::F16)),
            "{tile:?}"
        );
        assert_eq!(moved.written.bytes, bytes(m, n, DType::F32), "{tile:?}");
    }
}

/// The table of docs/qsa.md: `cargo test --release --test suite -- --ignored --nocapture metal_projection_traffic::table`
#[test]
#[ignore = "prints a table, takes minutes"]
fn table_at_1664_columns_in_f16() {
    println!("| rows | route | w issued, over once | x issued, over once | device MB | threadgroup MB |\n|---:|---|---:|---:|---:|---:|");
    for m in [1, 8, 256] {
        let tiles = Tile::ALL.map(Some).into_iter();
        let decode = [None].into_iter().filter(|_| m <= 8);
        for tile in decode.chain(tiles) {
            let moved = moved((m, 1664, 2560), F16, tile);
            let over = |flow: Flow| flow.bytes as f64 / flow.unique_bytes as f64;
            let route = tile.map_or("decode".to_string(), |t| {
                format!("{} x {} x {}", t.rows, t.columns, t.simd_groups)
            });
            println!(
                "| {m} | {route} | {:.3} | {:.3} | {:.1} | {:.1} |",
                over(moved.w),
                over(moved.x),
                (moved.x.bytes + moved.w.bytes + moved.written.bytes) as f64 / 1e6,
                moved.threadgroup as f64 / 1e6
            );
        }
    }
}
