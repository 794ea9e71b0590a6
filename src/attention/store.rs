//! Between the f32 that all arithmetic is done in and the types that tensors are stored in.

use candle::CpuStorage;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// An element type that results can be written in.
pub(super) trait Stored: Copy + Default + Send + Sync + 'static {
    /// Writes what `fill` makes of an f32 buffer of the same length, rounded once, to nearest even. The buffer may hold
    /// anything before.
    fn fill(to: &mut [Self], fill: impl FnOnce(&mut [f32]));

    fn into_storage(values: Vec<Self>) -> CpuStorage;
}

impl Stored for f32 {
    fn fill(to: &mut [Self], fill: impl FnOnce(&mut [f32])) {
        fill(to);
    }

    fn into_storage(values: Vec<Self>) -> CpuStorage {
        CpuStorage::F32(values)
    }
}

impl Stored for f16 {
    fn fill(to: &mut [Self], fill: impl FnOnce(&mut [f32])) {
        let mut wide = vec![0f32; to.len()];
        fill(&mut wide);
        to.convert_from_f32_slice(&wide);
    }

    fn into_storage(values: Vec<Self>) -> CpuStorage {
        CpuStorage::F16(values)
    }
}

impl Stored for bf16 {
    fn fill(to: &mut [Self], fill: impl FnOnce(&mut [f32])) {
        let mut wide = vec![0f32; to.len()];
        fill(&mut wide);
        to.convert_from_f32_slice(&wide);
    }

    fn into_storage(values: Vec<Self>) -> CpuStorage {
        CpuStorage::BF16(values)
    }
}
