//! The packed projections of a QSA layer.

use candle::{DType, Device, Result, Tensor};
use gem::qsa::QsaProjection;
use gem::FusedProjection;

use crate::projection_support::{bits, normal, refusal, relative_error, weight};

const NAMES: [&str; 4] = ["k", "v", "ik", "iq"];
const ROWS: [usize; 4] = [512, 512, 128, 512];
const HIDDEN: usize = 2560;

fn weights(dtype: DType) -> Result<Vec<Tensor>> {
    let weight = |(seed, rows)| weight(seed, rows, HIDDEN, dtype);
    (1..).zip(ROWS).map(weight).collect()
}

fn packed(w: &[Tensor]) -> Result<QsaProjection> {
    QsaProjection::new(&w[0], &w[1], &w[2], &w[3])
}

/// Every block, with and without iq, against the projection of that block alone.
fn blocks_have_the_bits_of_separate_projections(dtype: DType, row_counts: &[usize]) -> Result<()> {
    let weights = weights(dtype)?;
    let fused = packed(&weights)?;
    let most = row_counts.iter().copied().max().unwrap_or(0);
    let xs = normal(9, (most, HIDDEN), dtype)?;
    let alone: Vec<_> = weights
        .iter()
        .map(|w| FusedProjection::pack(&[("alone", w)]))
        .collect::<Result<_>>()?;
    for &m in row_counts {
        let xs = xs.narrow(0, 0, m)?;
        let (short, long) = (fused.project(&xs, false)?, fused.project(&xs, true)?);
        assert_eq!(short.packed().dims(), [m, 1152]);
        assert_eq!(long.packed().dims(), [m, 1664]);
        for (name, alone) in NAMES.into_iter().zip(&alone) {
            let want = bits(alone.forward(&xs)?.packed())?;
            assert!(
                bits(&long.get(name)?)? == want,
                "{name} of 1664, {m} rows, {dtype:?}"
            );
            if name != "iq" {
                assert!(
                    bits(&short.get(name)?)? == want,
                    "{name} of 1152, {m} rows, {dtype:?}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn every_block_has_the_bits_of_its_own_projection() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        blocks_have_the_bits_of_separate_projections(dtype, &[1, 2, 3, 5, 256])?;
    }
    Ok(())
}

/// `cargo test --release -- --ignored --exact qsa_projection::every_block_has_the_bits_of_its_own_projection_at_every_length`
#[test]
#[ignore = "takes about 20 s on two cores"]
fn every_block_has_the_bits_of_its_own_projection_at_every_length() -> Result<()> {
    let row_counts = [1, 2, 3, 5, 256, 512, 768, 1024, 1536, 1983, 2048];
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for threads in [1, 2, 7] {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .map_err(candle::Error::wrap)?;
            pool.install(|| blocks_have_the_bits_of_separate_projections(dtype, &row_counts))?;
        }
    }
    Ok(())
}

#[test]
fn values_are_those_of_the_product_in_f64() -> Result<()> {
    for dtype in [DType::F32, DType::F16] {
        let weights = weights(dtype)?;
        let xs = normal(9, (3, HIDDEN), dtype)?;
        let results = packed(&weights)?.project(&xs, true)?;
        for (name, w) in NAMES.into_iter().zip(&weights) {
            let error = relative_error(&results.get(name)?, &xs, w)?;
            assert!(error < 5e-7, "{name} {dtype:?}: {error:e}");
        }
    }
    Ok(())
}

/// Two buffers that happen to be neighbours would pass for one, so consumers are told the stride; with another one they read
/// something else.
#[test]
fn reading_fused_rows_at_the_stride_of_separate_ones_gives_other_values() -> Result<()> {
    let weights = weights(DType::F32)?;
    let results = packed(&weights)?.project(&normal(9, (2, HIDDEN), DType::F32)?, true)?;
    let buffer = results.packed().flatten_all()?;
    for (name, offset, rows) in [
        ("k", 0, 512),
        ("v", 512, 512),
        ("ik", 1024, 128),
        ("iq", 1152, 512),
    ] {
        let right = bits(&results.get(name)?)?;
        let at = |stride: usize| -> Result<Vec<u32>> {
            let row = |i| buffer.narrow(0, offset + i * stride, rows);
            bits(&Tensor::cat(&[row(0)?, row(1)?], 0)?)
        };
        assert_eq!(at(1664)?, right, "{name}");
        assert_ne!(at(rows)?, right, "{name}");
        assert_ne!(at(1152)?, right, "{name}");
    }
    Ok(())
}

#[test]
fn indexer_queries_come_once_the_selection_leaves_tokens_out() -> Result<()> {
    for (pos0, tokens, needed) in [
        (0, 1, false),
        (0, 2051, false),
        (0, 2052, true),
        (2050, 1, false),
        (2051, 1, true),
        (2048, 3, false),
        (2048, 4, true),
        (1 << 20, 1, true),
    ] {
        assert_eq!(
            QsaProjection::needs_query(pos0, tokens)?,
            needed,
            "{pos0} {tokens}"
        );
    }
    let projection = packed(&weights(DType::F16)?)?;
    let xs = normal(9, (1, 2, HIDDEN), DType::F16)?;
    for (pos0, columns) in [(2049, 1152), (2050, 1664)] {
        assert_eq!(
            projection.forward(&xs, pos0)?.packed().dims(),
            [1, 2, columns]
        );
    }
    insta::assert_snapshot!(refusal(projection.forward(&xs, usize::MAX)), @"qsa_projection: 2 tokens from position 18446744073709551615 on pass the 64-bit range");
    Ok(())
}

#[test]
fn the_short_product_is_over_the_first_rows_of_the_same_memory() -> Result<()> {
    let projection = packed(&weights(DType::F32)?)?;
    let (short, long) = (projection.packed(false), projection.packed(true));
    assert_eq!(short.names().collect::<Vec<_>>(), NAMES[..3]);
    assert_eq!(long.names().collect::<Vec<_>>(), NAMES);
    let address = |t: &Tensor| match &*t.storage_and_layout().0 {
        candle::Storage::Cpu(candle::CpuStorage::F32(values)) => values.as_ptr() as usize,
        _ => 0,
    };
    assert_ne!(address(long.weight()), 0);
    assert_eq!(address(short.weight()), address(long.weight()));
    assert_eq!(
        short.weight().layout().start_offset(),
        long.weight().layout().start_offset()
    );
    Ok(())
}

#[test]
fn weights_of_another_shape_and_xs_without_tokens_are_refused() -> Result<()> {
    let good = weights(DType::F32)?;
    let zeros = |shape| Tensor::zeros(shape, DType::F32, &Device::Cpu);
    let with = |i: usize, w: Tensor| {
        let mut weights = good.clone();
        weights[i] = w;
        refusal(packed(&weights))
    };
    insta::assert_snapshot!(with(0, zeros((511, HIDDEN))?), @"qsa_projection: wk has shape [511, 2560], want (512, 2560)");
    insta::assert_snapshot!(with(2, zeros((512, HIDDEN))?), @"qsa_projection: wik has shape [512, 2560], want (128, 2560)");
    insta::assert_snapshot!(with(3, zeros((512, 2048))?), @"qsa_projection: wiq has shape [512, 2048], want (512, 2560)");
    insta::assert_snapshot!(with(1, good[1].to_dtype(DType::F16)?), @r#"fused_projection: block "v" has dtype F16, want F32 as block "k""#);
    let projection = packed(&good)?;
    insta::assert_snapshot!(refusal(projection.forward(&Tensor::zeros(HIDDEN, DType::F32, &Device::Cpu)?, 0)), @"qsa_projection: xs has shape [2560], want (.., tokens, 2560)");
    insta::assert_snapshot!(refusal(projection.forward(&zeros((3, 2048))?, 0)), @"fused_projection: xs has shape [3, 2048], want (.., 2560)");
    Ok(())
}
