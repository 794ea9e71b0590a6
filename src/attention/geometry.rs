//! What one call of the op is asked to do, as plain numbers.
//!
//! This is the only place that reads a [`Layout`] or a [`DType`] of an attention input and the only one that refuses a
//! shape. Executors of every device obey the result and hold no shape arithmetic beyond indexing.

use candle::{bail, DType, Layout, Result, Tensor};

use crate::memory::addressable;

/// The head dimension that the op is written for.
pub const HEAD_DIM: usize = 512;

const Q_DIMS: &str = "(batch, q_heads, q_len, 512)";
const KV_DIMS: &str = "(batch, kv_heads, kv_len, 512)";

/// The element offset of `index` in a tensor that starts at `start`: `start + sum(index * stride)`, in elements.
///
/// `None` if it does not fit in 64 bits. Every backend takes its offsets from here or from [`RowView`], which has
/// checked the largest one.
pub fn element_offset(start: u64, strides: &[u64], index: &[u64]) -> Option<u64> {
    strides
        .iter()
        .zip(index)
        .try_fold(start, |offset, (stride, index)| {
            offset.checked_add(stride.checked_mul(*index)?)
        })
}

/// Where the rows of one input lie: a row is `HEAD_DIM` neighbouring elements, everything else is free.
///
/// All strides and offsets are in elements. A stride of 0 (a broadcast dimension) is legal, since inputs are only read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowView {
    /// f32, f16 or bf16.
    pub dtype: DType,
    /// Offset of the first element of row 0 of head 0 of batch 0.
    pub start: u64,
    /// From one batch row to the next.
    pub batch_stride: u64,
    /// From one head to the next.
    pub head_stride: u64,
    /// From one token to the next.
    pub row_stride: u64,
    /// One past the largest element offset that any row touches: what the storage must hold.
    pub end: u64,
}

impl RowView {
    fn new(op: &str, name: &str, dtype: DType, layout: &Layout) -> Result<Self> {
        if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
            bail!("{op}: {name} has dtype {dtype:?}, want f32, f16 or bf16");
        }
        let strides = layout.stride();
        if strides[3] != 1 {
            bail!(
                "{op}: the last dimension of {name} must be contiguous, want stride 1, got strides {strides:?} for shape {:?}",
                layout.dims()
            );
        }
        let wide: Vec<u64> = strides.iter().map(|s| *s as u64).collect();
        let last: Vec<u64> = layout.dims().iter().map(|d| *d as u64 - 1).collect();
        let start = layout.start_offset() as u64;
        let end = element_offset(start, &wide, &last)
            .and_then(|last| last.checked_add(1))
            .filter(|end| end.checked_mul(dtype.size_in_bytes() as u64).is_some());
        let Some(end) = end else {
            bail!(
                "{op}: {name} of shape {:?} with strides {strides:?} passes the 64-bit address range",
                layout.dims()
            );
        };
        Ok(Self {
            dtype,
            start,
            batch_stride: wide[0],
            head_stride: wide[1],
            row_stride: wide[2],
            end,
        })
    }

    /// Element offset of row 0 of `head` in `batch`. In range by construction for every head and batch of the geometry.
    pub fn head_start(&self, batch: usize, head: usize) -> u64 {
        self.start + batch as u64 * self.batch_stride + head as u64 * self.head_stride
    }
}

/// The checked problem: shapes, dtypes, strides.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AttentionGeometry {
    /// Sequences.
    pub batch: usize,
    /// Query heads.
    pub q_heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Query heads per KV head: query head `h` reads KV head `h / group`.
    pub group: usize,
    /// Query rows of a head.
    pub q_len: usize,
    /// Keys of a KV head.
    pub kv_len: usize,
    /// Whether query row `i` sees only keys `0..=kv_len - q_len + i` (lower-right causality) or all of them.
    pub causal: bool,
    /// The query rows.
    pub q: RowView,
    /// The key rows; where keys are rebuilt, the rows that they are rebuilt from.
    pub k: RowView,
    /// The value rows.
    pub v: RowView,
    /// Keys are rebuilt from values: `k` is `v`.
    pub shared_kv: bool,
}

impl AttentionGeometry {
    /// Checks three tensors; `op` prefixes the errors.
    pub fn new(op: &str, q: &Tensor, k: &Tensor, v: &Tensor, causal: bool) -> Result<Self> {
        for (name, t) in [("k", k), ("v", v)] {
            if !t.device().same_device(q.device()) {
                bail!(
                    "{op}: q, k and v must be on one device, got q on {:?} and {name} on {:?}",
                    q.device().location(),
                    t.device().location()
                );
            }
        }
        Self::from_layouts(
            op,
            (q.layout(), q.dtype()),
            (k.layout(), k.dtype()),
            (v.layout(), v.dtype()),
            causal,
        )
    }

