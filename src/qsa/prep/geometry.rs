//! What one call of the op is asked to do, as plain numbers.
//!
//! This is the only place that reads the layout or the dtype of an input and the only one that refuses a shape.
//! Executors of every device obey the result and hold no shape arithmetic beyond indexing.

use super::{QsaChunk, QsaInputs, QsaNorms, QsaState};
use candle::{bail, DType, Result, Shape, Tensor};

/// Query heads.
pub const HEADS: usize = 24;
/// KV heads.
pub const KV_HEADS: usize = 2;
/// Elements of a query, key or value head.
pub const HEAD_DIM: usize = 256;
/// Rows of `q_proj` that a query head has: its query, then its gate.
pub const Q_HEAD_ROWS: usize = 2 * HEAD_DIM;
/// Query heads of the indexer; it has one key head.
pub const INDEX_HEADS: usize = 4;
/// Elements of a head of the indexer.
pub const INDEX_DIM: usize = 128;
/// Dimensions of a head that turn, in pairs `(i, i + ROPE_DIM / 2)`.
pub const ROPE_DIM: usize = 64;
/// Tokens that share one pooled key.
pub const BLOCK: usize = 4;
/// Neighbouring dimensions that share one scale.
pub const GROUP: usize = 64;
/// Tokens that one call takes: more than a chunk has use for.
pub const MOST_TOKENS: usize = 1 << 20;

pub(super) const NAME: &str = "qsa_prep";

/// Where the rows of one input lie: the elements of a row are neighbours, rows are `row_stride` apart.
///
/// In elements. A stride of 0 (a broadcast dimension) is legal, since inputs are only read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RowsView {
    /// f32, or f16 for q.
    pub dtype: DType,
    /// Offset of the first element of row 0.
    pub start: u64,
    /// From one row to the next.
    pub row_stride: u64,
    /// One past the largest offset that any row touches: what the storage must hold.
    pub end: u64,
}

impl RowsView {
    fn new(name: &str, t: &Tensor, width: usize, dtypes: &[DType], tokens: usize) -> Result<Self> {
        let (layout, dtype) = (t.layout(), t.dtype());
        if !dtypes.contains(&dtype) {
            let want = dtypes.iter().map(|dtype| dtype.as_str());
            let want = want.collect::<Vec<_>>().join(" or ");
            bail!("{NAME}: {name} has dtype {dtype:?}, want {want}");
        }
        if layout.dims() != [tokens, width] {
            bail!(
                "{NAME}: {name} has shape {:?}, want [{tokens}, {width}] for the {tokens} tokens of the chunk",
                layout.dims()
            );
        }
        let strides = layout.stride();
        if strides[1] != 1 {
            bail!("{NAME}: the last dimension of {name} must be contiguous, want stride 1, got strides {strides:?}");
        }
        let (start, row_stride) = (layout.start_offset() as u64, strides[0] as u64);
        let end = row_stride
            .checked_mul(tokens as u64 - 1)
            .and_then(|last| last.checked_add(start)?.checked_add(width as u64))
            .filter(|end| end.checked_mul(4).is_some());
        match end {
            Some(end) => Ok(Self {
                dtype,
                start,
                row_stride,
                end,
            }),
            None => {
                bail!("{NAME}: {name} with strides {strides:?} passes the 64-bit address range")
            }
        }
    }
}

/// The checked problem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrepGeometry {
    /// Tokens of the chunk, at least 1 and at most [`MOST_TOKENS`].
    pub tokens: usize,
    /// Tokens of the unfinished block before the chunk: `pos0 % 4`.
    pub phase: usize,
    /// Whether the chunk holds position 0, from which the dead row comes.
    pub starts: bool,
    /// The query rows, f32 or f16.
    pub q: RowsView,
    /// The key rows.
    pub k: RowsView,
    /// The value rows.
    pub v: RowsView,
    /// The indexer's key rows.
    pub ik: RowsView,
    /// The indexer's query rows, where they are needed.
    pub iq: Option<RowsView>,
}

impl PrepGeometry {
    /// Checks everything that a call is given.
    ///
    /// # Errors
    ///
    /// Names the tensor, what it got and what it wants: see [`qsa_prep`](super::qsa_prep).
    pub fn new(
        inputs: &QsaInputs,
        norms: &QsaNorms,
        chunk: &QsaChunk,
        state: &QsaState,
    ) -> Result<Self> {
        let tokens = chunk.tokens();
        let rows = |name, t, width| RowsView::new(name, t, width, &[DType::F32], tokens);
        let q_width = HEADS * Q_HEAD_ROWS;
        let geometry = Self {
            tokens,
            phase: chunk.pos0() % BLOCK,
            starts: chunk.pos0() == 0,
            q: RowsView::new("q", inputs.q, q_width, &[DType::F32, DType::F16], tokens)?,
            k: rows("k", inputs.k, KV_HEADS * HEAD_DIM)?,
            v: rows("v", inputs.v, KV_HEADS * HEAD_DIM)?,
            ik: rows("ik", inputs.ik, INDEX_DIM)?,
            iq: match inputs.iq {
                Some(iq) => Some(rows("iq", iq, INDEX_HEADS * INDEX_DIM)?),
                None => None,
            },
        };
        if state.pos() != chunk.pos0() {
            bail!(
                "{NAME}: the state was left at position {}, the chunk begins at {}, want the same",
                state.pos(),
                chunk.pos0()
            );
        }
        let given = [
            ("k", inputs.k),
            ("v", inputs.v),
            ("ik", inputs.ik),
            ("norms", norms.packed()),
            ("chunk", chunk.angles()),
            ("state", state.packed()),
        ];
        let iq = inputs.iq.map(|iq| ("iq", iq));
        for (name, t) in given.into_iter().chain(iq) {
            if !t.device().same_device(inputs.q.device()) {
                bail!(
                    "{NAME}: all inputs must be on one device, got q on {:?} and {name} on {:?}",
                    inputs.q.device().location(),
                    t.device().location()
                );
            }
            refuse_tracked(name, t)?;
        }
        refuse_tracked("q", inputs.q)?;
        Ok(geometry)
    }

    /// Blocks that are complete after the chunk and were not before.
    pub fn blocks(&self) -> usize {
        (self.phase + self.tokens) / BLOCK
    }

    /// What comes out, in the order of every executor: qcur, kq, ksc, vq, vsc, pooled, state, and qidx where there is an iq.
    pub fn outputs(&self) -> Vec<(DType, Shape)> {
        let t = self.tokens;
        let codes = || (DType::U8, Shape::from((t, KV_HEADS, HEAD_DIM)));
        let scales = || (DType::F16, Shape::from((t, KV_HEADS, HEAD_DIM / GROUP)));
        let mut outputs = vec![
            (self.q.dtype, Shape::from((t, HEADS, HEAD_DIM))),
            codes(),
            scales(),
            codes(),
            scales(),
            (DType::F32, Shape::from((self.blocks() + 1, INDEX_DIM))),
            (DType::F32, Shape::from((BLOCK, INDEX_DIM))),
        ];
        if self.iq.is_some() {
            outputs.push((DType::F32, Shape::from((t, INDEX_HEADS, INDEX_DIM))));
        }
        outputs
    }
}

/// Results are made outside of candle's graph, so a gradient would get lost without a word.
pub(super) fn refuse_tracked(name: &str, t: &Tensor) -> Result<()> {
    if t.track_op() {
        bail!(
            "{NAME}: {name} is tracked for a gradient, there is no backward pass, want it detached"
        );
    }
    Ok(())
}
