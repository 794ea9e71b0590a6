//! Attention in plain candle ops, for any head_dim and device: what the fused ops are compared with.
//!
//! Query heads are grouped as rows against the KV head they share, so that keys and values are never repeated. The softmax
//! is taken in f32: in a half type candle sums in that type, which is wrong at long context (huggingface/candle#3727).

use crate::memory;
use candle::{bail, DType, Device, Result, Tensor, D};

/// Scores of one block of queries take at most this many elements, whatever the length of the prompt.
pub(crate) const BLOCK_SCORES: usize = 1 << 24;
/// Smaller blocks waste less on keys that the causal mask hides; larger ones no longer run faster.
const BLOCK_QUERIES: usize = 256;

/// Which keys each query may attend to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Visible {
    /// Every query attends to every key.
    All,
    /// A query at position p attends to the keys at positions `p + 1 - window ..= p`, or `..= p` without a window.
    Causal {
        /// Position of the first query row.
        first_query: usize,
        /// Position of the first key row.
        first_key: usize,
        /// How many tokens a query sees, itself included.
        window: Option<usize>,
    },
}

impl Visible {
    /// Key rows `lo..hi` that hold everything that query rows `start..start + len` may attend to.
    fn key_rows(self, start: usize, len: usize, kv_len: usize) -> (usize, usize) {
        match self {
            Self::All => (0, kv_len),
            Self::Causal {
                first_query,
                first_key,
                window,
            } => {
                let (first, last) = (first_query + start, first_query + start + len - 1);
                let lo = window
                    .map_or(0, |w| (first + 1).saturating_sub(w))
                    .saturating_sub(first_key);
                (
                    lo.min(kv_len),
                    (last + 1).saturating_sub(first_key).min(kv_len),
                )
            }
        }
    }

    /// 0 where query row `start + i` sees key row `lo + j`, else minus infinity; `None` if all of it is seen.
    fn mask(
        self,
        start: usize,
        len: usize,
        (lo, hi): (usize, usize),
        device: &Device,
    ) -> Result<Option<Tensor>> {
        let Self::Causal {
            first_query,
            first_key,
            window,
        } = self
        else {
            return Ok(None);
        };
        let mut mask = Vec::with_capacity(len * (hi - lo));
        for query in first_query + start..first_query + start + len {
            let oldest = window.map_or(0, |w| (query + 1).saturating_sub(w));
            let seen = |key| (oldest..=query).contains(&key);
            mask.extend((first_key + lo..first_key + hi).map(|key| {
                if seen(key) {
                    0f32
                } else {
                    f32::NEG_INFINITY
                }
            }));
        }
        if mask.iter().all(|&m| m == 0.0) {
            return Ok(None);
        }
        Tensor::from_vec(mask, (1, 1, 1, len, hi - lo), device).map(Some)
    }
}

