use crate::any_tensor::{any_tensor, assert_named, is_zero, laid, FLOATS};
use crate::projection_support::{kernels, normal, relative_error, weight};
use arbitrary::{Result, Unstructured};
use candle::{DType, Tensor};
use gem::FusedProjection;

/// Of what the absolute values of the addends come to; f32 sums of up to 80 of them.
const BOUND: f64 = 2e-6;
const NAMES: [&str; 3] = ["a", "b", "c"];

/// All inputs are 0, and so are their products.
pub fn any(u: &mut Unstructured) -> Result<()> {
    let widths = [3, 3, 3, 1, 64, 0];
    let xs = any_tensor(u, &widths)?;
    let count = u.int_in_range(0..=3)?;
    let weights: Vec<Tensor> = (0..count)
        .map(|_| any_tensor(u, &widths))
        .collect::<Result<_>>()?;
    let blocks: Vec<_> = NAMES.into_iter().zip(&weights).collect();
    let projection = match FusedProjection::pack(&blocks) {
        Ok(projection) => projection,
        Err(e) => {
            assert_named(e, &["fused_projection"]);
            return Ok(());
        }
    };
    let checked = projection.check(&xs).is_ok();
    let results = projection.forward(&xs);
    assert_eq!(checked, results.is_ok());
    match results {
        Ok(results) => {
            for (block, weight) in results.iter().zip(&weights) {
                let (name, block) = block.unwrap();
                assert_eq!(block.dims().last(), Some(&weight.dims()[0]), "{name}");
            }
            assert!(is_zero(results.packed()));
        }
        Err(e) => assert_named(e, &["fused_projection"]),
    }
    Ok(())
}

pub fn defined(u: &mut Unstructured) -> Result<()> {
    let (rows, hidden) = (u.int_in_range(1..=20)?, u.int_in_range(1..=80)?);
    let (seed, dtype) = (u64::from(u.arbitrary::<u8>()?), *u.choose(&FLOATS)?);
    let count = u.int_in_range(1..=3)?;
    let mut weights = vec![];
    for i in 0..count {
        let block = weight(seed + i, u.int_in_range(1..=40)?, hidden, dtype);
        weights.push(laid(u, block.unwrap())?);
    }
    let blocks: Vec<_> = NAMES.into_iter().zip(&weights).collect();
    let xs_dtype = if u.arbitrary()? { dtype } else { DType::F32 };
    let xs = laid(u, normal(seed + 9, (rows, hidden), xs_dtype).unwrap())?;
    let kernels: Vec<_> = kernels().collect();
    let projection = FusedProjection::pack(&blocks).unwrap();
    let projection = projection.cpu_kernel(*u.choose(&kernels)?);
    let results = projection.forward(&xs).unwrap();
    for (name, weight) in blocks {
        let error = relative_error(&results.get(name).unwrap(), &xs, weight).unwrap();
        assert!(error < BOUND, "{name}: {error:e}");
    }
    Ok(())
}
