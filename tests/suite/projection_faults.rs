//! Faults that were reported against packed projections and row-by-row products.

use crate::projection_support::{bits, flat, kernels, normal, weight};
use candle::{DType, Device, Result, Tensor};
use gem::FusedProjection;

/// vllm-project/vllm#41253: offsets of a packed q, k and v in layers that have no v.
#[test]
fn layers_with_and_without_v_are_packed_by_their_own_offsets() -> Result<()> {
    let layers: [&[(&str, usize)]; 2] = [
        &[("q", 8 * 512), ("k", 2 * 512)],
        &[("q", 8 * 256), ("k", 4 * 256), ("v", 4 * 256)],
    ];
    for (blocks, rows) in layers.into_iter().zip([5120, 4096]) {
        for dtype in [DType::F32, DType::BF16] {
            let weights = blocks
                .iter()
                .map(|(_, rows)| weight(*rows as u64, *rows, 64, dtype))
                .collect::<Result<Vec<_>>>()?;
            let names = blocks.iter().map(|(name, _)| *name);
            let named: Vec<_> = names.clone().zip(&weights).collect();
            let fused = FusedProjection::pack(&named)?;
            for tokens in [1, 2, 7, 33, 129] {
                let xs = normal(tokens as u64, (tokens, 64), dtype)?;
                let results = fused.forward(&xs)?;
                assert_eq!(results.packed().dims(), [tokens, rows]);
                for (name, w) in names.clone().zip(&weights) {
                    let separate = flat(&xs.matmul(&w.t()?)?)?;
                    let largest = separate.iter().fold(0f32, |most, x| most.max(x.abs()));
                    // One step of bf16 at the size of the result, which the separate product is rounded to.
                    let step = 2f32.powi(largest.log2().floor() as i32 - 7);
                    let bound = if dtype == DType::F32 {
                        1e-5 * largest
                    } else {
                        step
                    };
                    let got = flat(&results.get(name)?.to_dtype(dtype)?)?;
                    assert_eq!(got.len(), separate.len());
                    for (i, (got, want)) in got.iter().zip(&separate).enumerate() {
                        assert!(
                            (got - want).abs() <= bound,
                            "{name} {dtype:?}, {tokens} tokens, element {i}: {got}, want {want}"
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

/// huggingface/candle#3856: all rows read weight row 0, and one row in eight was written at all.
#[test]
fn no_row_of_a_plain_weight_stands_for_another() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for n in [1usize, 24, 30] {
            let rows = Tensor::arange(1f32, (n + 1) as f32, &Device::Cpu)?;
            let w = rows.reshape((n, 1))?.broadcast_as((n, 64))?;
            let projection = FusedProjection::pack(&[("w", &w.contiguous()?.to_dtype(dtype)?)])?;
            for m in [1, 5] {
                let xs = Tensor::ones((m, 64), DType::F32, &Device::Cpu)?;
                for kernel in kernels() {
                    let out = projection.clone().cpu_kernel(kernel).forward(&xs)?;
                    let want = (rows.broadcast_as((m, n))? * 64.0)?;
                    assert_eq!(bits(out.packed())?, bits(&want)?, "{dtype:?} {n} {m}");
                }
            }
        }
    }
    Ok(())
}