/// `softmax(q k^T * softmax_scale) v` in plain candle ops.
///
/// # Arguments
///
/// * `q` - Queries `(batch, q_heads, q_len, head_dim)`.
/// * `k`, `v` - Keys and values `(batch, kv_heads, kv_len, head_dim)`, views of a cache as well; `q_heads` is a multiple of
///   `kv_heads` and query head `h` reads KV head `h / (q_heads / kv_heads)`. The same dtype as `q`.
/// * `visible` - Which keys each query may attend to; every query must see at least one.
///
/// Returns `(batch, q_heads, q_len, head_dim)` in the dtype of `q`. Scores are formed for a bounded block of queries at a
/// time, so memory grows linearly with the length.
///
/// # Errors
///
/// Shapes that do not fit each other, or a query that sees no key.
pub fn attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    visible: Visible,
) -> Result<Tensor> {
    let (batch, q_heads, q_len, head_dim) = q.dims4()?;
    let (_, kv_heads, kv_len, _) = k.dims4()?;
    if k.dims() != [batch, kv_heads, kv_len, head_dim] || v.dims() != k.dims() {
        bail!("reference attention: k is {:?} and v {:?}, want both ({batch}, kv_heads, kv_len, {head_dim}) to fit q {:?}", k.dims(), v.dims(), q.dims());
    }
    if kv_heads == 0 || !q_heads.is_multiple_of(kv_heads) {
        bail!("reference attention: q has {q_heads} heads and k {kv_heads}, want a multiple");
    }
    if batch == 0 || q_heads == 0 || head_dim == 0 {
        bail!(
            "reference attention: q is {:?}, want a batch, a head and a dimension at least",
            q.dims()
        );
    }
    if q_len == 0 || kv_len == 0 {
        bail!("reference attention: q has {q_len} rows and k {kv_len}, want at least one of each");
    }
    if let Visible::Causal {
        first_query,
        first_key,
        ..
    } = visible
    {
        for (name, first, len) in [("q", first_query, q_len), ("k", first_key, kv_len)] {
            if first.checked_add(len).is_none() {
                bail!("reference attention: {len} rows of {name} from position {first} on pass the 64-bit range");
            }
        }
    }
    check_memory(q, k)?;
    // Both ends of what a row sees move with the row, so the first and the last row stand for all.
    for row in [0, q_len - 1] {
        let (lo, hi) = visible.key_rows(row, 1, kv_len);
        if lo >= hi {
            bail!("reference attention: query row {row} sees none of the {kv_len} keys under {visible:?}");
        }
    }
    let (k, v) = (batched(k)?, batched(v)?);
    let block = block_queries(batch * q_heads, kv_len);
    let mut out = Vec::with_capacity(q_len.div_ceil(block));
    for start in (0..q_len).step_by(block) {
        let len = block.min(q_len - start);
        let (lo, hi) = visible.key_rows(start, len, kv_len);
        let mask = visible.mask(start, len, (lo, hi), q.device())?;
        let q = q.narrow(2, start, len)?.contiguous()?;
        let q = q.reshape((batch, kv_heads, q_heads / kv_heads * len, head_dim))?;
        let (k, v) = (k.narrow(2, lo, hi - lo)?, v.narrow(2, lo, hi - lo)?);
        let scores = q.matmul(&k.transpose(2, 3)?)?.to_dtype(DType::F32)?;
        // Gemma's scale is 1: a pass over all scores for nothing.
        let scores = if softmax_scale == 1.0 {
            scores
        } else {
            (scores * softmax_scale as f64)?
        };
        let scores = match mask {
            None => scores,
            Some(mask) => {
                let by_head =
                    scores.reshape((batch, kv_heads, q_heads / kv_heads, len, hi - lo))?;
                by_head.broadcast_add(&mask)?.reshape(scores.shape())?
            }
        };
        let probabilities = candle_nn::ops::softmax_last_dim(&scores)?.to_dtype(v.dtype())?;
        out.push(
            probabilities
                .matmul(&v)?
                .reshape((batch, q_heads, len, head_dim))?,
        );
    }
    match out.len() {
        1 => Ok(out.swap_remove(0)),
        _ => Tensor::cat(&out, D::Minus2),
    }
}

/// Views may repeat rows, and candle ends the process where their results or copies find no memory.
fn check_memory(q: &Tensor, k: &Tensor) -> Result<()> {
    const NAME: &str = "reference attention";
    for (name, t) in [("q", q), ("k", k)] {
        let what = format_args!("{name} of shape {:?}", t.dims());
        memory::check(NAME, what, t.dims(), t.dtype().size_in_bytes(), t.device())?;
    }
    let (batch, heads, q_len, _) = q.dims4()?;
    let kv_len = k.dims()[2];
    let rows = memory::addressable(
        NAME,
        "one score a query and key",
        &[batch, heads, kv_len],
        4,
    )?;
    let block = block_queries(rows / kv_len, kv_len).min(q_len);
    let what = format_args!("scores of {block} queries and {kv_len} keys");
    memory::check(NAME, what, &[rows, block], 4, q.device())
}

/// Queries whose scores are formed together, each a row of `kv_len` for every one of `heads`.
pub(crate) fn block_queries(heads: usize, kv_len: usize) -> usize {
    (BLOCK_SCORES / (heads * kv_len)).clamp(1, BLOCK_QUERIES)
}

/// `t` if a matrix product can step over its batch and heads as one dimension, as over any view of a cache; else a copy.
fn batched(t: &Tensor) -> Result<Tensor> {
    let (dims, stride) = (t.dims(), t.stride());
    match dims[0] == 1 || dims[1] == 1 || stride[0] == dims[1] * stride[1] {
        true => Ok(t.clone()),
        false => t.contiguous(),
    }
}
