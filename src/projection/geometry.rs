//! What one call of the projection is asked to do, as plain numbers.
//!
//! This is the only place that reads a [`Layout`] or a [`DType`] of a projection input and the only one that refuses a
//! shape. Executors of every device obey the result and hold no shape arithmetic beyond indexing.

use candle::{bail, DType, Layout, Result, Shape, Tensor};

use crate::memory::addressable;

/// Where the rows of a matrix lie: a row is neighbouring elements, rows are one stride apart.
///
/// In elements. A row stride of 0 (a broadcast dimension) is legal, since inputs are only read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MatrixView {
    /// f32, f16 or bf16.
    pub dtype: DType,
    /// Offset of the first element of row 0.
    pub start: u64,
    /// From one row to the next.
    pub row_stride: u64,
    /// One past the largest element offset that any row touches: what the storage must hold.
    pub end: u64,
}

impl MatrixView {
    /// All dimensions but the last are rows, which must come at one stride.
    fn new(op: &str, name: &str, dtype: DType, layout: &Layout) -> Result<Self> {
        let (dims, strides) = (layout.dims(), layout.stride());
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            bail!("{op}: {name} has dtype {dtype:?}, want f32, f16 or bf16");
        }
        let columns = dims.len() - 1;
        // A single column has no neighbour to be away from.
        if strides[columns] != 1 && dims[columns] > 1 {
            bail!("{op}: the last dimension of {name} must be contiguous, want stride 1, got strides {strides:?} for shape {dims:?}");
        }
        let Some(row_stride) = row_stride(&dims[..columns], &strides[..columns]) else {
            bail!("{op}: the rows of {name} must come at one stride, got strides {strides:?} for shape {dims:?}, want a contiguous copy");
        };
        let rows: u64 = dims[..columns].iter().map(|d| *d as u64).product();
        let start = layout.start_offset() as u64;
        let end = (rows - 1)
            .checked_mul(row_stride)
            .and_then(|last| last.checked_add(start)?.checked_add(dims[columns] as u64))
            .filter(|end| end.checked_mul(dtype.size_in_bytes() as u64).is_some());
        let Some(end) = end else {
            bail!("{op}: {name} of shape {dims:?} with strides {strides:?} passes the 64-bit address range");
        };
        Ok(Self {
            dtype,
            start,
            row_stride,
            end,
        })
    }

    /// Element offset of `row`. In range by construction for every row of the geometry.
    pub fn row_start(&self, row: usize) -> u64 {
        self.start + row as u64 * self.row_stride
    }
}

/// The stride at which the rows of several leading dimensions follow each other, if there is one; 0 for a single row.
fn row_stride(dims: &[usize], strides: &[usize]) -> Option<u64> {
    // Innermost first, without the dimensions that are never stepped over.
    let mut steps = dims
        .iter()
        .zip(strides)
        .rev()
        .filter(|(dim, _)| **dim != 1)
        .map(|(dim, stride)| (*dim as u64, *stride as u64));
    let Some((mut rows, stride)) = steps.next() else {
        return Some(0);
    };
    for (dim, outer) in steps {
        if rows.checked_mul(stride) != Some(outer) {
            return None;
        }
        rows *= dim;
    }
    Some(stride)
}

/// The checked problem `y = x w^T`, with y `(m, n)` in f32, contiguous.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProjectionGeometry {
    /// Rows of x and y.
    pub m: usize,
    /// Columns of x and w: what is summed over.
    pub k: usize,
    /// Rows of w, columns of y.
    pub n: usize,
    /// `(m, k)`, in the dtype of w or in f32.
    pub x: MatrixView,
    /// `(n, k)`.
    pub w: MatrixView,
}

impl ProjectionGeometry {
    /// Checks xs `(.., hidden)` and a weight `(rows, hidden)`; `op` prefixes the errors.
    pub fn new(op: &str, xs: &Tensor, w: &Tensor) -> Result<Self> {
        if !xs.device().same_device(w.device()) {
            bail!(
                "{op}: xs and the weight must be on one device, got xs on {:?} and the weight on {:?}",
                xs.device().location(),
                w.device().location()
            );
        }
        Self::from_layouts(op, (xs.layout(), xs.dtype()), (w.layout(), w.dtype()))
    }

