//! The rows of K, V or q of one head, where they lie.

use candle::{bail, CpuStorage, Result};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::attention::geometry::{RowView, HEAD_DIM};

#[derive(Clone, Copy)]
pub(super) enum Elements<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

impl<'a> Elements<'a> {
    /// The storage behind `view`, once it is known to hold every row of it.
    pub fn new(name: &str, storage: &'a CpuStorage, view: &RowView) -> Result<Self> {
        let (elements, len) = match storage {
            CpuStorage::F32(s) => (Self::F32(s), s.len()),
            CpuStorage::F16(s) => (Self::F16(s), s.len()),
            CpuStorage::BF16(s) => (Self::BF16(s), s.len()),
            _ => bail!(
                "attention_d512: {name} is stored as another type than its dtype {:?}",
                view.dtype
            ),
        };
        if view.end > len as u64 {
            bail!(
                "attention_d512: the storage of {name} holds {len} elements, its layout reaches to {}",
                view.end
            );
        }
        Ok(elements)
    }

    pub fn is_f32(self) -> bool {
        matches!(self, Self::F32(_))
    }

    /// `len` rows from element `start` on, `stride` elements apart.
    pub fn rows(self, start: u64, stride: u64, len: usize) -> Rows<'a> {
        Rows {
            elements: self,
            start: start as usize,
            stride: stride as usize,
            len,
        }
    }
}

#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    elements: Elements<'a>,
    start: usize,
    stride: usize,
    len: usize,
}

impl<'a> Rows<'a> {
    /// `len` contiguous f32 rows.
    pub fn contiguous(rows: &'a [f32]) -> Self {
        let len = rows.len() / HEAD_DIM;
        Elements::F32(rows).rows(0, HEAD_DIM as u64, len)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Rows `first..first + len`, clipped to what there is.
    pub fn slice(self, first: usize, len: usize) -> Self {
        let first = first.min(self.len);
        Self {
            start: self.start + first * self.stride,
            len: len.min(self.len - first),
            ..self
        }
    }

    pub fn is_f32(&self) -> bool {
        self.elements.is_f32()
    }

    pub fn elements(&self) -> Elements<'a> {
        self.elements
    }

    /// The address of row 0 in `all`, which are the elements behind these rows, and the distance between rows: checked
    /// once here, so that kernels need no check per row.
    #[inline(always)]
    pub fn span<E>(&self, all: &[E]) -> (*const E, usize) {
        if self.len == 0 {
            return (all.as_ptr(), 0);
        }
        let end = self.start + (self.len - 1) * self.stride + HEAD_DIM;
        (all[self.start..end].as_ptr(), self.stride)
    }

    /// Copies the first row as f32.
    pub fn widen(&self, to: &mut [f32]) {
        let row = self.start..self.start + HEAD_DIM;
        match self.elements {
            Elements::F32(all) => to.copy_from_slice(&all[row]),
            Elements::F16(all) => all[row].convert_to_f32_slice(to),
            Elements::BF16(all) => all[row].convert_to_f32_slice(to),
        }
    }

    /// Copies the first row if it is bf16.
    pub fn copy_halves(&self, to: &mut [bf16]) {
        if let Elements::BF16(all) = self.elements {
            to.copy_from_slice(&all[self.start..self.start + HEAD_DIM]);
        }
    }

    /// Where to prefetch from.
    pub fn addresses(&self) -> Addresses {
        let (base, size) = match self.elements {
            Elements::F32(all) => (all.as_ptr().cast::<u8>(), 4),
            Elements::F16(all) => (all.as_ptr().cast(), 2),
            Elements::BF16(all) => (all.as_ptr().cast(), 2),
        };
        Addresses {
            base: base.wrapping_add(self.start * size),
            stride: self.stride * size,
            size,
            last: self.len.saturating_sub(1),
        }
    }
}

/// Addresses to prefetch; never read through.
#[derive(Clone, Copy)]
pub(super) struct Addresses {
    base: *const u8,
    stride: usize,
    /// Bytes of an element.
    pub size: usize,
    last: usize,
}

impl Addresses {
    /// A row past the last is the last.
    #[inline(always)]
    pub fn row(&self, row: usize) -> *const u8 {
        self.base.wrapping_add(row.min(self.last) * self.stride)
    }
}
