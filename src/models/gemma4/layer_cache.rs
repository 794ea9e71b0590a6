//! Key and value caches: a growing one for full layers, a ring of exactly the window for sliding layers.
//!
//! A layer cache answers [`LayerCache::append`] with everything that the appended tokens may attend to, so that feeding a
//! prompt whole, in chunks of any size or token by token gives the same attention. Memory is allocated as tokens arrive,
//! never for the longest context up front.

use super::config::{LayerConfig, LayerKind};
use crate::attention::reference::Visible;
use crate::cpu::lines::zeros_on_a_line;
use crate::memory;
use candle::{bail, DType, Result, Tensor};

/// Buffers grow to a multiple of so many rows.
const GROWTH_ROWS: usize = 256;

/// What the tokens just appended may attend to: views of the cache, good until the next append.
#[derive(Debug, Clone)]
pub struct KvView {
    /// Keys `(batch, kv_heads, rows, head_dim)`.
    pub k: Tensor,
    /// Values, shaped like the keys.
    pub v: Tensor,
    /// Which rows each of the tokens may attend to.
    pub visible: Visible,
}

/// The cache of one layer.
#[derive(Debug)]
pub struct LayerCache {
    kind: LayerKind,
    values_only: bool,
    /// Tokens fed so far; the position of the next one.
    len: usize,
    /// Oldest position still held.
    oldest: usize,
    /// Rows that the first allocation should already have room for.
    reserve: usize,
    rows: Option<Rows>,
}

impl LayerCache {
    /// An empty cache for a layer of this kind.
    pub fn new(kind: LayerKind) -> Self {
        Self {
            kind,
            values_only: false,
            len: 0,
            oldest: 0,
            reserve: 0,
            rows: None,
        }
    }

    /// An empty cache for a full layer whose keys are rebuilt from its values: half of the bytes.
    pub fn values_only() -> Self {
        Self {
            values_only: true,
            ..Self::new(LayerKind::Full)
        }
    }

    /// What the layer may look at.
    pub fn kind(&self) -> LayerKind {
        self.kind
    }

    /// Tokens fed so far.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Oldest position that is still held.
    pub fn oldest(&self) -> usize {
        self.oldest
    }

    /// Whether it holds no keys.
    pub fn holds_values_only(&self) -> bool {
        self.values_only
    }

    /// Bytes allocated for keys and values.
    pub fn bytes(&self) -> usize {
        self.rows.as_ref().map_or(0, Rows::bytes)
    }

    /// Makes the next allocation large enough for a context of `len` tokens, or of 2^24 if that is less.
    pub fn reserve(&mut self, len: usize) {
        self.reserve = len.min(1 << 24);
    }

    /// Stores `k` and `v`, both `(batch, kv_heads, tokens, head_dim)`, and returns what these tokens may attend to.
    ///
    /// # Errors
    ///
    /// Shapes or dtypes that differ from each other or from what the cache holds, a cache of values alone, or no memory for the
    /// rows and those that were [`reserve`](Self::reserve)d; nothing is stored then.
    pub fn append(&mut self, k: &Tensor, v: &Tensor) -> Result<KvView> {
        if self.values_only {
            bail!("kv cache: it holds values alone, got keys too");
        }
        let tokens = k.dims4()?.2;
        if v.dims() != k.dims() || v.dtype() != k.dtype() {
            bail!(
                "kv cache: v is {:?} {:?}, want {:?} {:?} as k",
                v.dims(),
                v.dtype(),
                k.dims(),
                k.dtype()
            );
        }
        if self.kind == (LayerKind::Sliding { window: 0 }) {
            bail!("kv cache: the window is 0, want at least the token itself");
        }
        if tokens == 0 {
            bail!("kv cache: k is {:?}, want at least one token", k.dims());
        }
        if let Some(rows) = &self.rows {
            rows.check("k", k)?;
        }
        check_copies(k, 2)?;
        let view = match self.kind {
            LayerKind::Full => self.append_full(k, v, tokens)?,
            LayerKind::Sliding { window } => self.append_ring(k, v, tokens, window)?,
        };
        self.len += tokens;
        Ok(view)
    }

    /// As [`Self::append`] for a cache of values alone: stores `v`, returns the values of every token so far.
    pub fn append_values(&mut self, v: &Tensor) -> Result<Tensor> {
        if !self.values_only {
            bail!("kv cache: it holds keys and values, got values alone");
        }
        let tokens = v.dims4()?.2;
        if tokens == 0 {
            bail!("kv cache: v is {:?}, want at least one token", v.dims());
        }
        if let Some(rows) = &self.rows {
            rows.check("v", v)?;
        }
        check_copies(v, 1)?;
        let end = self.len + tokens;
        let rows = self.rows_for(v, end, usize::MAX)?;
        rows.v.slice_set(&v.contiguous()?, 2, self.len)?;
        self.len = end;
        rows.v.narrow(2, 0, end)
    }

