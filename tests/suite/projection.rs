//! The fused projection against f64, and what its bits may not depend on.

use candle::{DType, Device, Result, Tensor, Var};
use gem::projection::CpuKernel;
use gem::FusedProjection;
use proptest::prelude::*;

use crate::projection_support::{bits, flat, kernels, normal, refusal, relative_error, weight};

/// Of 2,560 products added in 16 or 8 chains.
const ERROR: f64 = 5e-7;

const PAIRS: [(DType, DType); 5] = [
    (DType::F32, DType::F32),
    (DType::F32, DType::F16),
    (DType::F32, DType::BF16),
    (DType::F16, DType::F16),
    (DType::BF16, DType::BF16),
];

/// f64 shares no order of summation with the op, and no rounding.
#[test]
fn every_kernel_type_and_row_count_equals_the_product_in_f64() -> Result<()> {
    for (x_dtype, w_dtype) in PAIRS {
        for hidden in [1, 15, 32, 33, 511, 512, 544, 1000, 1500] {
            let w = weight(1, 29, hidden, w_dtype)?;
            let projection = FusedProjection::pack(&[("w", &w)])?;
            for m in [1, 2, 3, 4, 5, 6, 7, 8, 9, 23] {
                let xs = normal(m as u64, (m, hidden), x_dtype)?;
                for kernel in kernels() {
                    let y = projection.clone().cpu_kernel(kernel).forward(&xs)?;
                    assert_eq!(y.packed().dtype(), DType::F32);
                    let error = relative_error(y.packed(), &xs, &w)?;
                    assert!(
                        error < ERROR,
                        "{m} x {hidden}, {x_dtype:?} {w_dtype:?} {kernel:?}: {error:e}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// Rounding to f16 anywhere on the way would show.
#[test]
fn f16_gives_the_bits_of_the_same_values_in_f32() -> Result<()> {
    let (w, xs) = (
        weight(1, 50, 777, DType::F16)?,
        normal(2, (19, 777), DType::F16)?,
    );
    let half = FusedProjection::pack(&[("w", &w)])?;
    let full = FusedProjection::pack(&[("w", &w.to_dtype(DType::F32)?)])?;
    for kernel in kernels() {
        let of = |projection: &FusedProjection, dtype| {
            let projection = projection.clone().cpu_kernel(kernel);
            bits(projection.forward(&xs.to_dtype(dtype)?)?.packed())
        };
        let want = of(&full, DType::F32)?;
        assert_eq!(of(&half, DType::F16)?, want, "{kernel:?}");
        assert_eq!(of(&half, DType::F32)?, want, "{kernel:?}, xs in f32");
    }
    Ok(())
}

/// Blocks of one row and of odd sizes, at row counts around every tile: each has the bits that it has on its own, and each row
/// those that it has alone.
#[test]
fn neither_other_blocks_nor_other_rows_change_a_bit() -> Result<()> {
    let names = ["a", "b", "c", "d", "e"];
    for (x_dtype, w_dtype) in PAIRS {
        for hidden in [70, 1100] {
            let blocks = [1, 3, 130, 8, 2].map(|rows| weight(rows as u64, rows, hidden, w_dtype));
            let blocks = blocks.into_iter().collect::<Result<Vec<_>>>()?;
            let named: Vec<_> = names.into_iter().zip(&blocks).collect();
            let fused = FusedProjection::pack(&named)?;
            let all = normal(7, (67, hidden), x_dtype)?;
            for kernel in kernels() {
                let on = |projection: &FusedProjection| projection.clone().cpu_kernel(kernel);
                let whole = on(&fused).forward(&all)?;
                for (name, block) in &named {
                    let alone = on(&FusedProjection::pack(&[("alone", block)])?);
                    let want = bits(&whole.get(name)?)?;
                    assert_eq!(
                        bits(alone.forward(&all)?.packed())?,
                        want,
                        "{name} {kernel:?}"
                    );
                }
                for m in [1, 2, 3, 4, 5, 6, 7, 8, 9, 31] {
                    for first in [0, 36] {
                        let rows = on(&fused).forward(&all.narrow(0, first, m)?)?;
                        assert_eq!(
                            bits(rows.packed())?,
                            bits(&whole.packed().narrow(0, first, m)?)?,
                            "rows {first} to {}, {kernel:?} {w_dtype:?}",
                            first + m
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn thread_counts_do_not_change_a_bit() -> Result<()> {
    for (dtype, m) in [(DType::F32, 1), (DType::F16, 9), (DType::BF16, 300)] {
        let w = weight(1, 500, 600, dtype)?;
        let xs = normal(2, (m, 600), dtype)?;
        let projection = FusedProjection::pack(&[("w", &w)])?;
        let want = bits(projection.forward(&xs)?.packed())?;
        for threads in [1, 2, 7] {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .map_err(candle::Error::wrap)?;
            let got = pool.install(|| bits(projection.forward(&xs)?.packed()))?;
            assert!(got == want, "{m} rows, {threads} threads");
        }
    }
    Ok(())
}

#[test]
fn results_are_views_of_one_buffer_by_name_and_in_order() -> Result<()> {
    let (q, k) = (weight(1, 6, 32, DType::F32)?, weight(2, 4, 32, DType::F32)?);
    let projection = FusedProjection::pack(&[("q", &q), ("k", &k)])?;
    assert_eq!(projection.names().collect::<Vec<_>>(), ["q", "k"]);
    assert_eq!(flat(&projection.block("k")?)?, flat(&k)?);
    assert!(projection.block("k")?.is_contiguous());
    let results = projection.forward(&normal(3, (2, 5, 32), DType::F32)?)?;
    assert_eq!(results.packed().dims(), [2, 5, 10]);
    let k = results.get("k")?;
    assert_eq!((k.dims(), k.stride()), (&[2, 5, 4][..], &[50, 10, 1][..]));
    assert_eq!(k.layout().start_offset(), 6);
    let (names, views): (Vec<_>, Vec<_>) = results
        .iter()
        .collect::<Result<Vec<_>>>()?
        .into_iter()
        .unzip();
    assert_eq!(names, ["q", "k"]);
    assert_eq!(bits(&Tensor::cat(&views, 2)?)?, bits(results.packed())?);
    // Any number of leading dimensions, none too.
    assert_eq!(
        projection
            .forward(&normal(3, 32, DType::F32)?)?
            .packed()
            .dims(),
        [10]
    );
    Ok(())
}

#[test]
fn the_first_blocks_alone_are_the_same_memory_and_the_same_bits() -> Result<()> {
    let blocks = [3, 5, 7].map(|rows| weight(rows as u64, rows, 40, DType::BF16));
    let [a, b, c] = blocks;
    let all = FusedProjection::pack(&[("a", &a?), ("b", &b?), ("c", &c?)])?;
    let two = all.first(2)?;
    let address = |t: &Tensor| match &*t.storage_and_layout().0 {
        candle::Storage::Cpu(candle::CpuStorage::BF16(values)) => values.as_ptr() as usize,
        _ => 0,
    };
    assert_ne!(address(all.weight()), 0);
    assert_eq!(address(two.weight()), address(all.weight()));
    assert_eq!(two.weight().dims(), [8, 40]);
    let xs = normal(1, (9, 40), DType::BF16)?;
    let (want, got) = (all.forward(&xs)?, two.forward(&xs)?);
    assert_eq!(got.packed().dims(), [9, 8]);
    for name in ["a", "b"] {
        assert_eq!(bits(&got.get(name)?)?, bits(&want.get(name)?)?);
    }
    insta::assert_snapshot!(refusal(got.get("c")), @r#"fused_projection: there is no block "c", want one of ["a", "b"]"#);
    Ok(())
}

/// A NaN belongs to its row and its column, at the end of a tile and where rows are filled up with zeros as well.
#[test]
fn what_is_not_finite_stays_in_its_row_and_column() -> Result<()> {
    let (m, n, hidden) = (11, 10, 37);
    for (x_dtype, w_dtype) in PAIRS {
        for (row, column, at) in [(0, 9, 36), (10, 0, 0), (7, 4, 20)] {
            let poisoned = |t: Tensor, i: usize| -> Result<Tensor> {
                let (dtype, shape) = (t.dtype(), t.dims().to_vec());
                let mut values = flat(&t)?;
                values[i] = f32::NAN;
                Tensor::from_vec(values, shape, &Device::Cpu)?.to_dtype(dtype)
            };
            let xs = poisoned(normal(1, (m, hidden), x_dtype)?, row * hidden + at)?;
            let w = poisoned(weight(2, n, hidden, w_dtype)?, column * hidden + at)?;
            for kernel in kernels() {
                let projection = FusedProjection::pack(&[("w", &w)])?.cpu_kernel(kernel);
                let y = flat(projection.forward(&xs)?.packed())?;
                for (i, y) in y.iter().enumerate() {
                    let poisoned = i / n == row || i % n == column;
                    assert_eq!(
                        y.is_nan(),
                        poisoned,
                        "element {i} {x_dtype:?} {w_dtype:?} {kernel:?}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// The copy in the packed weight would have no gradient either.
#[test]
fn training_through_it_fails_loudly() -> Result<()> {
    let w = weight(1, 4, 8, DType::F32)?;
    let xs = Var::from_tensor(&normal(2, (3, 8), DType::F32)?)?;
    let y = FusedProjection::pack(&[("w", &w)])?.forward(&xs)?;
    let error = refusal(y.get("w")?.sum_all()?.backward());
    assert!(error.contains("backward is not supported"), "{error}");
    let trained = Var::from_tensor(&w)?;
    insta::assert_snapshot!(refusal(FusedProjection::pack(&[("w", &trained)])), @r#"fused_projection: block "w" is being trained, there is no backward pass, want it detached"#);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_shape_stride_and_type_equals_the_product_in_f64(
        (batch, tokens, hidden) in (1usize..4, 1usize..12, 1usize..700),
        rows in proptest::collection::vec(1usize..40, 1..4),
        (before, after) in (0usize..9, 0usize..9),
        pair in 0usize..PAIRS.len(),
        kernel in 0usize..CpuKernel::ALL.len(),
    ) {
        let (x_dtype, w_dtype) = PAIRS[pair];
        // A view of something larger, NaN where the view does not reach.
        let xs = normal(1, (batch, tokens, hidden), x_dtype).unwrap();
        let nan = |n| Tensor::full(f32::NAN, (batch, tokens, n), &Device::Cpu).unwrap().to_dtype(x_dtype).unwrap();
        let wide = Tensor::cat(&[&nan(before), &xs, &nan(after)], 2).unwrap();
        let view = wide.narrow(2, before, hidden).unwrap();
        let blocks: Vec<_> = rows
            .iter()
            .enumerate()
            .map(|(i, rows)| (format!("{i}"), weight(i as u64, *rows, hidden, w_dtype).unwrap()))
            .collect();
        let named: Vec<_> = blocks.iter().map(|(name, w)| (name.as_str(), w)).collect();
        let kernel = CpuKernel::ALL[kernel];
        let kernel = if kernel.is_available() { kernel } else { CpuKernel::best() };
        let projection = FusedProjection::pack(&named).unwrap().cpu_kernel(kernel);
        let got = projection.forward(&view).unwrap();
        for (name, w) in named {
            let error = relative_error(&got.get(name).unwrap(), &xs, w).unwrap();
            prop_assert!(error < ERROR, "{:e}", error);
        }
        prop_assert_eq!(bits(got.packed()).unwrap(), bits(projection.forward(&xs).unwrap().packed()).unwrap());
    }
}
