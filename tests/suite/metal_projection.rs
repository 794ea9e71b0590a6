//! The Metal kernels of the fused projection, from their text, on the plans that Metal would be given.

use crate::attention_support::{bits, flat, normal};
use crate::metal_support::run;
use candle::{DType, Device, Tensor};
use gem::backend::plan::Plan;
use gem::projection::gpu::{plan, Tile};
use gem::projection::ProjectionGeometry;
use msl::{Mode, Stats};

/// Dtypes of x and w that have kernels.
pub const PAIRS: [(DType, DType); 5] = [
    (DType::F32, DType::F32),
    (DType::F16, DType::F16),
    (DType::BF16, DType::BF16),
    (DType::F32, DType::F16),
    (DType::F32, DType::BF16),
];

/// Rows of QSA's k, v, ik and iq in the packed weight: where each begins, how many.
const BLOCKS: [(usize, usize); 4] = [(0, 512), (512, 512), (1024, 128), (1152, 512)];

/// x `(m, k)` and w `(n, k)`.
pub fn operands((m, n, k): (usize, usize, usize), (x, w): (DType, DType)) -> [Tensor; 2] {
    [normal(1, (m, k), x).unwrap(), normal(2, (n, k), w).unwrap()]
}

pub fn plan_for(x: &Tensor, w: &Tensor, tile: Option<Tile>) -> Plan {
    let geometry = ProjectionGeometry::new("fused_projection", x, w).unwrap();
    plan(&geometry, tile).unwrap()
}

/// y `(m, n)`, and what the kernel did.
pub fn project_counted(x: &Tensor, w: &Tensor, tile: Option<Tile>, mode: Mode) -> (Tensor, Stats) {
    let (mut outputs, mut stats) = run(&plan_for(x, w, tile), &[x, w], mode).unwrap();
    let y = outputs.remove(0);
    let shape = (y.elem_count() / w.dim(0).unwrap(), w.dim(0).unwrap());
    (y.reshape(shape).unwrap(), stats.remove(0))
}

fn project(x: &Tensor, w: &Tensor, tile: Option<Tile>, mode: Mode) -> Tensor {
    project_counted(x, w, tile, mode).0
}

/// Every tile, and what the rule takes.
fn all_tiles() -> impl Iterator<Item = Option<Tile>> {
    Tile::ALL.map(Some).into_iter().chain([None])
}

/// The largest error against f64, over what k roundings of the sum of the absolute products can come to.
pub fn error_over_bound(y: &Tensor, x: &Tensor, w: &Tensor) -> f64 {
    let rows = |t: &Tensor| -> Vec<Vec<f64>> { t.to_dtype(DType::F64).unwrap().to_vec2().unwrap() };
    let (y, x, w) = (rows(y), rows(x), rows(w));
    let rounding = (x[0].len() as f64 + 1.0) * f64::powi(2.0, -24);
    let mut worst = 0f64;
    for (y, x) in y.iter().zip(&x) {
        for (y, w) in y.iter().zip(&w) {
            let products = || x.iter().zip(w).map(|(x, w)| x * w);
            let bound = rounding * products().map(f64::abs).sum::<f64>();
            let over = (y - products().sum::<f64>()).abs() / bound;
            // A NaN must not hide in a maximum.
            worst = if over > worst || over.is_nan() {
                over
            } else {
                worst
            };
        }
    }
    worst
}

fn assert_fused_equals_separate(m: usize, k: usize, dtype: DType, tile: Option<Tile>) {
    let [x, w] = operands((m, 1664, k), (dtype, dtype));
    // Weights and results of their own, as a caller without the op would have them.
    let separate = BLOCKS.map(|(first, rows)| {
        let block = w.narrow(0, first, rows).unwrap().copy().unwrap();
        bits(&project(&x, &block, tile, Mode::Fast)).unwrap()
    });
    for columns in [1152, 1664] {
        let fused = project(&x, &w.narrow(0, 0, columns).unwrap(), tile, Mode::Fast);
        for ((first, rows), separate) in BLOCKS.iter().zip(&separate) {
            if first + rows <= columns {
                let view = fused.narrow(1, *first, *rows).unwrap();
                assert!(
                    bits(&view).unwrap() == *separate,
                    "{m} x {columns} x {k}, {dtype:?}, {tile:?}: columns from {first} on"
                );
            }
        }
        // What a reader with the stride of a separate k would see.
        let unstrided = bits(&fused.flatten_all().unwrap().narrow(0, 0, m * 512).unwrap()).unwrap();
        assert_eq!(unstrided == separate[0], m == 1);
    }
}