    fn append_full(&mut self, k: &Tensor, v: &Tensor, tokens: usize) -> Result<KvView> {
        let (at, end) = (self.len, self.len + tokens);
        let rows = self.rows_for(k, end, usize::MAX)?;
        rows.write(at, k, v)?;
        rows.view(0, end, visible(at, tokens, 0, None))
    }

    /// Position p lives in slot `p % window`.
    fn append_ring(
        &mut self,
        k: &Tensor,
        v: &Tensor,
        tokens: usize,
        window: usize,
    ) -> Result<KvView> {
        let (at, end) = (self.len, self.len + tokens);
        if end <= window {
            let rows = self.rows_for(k, end, window)?;
            rows.write(at, k, v)?;
            return rows.view(0, end, visible(at, tokens, 0, Some(window)));
        }
        // What the first of these tokens sees; going back is refused unless all of it is held.
        let oldest = (at + 1).saturating_sub(window);
        let kept = at - oldest;
        let rows = self.rows_for(k, window, window)?;
        if tokens == 1 {
            rows.write(at % window, k, v)?;
            self.oldest = end - window;
            return rows.view(0, window, Visible::All);
        }
        // Later tokens of the chunk overwrite slots that earlier ones still need, so attention gets a copy.
        let (mut ks, mut vs) = (Vec::with_capacity(3), Vec::with_capacity(3));
        for (slot, count) in ring_runs(oldest, kept, window) {
            let run = rows.view(slot, count, Visible::All)?;
            ks.push(run.k);
            vs.push(run.v);
        }
        ks.push(k.clone());
        vs.push(v.clone());
        let view = KvView {
            k: Tensor::cat(&ks, 2)?,
            v: Tensor::cat(&vs, 2)?,
            visible: visible(at, tokens, oldest, Some(window)),
        };
        let stored = tokens.min(window);
        let mut from = tokens - stored;
        for (slot, count) in ring_runs(end - stored, stored, window) {
            rows.write(slot, &k.narrow(2, from, count)?, &v.narrow(2, from, count)?)?;
            from += count;
        }
        self.oldest = end - window;
        Ok(view)
    }

    /// The buffers, with room for `needed` rows; `most` rows are never exceeded.
    fn rows_for(&mut self, like: &Tensor, needed: usize, most: usize) -> Result<Rows> {
        let wanted = needed.max(self.reserve.min(most));
        let rows = match &self.rows {
            Some(rows) if rows.capacity() >= needed => rows.clone(),
            Some(rows) => rows.resized(grown(rows.capacity(), wanted, most))?,
            None => Rows::new(like, grown(0, wanted, most), self.values_only)?,
        };
        self.rows = Some(rows.clone());
        Ok(rows)
    }

    /// Whether the cache can go back to its first `len` tokens: what any later token may attend to must still be held.
    pub fn can_truncate(&self, len: usize) -> bool {
        let needed = match self.kind {
            LayerKind::Full => 0,
            LayerKind::Sliding { window } => len.saturating_add(1).saturating_sub(window),
        };
        len <= self.len && needed >= self.oldest
    }

    /// Goes back to the first `len` tokens.
    ///
    /// # Errors
    ///
    /// A ring that has overwritten what a token at position `len` attends to; see [`Self::can_truncate`].
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        if len > self.len {
            bail!(
                "kv cache: can't go back to {len} tokens, {} are held",
                self.len
            );
        }
        if !self.can_truncate(len) {
            bail!("kv cache: can't go back to {len} of {} tokens, positions before {} are overwritten ({:?})", self.len, self.oldest, self.kind);
        }
        self.len = len;
        Ok(())
    }

    /// Forgets every token, frees the buffers and drops what was reserved.
    pub fn clear(&mut self) {
        *self = Self {
            values_only: self.values_only,
            ..Self::new(self.kind)
        };
    }

    /// A copy that shares no memory with this one.
    pub fn fork(&self) -> Result<Self> {
        let rows = match &self.rows {
            Some(rows) => Some(rows.resized(rows.capacity())?),
            None => None,
        };
        Ok(Self { rows, ..*self })
    }
}

/// Fails if there is no memory for `tensors` contiguous ones like `t`, whose rows may all be one.
fn check_copies(t: &Tensor, tensors: usize) -> Result<()> {
    let what = format_args!("copies of keys or values of shape {:?}", t.dims());
    let (dims, size) = ([t.dims(), &[tensors]].concat(), t.dtype().size_in_bytes());
    memory::check("kv cache", what, &dims, size, t.device())
}

