//! Memory that starts on a cache line.

use std::fmt::Display;

use candle::{CpuStorage, DType, Device, Result, Shape, Storage, Tensor};

use crate::memory;

/// f32 values that start on a cache line.
pub(crate) struct Lines {
    values: Vec<f32>,
    start: usize,
    len: usize,
}

impl Lines {
    /// For what a shape can't make large; else [`Lines::try_zeros`].
    pub fn zeros(len: usize) -> Self {
        Self::of(vec![0f32; len + 15], len)
    }

    pub fn try_zeros(op: &str, what: impl Display, len: usize) -> Result<Self> {
        Ok(Self::of(memory::zeros(op, what, len + 15)?, len))
    }

    fn of(values: Vec<f32>, len: usize) -> Self {
        let start = values.as_ptr().align_offset(64).min(15);
        Self { values, start, len }
    }
}

impl std::ops::Deref for Lines {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        &self.values[self.start..self.start + self.len]
    }
}

impl std::ops::DerefMut for Lines {
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values[self.start..self.start + self.len]
    }
}

/// Zeros that start on a cache line. candle's own allocations start 16 bytes into one, so that each vector load on the CPU
/// touches two: costly for f32 rows of a cache (docs/performance.md) and of a packed weight (docs/qsa.md).
///
/// # Errors
///
/// No memory for so many; `op` and `what` are those of the message.
pub(crate) fn zeros_on_a_line(
    op: &str,
    what: impl Display,
    shape: impl Into<Shape>,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    const LINE: usize = 64;
    let shape = shape.into();
    memory::check(op, what, shape.dims(), dtype.size_in_bytes(), device)?;
    if !device.is_cpu() {
        return Tensor::zeros(shape, dtype, device);
    }
    let elements = shape.elem_count();
    let slack = LINE / dtype.size_in_bytes() - 1;
    let buffer = Tensor::zeros(elements + slack, dtype, device)?;
    let skip = match &*buffer.storage_and_layout().0 {
        Storage::Cpu(CpuStorage::F32(values)) => values.as_ptr().align_offset(LINE).min(slack),
        Storage::Cpu(CpuStorage::F16(values)) => values.as_ptr().align_offset(LINE).min(slack),
        Storage::Cpu(CpuStorage::BF16(values)) => values.as_ptr().align_offset(LINE).min(slack),
        _ => 0,
    };
    buffer.narrow(0, skip, elements)?.reshape(shape)
}