#[test]
fn every_view_of_a_fused_call_is_the_call_of_its_block_alone_bit_for_bit() {
    for m in [1, 2, 3, 5] {
        for tile in all_tiles() {
            assert_fused_equals_separate(m, 40, DType::F16, tile);
        }
    }
    for tile in all_tiles() {
        assert_fused_equals_separate(67, 40, DType::F32, tile);
    }
}

/// The rows of the contract at 2560 columns of x. All: `cargo test --release --test suite -- --ignored --nocapture
/// at_full_size`; one: `at_full_size::rows_256::f16`. docs/qsa.md says how long they take.
mod at_full_size {
    use super::{assert_fused_equals_separate, DType, Tile};

    fn every_tile(m: usize, dtype: DType) {
        // What the rule takes for more than 8 rows is one of them.
        let decode = [None].into_iter().filter(|_| m <= 8);
        for tile in Tile::ALL.map(Some).into_iter().chain(decode) {
            assert_fused_equals_separate(m, 2560, dtype, tile);
        }
        println!("{m} rows, {dtype:?}: every view equals the call of its block alone");
    }

    macro_rules! rows {
        ($($name:ident: $m:literal,)*) => {$(
            mod $name {
                #[test]
                #[ignore = "takes minutes"]
                fn f16() {
                    super::every_tile($m, super::DType::F16);
                }

                #[test]
                #[ignore = "takes minutes"]
                fn f32() {
                    super::every_tile($m, super::DType::F32);
                }
            }
        )*};
    }

    rows! {
        rows_1: 1,
        rows_2: 2,
        rows_3: 3,
        rows_5: 5,
        rows_256: 256,
        rows_512: 512,
        rows_768: 768,
        rows_1024: 1024,
        rows_1536: 1536,
        rows_1983: 1983,
        rows_2048: 2048,
    }
}

/// Tails of m, n and k against each tile and each step, and none.
const SHAPES: [(usize, usize, usize); 7] = [
    (1, 1, 1),
    (7, 9, 3),
    (31, 33, 15),
    (33, 129, 40),
    (64, 128, 64),
    (65, 70, 77),
    (130, 65, 33),
];

#[test]
fn every_tile_is_right_and_gives_the_same_bits_at_every_tail() {
    for pair in PAIRS {
        for shape in SHAPES {
            // Which memory is touched depends on the shape and the size of the elements.
            let checked = pair == (DType::F32, DType::F32) || pair == (DType::F32, DType::F16);
            let mode = if checked { Mode::Checked } else { Mode::Fast };
            let [x, w] = operands(shape, pair);
            let first = project(&x, &w, Some(Tile::ALL[0]), mode);
            let over = error_over_bound(&first, &x, &w);
            assert!(over <= 1.0, "{pair:?} {shape:?}: {over} of the bound");
            let want = bits(&first).unwrap();
            for tile in &Tile::ALL[1..] {
                let got = bits(&project(&x, &w, Some(*tile), mode)).unwrap();
                assert!(got == want, "{pair:?} {shape:?} {tile:?}");
            }
        }
    }
}

#[test]
fn bands_of_tiles_cover_the_result_once_whatever_the_last_band_holds() {
    // Rows of tiles: 10, 9, 5, 3 in bands of 8; checked mode finds elements that no tile or two tiles write.
    for m in [300, 257] {
        let [x, w] = operands((m, 130, 4), (DType::F32, DType::F32));
        for tile in Tile::ALL {
            let y = project(&x, &w, Some(tile), Mode::Checked);
            let over = error_over_bound(&y, &x, &w);
            assert!(over <= 1.0, "{m} rows, {tile:?}: {over} of the bound");
        }
    }
}