    /// As [`ProjectionGeometry::new`], from what an executor is handed.
    pub fn from_layouts(
        op: &str,
        (xs, xs_dtype): (&Layout, DType),
        (w, w_dtype): (&Layout, DType),
    ) -> Result<Self> {
        let [n, k] = *w.dims() else {
            bail!(
                "{op}: the weight has shape {:?}, want (rows, hidden)",
                w.dims()
            );
        };
        if n == 0 || k == 0 {
            bail!("{op}: the weight of shape {:?} is empty", w.dims());
        }
        let Some((columns, rows)) = xs.dims().split_last() else {
            bail!("{op}: xs is a scalar, want (.., {k})");
        };
        if *columns != k {
            bail!("{op}: xs has shape {:?}, want (.., {k})", xs.dims());
        }
        let what = format_args!("xs of shape {:?} times {n} rows", xs.dims());
        let dims = [rows, &[n]].concat();
        let m = addressable(op, what, &dims, 4)? / n;
        if m == 0 {
            bail!("{op}: xs of shape {:?} is empty", xs.dims());
        }
        let w = MatrixView::new(op, "the weight", w_dtype, w)?;
        if xs_dtype != w_dtype && xs_dtype != DType::F32 {
            let or_f32 = if w_dtype == DType::F32 {
                ""
            } else {
                ", or F32"
            };
            bail!("{op}: xs has dtype {xs_dtype:?}, want {w_dtype:?} as the weight{or_f32}");
        }
        let x = MatrixView::new(op, "xs", xs_dtype, xs)?;
        Ok(Self { m, k, n, x, w })
    }

    /// `(.., rows)` for xs `(.., hidden)`.
    pub fn result_shape(&self, xs: &Layout) -> Shape {
        let rows = xs.dims().split_last().map_or(&[][..], |(_, rows)| rows);
        Shape::from([rows, &[self.n]].concat())
    }
}

/// Checks what is to be packed: the rows of each block, and the hidden size.
pub(super) fn check_blocks(op: &str, blocks: &[(&str, &Tensor)]) -> Result<(Vec<usize>, usize)> {
    let Some((like_name, like)) = blocks.first() else {
        bail!("{op}: got no blocks, want at least one");
    };
    let mut rows = Vec::with_capacity(blocks.len());
    let mut hidden = 0;
    for (i, (name, block)) in blocks.iter().enumerate() {
        if name.is_empty() {
            bail!("{op}: block {i} has no name");
        }
        if blocks[..i].iter().any(|(other, _)| other == name) {
            bail!("{op}: two blocks are named {name:?}, want a name for each");
        }
        let shape = block.dims();
        let [n, k] = *shape else {
            bail!("{op}: block {name:?} has shape {shape:?}, want (rows, hidden)");
        };
        if n == 0 || k == 0 {
            bail!("{op}: block {name:?} of shape {shape:?} is empty");
        }
        if i == 0 {
            hidden = k;
        }
        if k != hidden {
            bail!("{op}: block {name:?} has shape {shape:?}, want (rows, {hidden}) as block {like_name:?}");
        }
        rows.push(n);
        let dtype = block.dtype();
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            bail!("{op}: block {name:?} has dtype {dtype:?}, want f32, f16 or bf16");
        }
        if dtype != like.dtype() {
            bail!(
                "{op}: block {name:?} has dtype {dtype:?}, want {:?} as block {like_name:?}",
                like.dtype()
            );
        }
        if !block.device().same_device(like.device()) {
            bail!(
                "{op}: block {name:?} is on {:?}, want {:?} as block {like_name:?}",
                block.device().location(),
                like.device().location()
            );
        }
        // A copy has no gradient, and nobody would notice.
        if block.track_op() {
            bail!("{op}: block {name:?} is being trained, there is no backward pass, want it detached");
        }
    }
    Ok((rows, hidden))
}

#[cfg(test)]
mod tests {
    use super::row_stride;

    #[test]
    fn leading_dimensions_fold_into_rows_only_where_they_come_at_one_stride() {
        assert_eq!(row_stride(&[], &[]), Some(0));
        assert_eq!(row_stride(&[1, 1], &[7, 9]), Some(0));
        assert_eq!(row_stride(&[2, 3], &[24, 8]), Some(8));
        assert_eq!(row_stride(&[2, 1, 3], &[24, 5, 8]), Some(8));
        assert_eq!(row_stride(&[2, 3], &[0, 0]), Some(0));
        assert_eq!(row_stride(&[2, 3], &[32, 8]), None);
        assert_eq!(row_stride(&[2, 3], &[8, 16]), None);
        assert_eq!(row_stride(&[2, usize::MAX], &[1, usize::MAX]), None);
    }
}
