//! Between the f32 that all arithmetic is done in and the types that tensors are stored in.

use candle::CpuStorage;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// An element type that results can be written in.
pub(super) trait Stored: Copy + Send + Sync + 'static {
    const ZERO: Self;

    /// Rounds once, to nearest even.
    fn store(from: &[f32], to: &mut [Self]);

    fn into_storage(values: Vec<Self>) -> CpuStorage;
}

impl Stored for f32 {
    const ZERO: Self = 0.0;

    fn store(from: &[f32], to: &mut [Self]) {
        to.copy_from_slice(from);
    }

    fn into_storage(values: Vec<Self>) -> CpuStorage {
        CpuStorage::F32(values)
    }
}

impl Stored for f16 {
    const ZERO: Self = f16::ZERO;

    fn store(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }

    fn into_storage(values: Vec<Self>) -> CpuStorage {
        CpuStorage::F16(values)
    }
}

impl Stored for bf16 {
    const ZERO: Self = bf16::ZERO;

    fn store(from: &[f32], to: &mut [Self]) {
        to.convert_from_f32_slice(from);
    }

    fn into_storage(values: Vec<Self>) -> CpuStorage {
        CpuStorage::BF16(values)
    }
}