    /// As [`AttentionGeometry::new`], from what an executor is handed.
    pub fn from_layouts(
        op: &str,
        (q, q_dtype): (&Layout, DType),
        (k, k_dtype): (&Layout, DType),
        (v, v_dtype): (&Layout, DType),
        causal: bool,
    ) -> Result<Self> {
        leading_dims(op, "q", q, Q_DIMS)?;
        leading_dims(op, "k", k, KV_DIMS)?;
        leading_dims(op, "v", v, KV_DIMS)?;
        if k.dims() != v.dims() {
            bail!(
                "{op}: k and v must have one shape, got k {:?} and v {:?}",
                k.dims(),
                v.dims()
            );
        }
        Self::of(op, (q, q_dtype), Some((k, k_dtype)), (v, v_dtype), causal)
    }

    /// Checks two tensors where keys are rebuilt from values; `op` prefixes the errors.
    pub fn new_shared_kv(op: &str, q: &Tensor, v: &Tensor, causal: bool) -> Result<Self> {
        if !v.device().same_device(q.device()) {
            bail!(
                "{op}: q and v must be on one device, got q on {:?} and v on {:?}",
                q.device().location(),
                v.device().location()
            );
        }
        Self::shared_kv_from_layouts(op, (q.layout(), q.dtype()), (v.layout(), v.dtype()), causal)
    }

    /// As [`AttentionGeometry::new_shared_kv`], from what an executor is handed.
    pub fn shared_kv_from_layouts(
        op: &str,
        q: (&Layout, DType),
        v: (&Layout, DType),
        causal: bool,
    ) -> Result<Self> {
        Self::of(op, q, None, v, causal)
    }

    /// `k` is as `v` in shape, if there is one.
    fn of(
        op: &str,
        (q, q_dtype): (&Layout, DType),
        k: Option<(&Layout, DType)>,
        (v, v_dtype): (&Layout, DType),
        causal: bool,
    ) -> Result<Self> {
        let [batch, q_heads, q_len] = leading_dims(op, "q", q, Q_DIMS)?;
        let [kv_batch, kv_heads, kv_len] = leading_dims(op, "v", v, KV_DIMS)?;
        let (kv, have, are) = match k {
            Some(_) => ("k and v", "have", "are"),
            None => ("v", "has", "is"),
        };
        if kv_batch != batch {
            bail!("{op}: q has batch {batch}, {kv} {have} batch {kv_batch}, want the same");
        }
        if batch == 0 || q_heads == 0 || q_len == 0 {
            bail!("{op}: q of shape {:?} is empty", q.dims());
        }
        if kv_heads == 0 || kv_len == 0 {
            bail!(
                "{op}: {kv} of shape {:?} {are} empty, want at least one key",
                v.dims()
            );
        }
        if q_heads % kv_heads != 0 {
            bail!("{op}: {q_heads} query heads cannot be shared out to {kv_heads} KV heads, want a multiple");
        }
        if causal && kv_len < q_len {
            bail!(
                "{op}: {q_len} causal query rows over {kv_len} keys leave the first {} without a key, want kv_len >= q_len",
                q_len - kv_len
            );
        }
        // Whatever counts rows or bytes from here on is a product of some of these.
        let result = format_args!("the f32 result for q of shape {:?}", q.dims());
        addressable(op, result, q.dims(), 4)?;
        let all = format_args!("{kv} of shape {:?} in f32", v.dims());
        addressable(op, all, v.dims(), if k.is_some() { 8 } else { 4 })?;
        Ok(Self {
            batch,
            q_heads,
            kv_heads,
            group: q_heads / kv_heads,
            q_len,
            kv_len,
            causal,
            q: RowView::new(op, "q", q_dtype, q)?,
            k: match k {
                Some((k, dtype)) => RowView::new(op, "k", dtype, k)?,
                None => RowView::new(op, "v", v_dtype, v)?,
            },
            v: RowView::new(op, "v", v_dtype, v)?,
            shared_kv: k.is_none(),
        })
    }

    /// How many keys, counted from the first, query row `row` sees.
    pub fn visible(&self, row: usize) -> usize {
        if self.causal {
            self.kv_len - self.q_len + row + 1
        } else {
            self.kv_len
        }
    }

    /// Query rows of one KV head: `group * q_len`, in whatever order an executor takes them.
    pub fn rows_per_kv_head(&self) -> usize {
        self.group * self.q_len
    }

    /// Bytes of K and V, or of V alone where keys are rebuilt, that one pass reads.
    pub fn kv_bytes(&self) -> u64 {
        let elements = (self.batch * self.kv_heads * self.kv_len * HEAD_DIM) as u64;
        let k = match self.shared_kv {
            true => 0,
            false => self.k.dtype.size_in_bytes(),
        };
        elements * (k + self.v.dtype.size_in_bytes()) as u64
    }
}

fn leading_dims(op: &str, name: &str, layout: &Layout, want: &str) -> Result<[usize; 3]> {
    match *layout.dims() {
        [batch, heads, rows, HEAD_DIM] => Ok([batch, heads, rows]),
        ref dims => bail!("{op}: {name} has shape {dims:?}, want {want}"),
    }
}