#[test]
fn a_decoded_element_has_the_same_bits_in_whatever_company() {
    for pair in PAIRS {
        let k = 333;
        let [x, w] = operands((8, 13, k), pair);
        let alone: Vec<Vec<u32>> = (0..8)
            .map(|row| {
                let row = x.narrow(0, row, 1).unwrap();
                bits(&project(&row, &w, None, Mode::Checked)).unwrap()
            })
            .collect();
        for m in 1..=8 {
            let some = x.narrow(0, 0, m).unwrap();
            let y = project(&some, &w, None, Mode::Checked);
            let over = error_over_bound(&y, &some, &w);
            assert!(over <= 1.0, "{pair:?}, {m} rows: {over} of the bound");
            assert_eq!(bits(&y).unwrap(), alone[..m].concat(), "{pair:?}, {m} rows");
        }
        for (first, columns) in [(0, 1), (1, 4), (3, 8), (12, 1), (5, 7)] {
            let block = w.narrow(0, first, columns).unwrap();
            let got = project(&x, &block, None, Mode::Checked);
            let want: Vec<u32> = alone
                .iter()
                .flat_map(|row| row[first..first + columns].to_vec())
                .collect();
            assert_eq!(
                bits(&got).unwrap(),
                want,
                "{pair:?}: columns from {first} on"
            );
        }
    }
}

#[test]
fn strides_and_offsets_change_no_bit_and_nan_around_a_view_never_arrives() {
    // A view of rows k apart by an odd stride, from an odd element on, in memory that is NaN elsewhere.
    let in_nan = |t: &Tensor| {
        let (rows, k) = t.dims2().unwrap();
        let memory = Tensor::full(f32::NAN, (rows + 2, k + 3), &Device::Cpu)
            .and_then(|nan| nan.to_dtype(t.dtype()))
            .unwrap();
        let memory = memory.slice_assign(&[1..rows + 1, 1..k + 1], t).unwrap();
        memory.narrow(0, 1, rows).unwrap().narrow(1, 1, k).unwrap()
    };
    for pair in PAIRS {
        for shape in [(5, 13, 131), (33, 70, 43)] {
            let [x, w] = operands(shape, pair);
            let (x_view, w_view) = (in_nan(&x), in_nan(&w));
            let tiles = [Some(Tile::ALL[0]), Some(Tile::ALL[3]), None];
            for tile in tiles {
                let want = bits(&project(&x, &w, tile, Mode::Checked)).unwrap();
                let got = bits(&project(&x_view, &w_view, tile, Mode::Checked)).unwrap();
                assert!(got == want, "{pair:?} {shape:?} {tile:?}");
            }
        }
    }
}

#[test]
fn rows_of_a_broadcast_x_are_all_alike() {
    let [x, w] = operands((1, 20, 50), (DType::F16, DType::F16));
    for (m, tile) in [(6, None), (40, Some(Tile::ALL[0]))] {
        let row = bits(&project(&x, &w, tile, Mode::Checked)).unwrap();
        let rows = x.broadcast_as((m, 50)).unwrap();
        let got = bits(&project(&rows, &w, tile, Mode::Checked)).unwrap();
        assert!(got == row.repeat(m), "{m} rows, {tile:?}");
    }
}

/// To widen is exact, the products are exact in f32 and summed there, so the types that hold the operands change nothing.
#[test]
fn half_operands_give_the_bits_of_the_same_values_in_f32() {
    for pair in PAIRS {
        for (m, tile) in [(5, None), (35, Some(Tile::ALL[3]))] {
            let [x, w] = operands((m, 70, 77), pair);
            let wide = |t: &Tensor| t.to_dtype(DType::F32).unwrap();
            let got = bits(&project(&x, &w, tile, Mode::Fast)).unwrap();
            let want = bits(&project(&wide(&x), &wide(&w), tile, Mode::Fast)).unwrap();
            assert!(got == want, "{pair:?}, {m} rows");
        }
    }
}

#[test]
fn a_nan_stays_in_its_row_and_its_column() {
    for (m, tile) in [(5, None), (40, Some(Tile::ALL[0]))] {
        let [x, w] = operands((m, 20, 50), (DType::F32, DType::F32));
        let want = project(&x, &w, tile, Mode::Fast);
        let poisoned = |t: &Tensor, row: usize| {
            let nan = Tensor::full(f32::NAN, (1, 1), &Device::Cpu).unwrap();
            t.slice_assign(&[row..row + 1, 49..50], &nan).unwrap()
        };
        let got = project(&poisoned(&x, 2), &poisoned(&w, 11), tile, Mode::Fast);
        let pairs = flat(&got).unwrap().into_iter().zip(flat(&want).unwrap());
        for (i, (got, want)) in pairs.enumerate() {
            if i / 20 == 2 || i % 20 == 11 {
                assert!(got.is_nan(), "{m} rows: element {i}");
            } else {
                assert_eq!(got.to_bits(), want.to_bits(), "{m} rows: element {i}");
            }
        }
    }
}
