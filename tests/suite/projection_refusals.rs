//! What the fused projection refuses, and in which words.

use candle::{DType, Device, Result, Tensor};
use gem::projection::geometry::{MatrixView, ProjectionGeometry};
use gem::FusedProjection;

use crate::projection_support::refusal;

fn zeros(shape: impl Into<candle::Shape>) -> Result<Tensor> {
    Tensor::zeros(shape, DType::F32, &Device::Cpu)
}

#[test]
fn a_block_that_does_not_fit_is_named_with_what_it_should_be() -> Result<()> {
    let q = zeros((8, 32))?;
    let refused = |blocks: &[(&str, &Tensor)]| refusal(FusedProjection::pack(blocks));
    insta::assert_snapshot!(refused(&[]), @"fused_projection: got no blocks, want at least one");
    insta::assert_snapshot!(refused(&[("q", &q), ("", &q)]), @"fused_projection: block 1 has no name");
    insta::assert_snapshot!(refused(&[("q", &q), ("k", &q), ("q", &q)]), @r#"fused_projection: two blocks are named "q", want a name for each"#);
    insta::assert_snapshot!(refused(&[("q", &q), ("k", &zeros((4, 31))?)]), @r#"fused_projection: block "k" has shape [4, 31], want (rows, 32) as block "q""#);
    insta::assert_snapshot!(refused(&[("q", &zeros((1, 8, 32))?)]), @r#"fused_projection: block "q" has shape [1, 8, 32], want (rows, hidden)"#);
    insta::assert_snapshot!(refused(&[("q", &q), ("k", &zeros((0, 32))?)]), @r#"fused_projection: block "k" of shape [0, 32] is empty"#);
    insta::assert_snapshot!(refused(&[("q", &zeros((8, 0))?)]), @r#"fused_projection: block "q" of shape [8, 0] is empty"#);
    insta::assert_snapshot!(refused(&[("q", &q), ("k", &q.to_dtype(DType::F16)?)]), @r#"fused_projection: block "k" has dtype F16, want F32 as block "q""#);
    insta::assert_snapshot!(refused(&[("q", &q.to_dtype(DType::F64)?)]), @r#"fused_projection: block "q" has dtype F64, want f32, f16 or bf16"#);
    Ok(())
}

#[test]
fn xs_that_do_not_fit_are_refused_with_what_is_wanted() -> Result<()> {
    let projection = FusedProjection::pack(&[("q", &zeros((8, 32))?)])?;
    let refused = |xs: Tensor| {
        let error = refusal(projection.check(&xs));
        assert_eq!(refusal(projection.forward(&xs)), error);
        error
    };
    insta::assert_snapshot!(refused(zeros((1, 5, 31))?), @"fused_projection: xs has shape [1, 5, 31], want (.., 32)");
    insta::assert_snapshot!(refused(zeros(())?), @"fused_projection: xs is a scalar, want (.., 32)");
    insta::assert_snapshot!(refused(zeros((1, 0, 32))?), @"fused_projection: xs of shape [1, 0, 32] is empty");
    insta::assert_snapshot!(refused(zeros((5, 32))?.to_dtype(DType::BF16)?), @"fused_projection: xs has dtype BF16, want F32 as the weight");
    insta::assert_snapshot!(refused(zeros((5, 32))?.to_dtype(DType::U8)?), @"fused_projection: xs has dtype U8, want F32 as the weight");
    insta::assert_snapshot!(refused(zeros((32, 5))?.t()?), @"fused_projection: the last dimension of xs must be contiguous, want stride 1, got strides [1, 5] for shape [5, 32]");
    insta::assert_snapshot!(refused(zeros((5, 2, 32))?.transpose(0, 1)?), @"fused_projection: the rows of xs must come at one stride, got strides [32, 64, 1] for shape [2, 5, 32], want a contiguous copy");
    let far = zeros((1, 32))?.broadcast_as((1 << 40, 1 << 20, 32))?;
    insta::assert_snapshot!(refused(far), @"fused_projection: xs of shape [1099511627776, 1048576, 32] times 8 rows would take 36893488147419103232 bytes, which passes the 64-bit address range");
    let half = FusedProjection::pack(&[("q", &zeros((8, 32))?.to_dtype(DType::BF16)?)])?;
    insta::assert_snapshot!(refusal(half.check(&zeros((5, 32))?.to_dtype(DType::F16)?)), @"fused_projection: xs has dtype F16, want BF16 as the weight, or F32");
    Ok(())
}

#[test]
fn blocks_that_are_not_there_are_refused() -> Result<()> {
    let projection = FusedProjection::pack(&[("q", &zeros((8, 32))?), ("k", &zeros((2, 32))?)])?;
    insta::assert_snapshot!(refusal(projection.block("v")), @r#"fused_projection: there is no block "v", want one of ["q", "k"]"#);
    insta::assert_snapshot!(refusal(projection.first(0)), @"fused_projection: got a count of 0 blocks, want 1 to 2");
    insta::assert_snapshot!(refusal(projection.first(3)), @"fused_projection: got a count of 3 blocks, want 1 to 2");
    Ok(())
}

#[test]
fn check_returns_the_geometry_that_runs() -> Result<()> {
    let projection = FusedProjection::pack(&[("q", &zeros((8, 32))?), ("k", &zeros((2, 32))?)])?;
    let xs = zeros((2, 3, 48))?.narrow(2, 16, 32)?;
    let w = projection.weight().layout().start_offset() as u64;
    let view = |start, row_stride, end| MatrixView {
        dtype: DType::F32,
        start,
        row_stride,
        end,
    };
    let want = ProjectionGeometry {
        m: 6,
        k: 32,
        n: 10,
        x: view(16, 48, 5 * 48 + 48),
        w: view(w, 32, w + 320),
    };
    assert_eq!(projection.check(&xs)?, want);
    // One row of a broadcast tensor, many times.
    let repeated = zeros((1, 32))?.broadcast_as((4, 5, 32))?;
    let geometry = projection.check(&repeated)?;
    assert_eq!((geometry.m, geometry.x), (20, view(0, 0, 32)));
    Ok(())
}