/// What `tokens` tokens from position `at` on see of rows that ascend from position `first_key`.
fn visible(at: usize, tokens: usize, first_key: usize, window: Option<usize>) -> Visible {
    match tokens {
        // Nothing is held that the only token may not attend to.
        1 => Visible::All,
        _ => Visible::Causal {
            first_query: at,
            first_key,
            window,
        },
    }
}

/// Slots of `count` positions from `first` on, as at most two runs `(slot, count)`.
fn ring_runs(first: usize, count: usize, window: usize) -> impl Iterator<Item = (usize, usize)> {
    let slot = first % window;
    let before_the_end = count.min(window - slot);
    [(slot, before_the_end), (0, count - before_the_end)]
        .into_iter()
        .filter(|run| run.1 > 0)
}

/// Rows that a layer allocates at once for a reserved context of `tokens`.
pub(super) fn capacity(kind: LayerKind, tokens: usize) -> usize {
    match kind {
        LayerKind::Full => grown(0, tokens, usize::MAX),
        LayerKind::Sliding { window } => grown(0, tokens.min(window), window),
    }
}

/// Bytes of a token in the cache of a layer.
pub(super) fn row_bytes(layer: &LayerConfig, values_only: bool, dtype: DType) -> usize {
    let tensors = if values_only { 1 } else { 2 };
    tensors * layer.num_key_value_heads * layer.head_dim * dtype.size_in_bytes()
}

/// Half as much again, so that appending token by token copies each row a bounded number of times.
pub(super) fn grown(capacity: usize, wanted: usize, most: usize) -> usize {
    let rows = wanted.max(capacity.saturating_add(capacity / 2));
    rows.checked_next_multiple_of(GROWTH_ROWS)
        .unwrap_or(rows)
        .min(most)
}

/// Key and value buffers, or values alone, `(batch, kv_heads, capacity, head_dim)`; a clone is the same memory.
#[derive(Debug, Clone)]
struct Rows {
    /// `None`: values alone.
    k: Option<Tensor>,
    v: Tensor,
}

impl Rows {
    fn new(like: &Tensor, capacity: usize, values_only: bool) -> Result<Self> {
        let (batch, heads, _, dim) = like.dims4()?;
        let shape = (batch, heads, capacity, dim);
        let (dtype, device) = (like.dtype(), like.device());
        let dims = [batch, heads, capacity, dim, if values_only { 1 } else { 2 }];
        let what = format_args!("{capacity} rows for {:?} {dtype:?}", like.dims());
        memory::check("kv cache", what, &dims, dtype.size_in_bytes(), device)?;
        let buffer = || zeros_on_a_line("kv cache", what, shape, dtype, device);
        Ok(Self {
            k: (!values_only).then(buffer).transpose()?,
            v: buffer()?,
        })
    }

    fn resized(&self, capacity: usize) -> Result<Self> {
        let rows = Self::new(&self.v, capacity, self.k.is_none())?;
        if let (Some(to), Some(from)) = (&rows.k, &self.k) {
            to.slice_set(from, 2, 0)?;
        }
        rows.v.slice_set(&self.v, 2, 0)?;
        Ok(rows)
    }

    fn capacity(&self) -> usize {
        self.v.dims()[2]
    }

    fn bytes(&self) -> usize {
        let tensors = 1 + self.k.iter().count();
        tensors * self.v.elem_count() * self.v.dtype().size_in_bytes()
    }

    fn check(&self, name: &str, t: &Tensor) -> Result<()> {
        let (held, got) = (self.v.dims4()?, t.dims4()?);
        if (held.0, held.1, held.3) != (got.0, got.1, got.3) || self.v.dtype() != t.dtype() {
            bail!(
                "kv cache: {name} is {:?} {:?}, want ({}, {}, tokens, {}) {:?} as what is held",
                t.dims(),
                t.dtype(),
                held.0,
                held.1,
                held.3,
                self.v.dtype()
            );
        }
        Ok(())
    }

    fn keys(&self) -> Result<&Tensor> {
        match &self.k {
            Some(k) => Ok(k),
            None => bail!("kv cache: it holds values alone, want its keys"),
        }
    }

    fn write(&self, row: usize, k: &Tensor, v: &Tensor) -> Result<()> {
        self.keys()?.slice_set(&k.contiguous()?, 2, row)?;
        self.v.slice_set(&v.contiguous()?, 2, row)
    }

    fn view(&self, row: usize, count: usize, visible: Visible) -> Result<KvView> {
        Ok(KvView {
            k: self.keys()?.narrow(2, row, count)?,
            v: self.v.narrow(2, row, count)?,
            visible,
        })
    }
}
