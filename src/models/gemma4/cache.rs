//! Everything that a sequence leaves behind for the tokens that follow it.

use super::config::{Config, LayerKind};
use super::layer_cache::{self, LayerCache};
use super::path::AttentionPath;
use super::rope::Rope;
use crate::attention::RotaryTables;
use candle::{bail, DType, Device, Result, Tensor};

/// Tokens of a layer that [`Cache::fill`] makes at a time.
const FILLED_AT_ONCE: usize = 4096;

/// The caches of all layers for one batch of sequences of equal length, and the attention path that they run on.
///
/// Cloning is [`fork`](Self::fork), since it allocates.
#[derive(Debug)]
pub struct Cache {
    path: AttentionPath,
    max_context: usize,
    len: usize,
    layers: Vec<LayerCache>,
    /// Of every position so far, by frequencies, where keys are rebuilt; shared by layers, and with forks.
    tables: Vec<RotaryTables>,
    /// Positions that tables should reach to when they are made.
    reserve: usize,
    mark: Option<Mark>,
}

/// What the layers that forget held at an earlier length.
#[derive(Debug)]
struct Mark {
    len: usize,
    /// `None` for full layers, which still hold every token up to `len`.
    rings: Vec<Option<LayerCache>>,
}

impl Cache {
    /// See [`Model::new_cache`](super::Model::new_cache).
    pub(super) fn new(config: &Config, path: AttentionPath) -> Self {
        let layers = config
            .layers
            .iter()
            .map(|layer| match path.rebuilds_keys(layer) {
                true => LayerCache::values_only(),
                false => LayerCache::new(layer.kind),
            })
            .collect();
        Self {
            path,
            max_context: config.max_position_embeddings,
            len: 0,
            layers,
            tables: Vec::new(),
            reserve: 0,
            mark: None,
        }
    }

    /// Lowers the context limit from the model's own to `max_context` tokens.
    ///
    /// # Errors
    ///
    /// More tokens than the model was made for, or fewer than are held.
    pub fn with_max_context(mut self, max_context: usize) -> Result<Self> {
        if max_context < self.len.max(1) || max_context > self.max_context {
            bail!(
                "gemma4: max context is {max_context}, want {} to {}",
                self.len.max(1),
                self.max_context
            );
        }
        self.max_context = max_context;
        Ok(self)
    }

    /// Which ops attention runs on.
    pub fn path(&self) -> AttentionPath {
        self.path
    }

    /// Most tokens that this cache takes.
    pub fn max_context(&self) -> usize {
        self.max_context
    }

    /// Tokens held; the position of the next one.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes allocated now, for a [`mark`](Self::mark) too: `(sliding layers, full layers)`.
    pub fn bytes(&self) -> (usize, usize) {
        let marked = self
            .mark
            .iter()
            .flat_map(|mark| mark.rings.iter().flatten());
        self.layers
            .iter()
            .chain(marked)
            .fold((0, 0), |(sliding, full), layer| match layer.kind() {
                LayerKind::Sliding { .. } => (sliding + layer.bytes(), full),
                LayerKind::Full => (sliding, full + layer.bytes()),
            })
    }

    /// Bytes of the rotary tables that rebuild keys, which every full layer shares; 0 on other paths.
    pub fn table_bytes(&self) -> usize {
        self.tables.iter().map(RotaryTables::bytes).sum()
    }

    /// Bytes that a context of `tokens` takes on this path once [`reserve`](Self::reserve)d, by [`bytes`](Self::bytes)'s parts.
    pub fn planned_bytes(
        config: &Config,
        path: AttentionPath,
        tokens: usize,
        dtype: DType,
    ) -> (usize, usize) {
        let tokens = tokens.min(config.max_position_embeddings);
        config.layers.iter().fold((0, 0), |(sliding, full), layer| {
            let row = layer_cache::row_bytes(layer, path.rebuilds_keys(layer), dtype);
            let bytes = layer_cache::capacity(layer.kind, tokens) * row;
            match layer.kind {
                LayerKind::Sliding { .. } => (sliding + bytes, full),
                LayerKind::Full => (sliding, full + bytes),
            }
        })
    }

    /// As [`planned_bytes`](Self::planned_bytes), of the rotary tables.
    pub fn planned_table_bytes(config: &Config, path: AttentionPath, tokens: usize) -> usize {
        let mut ropes: Vec<Rope> = Vec::new();
        for layer in config.layers.iter().filter(|l| path.rebuilds_keys(l)) {
            let rope = Rope::new(&layer.rope, layer.head_dim);
            if !ropes.contains(&rope) {
                ropes.push(rope);
            }
        }
        let positions = layer_cache::grown(0, tokens, config.max_position_embeddings);
        let rows = ropes.iter().map(|r| RotaryTables::row_bytes(r.inv_freq()));
        positions * rows.sum::<usize>()
    }

    /// Announces a context of `len` tokens, so that buffers are allocated once.
    pub fn reserve(&mut self, len: usize) {
        let len = len.min(self.max_context);
        self.layers.iter_mut().for_each(|layer| layer.reserve(len));
        self.reserve = len;
    }

    /// Forgets every token, frees the buffers and drops what was [`reserve`](Self::reserve)d.
    pub fn clear(&mut self) {
        self.layers.iter_mut().for_each(LayerCache::clear);
        self.tables.clear();
        (self.len, self.reserve, self.mark) = (0, 0, None);
    }

    /// Remembers the tokens held now, in place of an earlier mark, so that [`truncate`](Self::truncate) can come back to them
    /// once sliding layers have overwritten what they attend to: copies the sliding layers, which are bounded by their window.
    ///
    /// The mark is lost by [`clear`](Self::clear), by going back further, and to a [`fork`](Self::fork).
    ///
    /// # Errors
    ///
    /// Layers that hold different tokens, after a forward pass that failed; no memory for the copies.
    pub fn mark(&mut self) -> Result<()> {
        self.check_room(0)?;
        // Frees the earlier copies first.
        self.mark = None;
        let copy = |layer: &LayerCache| match layer.kind() {
            LayerKind::Sliding { .. } => layer.fork().map(Some),
            LayerKind::Full => Ok(None),
        };
        self.mark = Some(Mark {
            len: self.len,
            rings: self.layers.iter().map(copy).collect::<Result<_>>()?,
        });
        Ok(())
    }

    /// The most tokens, at most `len`, that [`truncate`](Self::truncate) can go back to by what is held or marked.
    pub fn reusable(&self, len: usize) -> usize {
        let len = len.min(self.len);
        match &self.mark {
            _ if self.can_truncate(len) => len,
            Some(mark) if mark.len <= len => mark.len,
            _ => 0,
        }
    }

    /// Whether [`truncate`](Self::truncate) to `len` tokens would succeed.
    pub fn can_truncate(&self, len: usize) -> bool {
        self.layers_can_truncate(len) || self.mark.as_ref().is_some_and(|mark| mark.len == len)
    }

    fn layers_can_truncate(&self, len: usize) -> bool {
        self.layers.iter().all(|layer| layer.can_truncate(len))
    }

    /// Goes back to the first `len` tokens, for a new continuation of a common prefix.
    ///
    /// # Errors
    ///
    /// A sliding layer no longer holds what the token at position `len` attends to: clear the cache and feed the prefix
    /// again. Nothing is changed then.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        if len > self.len {
            bail!(
                "gemma4: can't go back to {len} tokens, {} are held",
                self.len
            );
        }
        if !self.can_truncate(len) {
            bail!(
                "gemma4: can't go back to {len} of {} tokens: a sliding layer has overwritten what token {len} attends to; clear the cache and feed the prefix again",
                self.len
            );
        }
        match &self.mark {
            Some(mark) if !self.layers_can_truncate(len) => {
                // All copies are made before a layer changes.
                let copies = mark.rings.iter().map(|ring| match ring {
                    Some(ring) => ring.fork().map(Some),
                    None => Ok(None),
                });
                let copies = copies.collect::<Result<Vec<_>>>()?;
                for (layer, copy) in self.layers.iter_mut().zip(copies) {
                    match copy {
                        Some(ring) => *layer = ring,
                        None => layer.truncate(len)?,
                    }
                }
            }
            _ => {
                for layer in &mut self.layers {
                    layer.truncate(len)?;
                }
            }
        }
        self.len = len;
        // Full layers may overwrite what a later mark counts on.
        self.mark = self.mark.take().filter(|mark| mark.len <= len);
        Ok(())
    }

    /// A copy that shares no memory of tokens with this one.
    pub fn fork(&self) -> Result<Self> {
        let layers = self
            .layers
            .iter()
            .map(LayerCache::fork)
            .collect::<Result<_>>()?;
        Ok(Self {
            layers,
            tables: self.tables.clone(),
            mark: None,
            ..*self
        })
    }

    /// Takes `tokens` more tokens of normally distributed keys and values, as if they had been read: what a token after so much
    /// context costs can be measured without reading it.
    ///
    /// # Errors
    ///
    /// As a forward pass: a context that is full, rows of another dtype or on another device than those held.
    pub fn fill(
        &mut self,
        config: &Config,
        tokens: usize,
        dtype: DType,
        device: &Device,
    ) -> Result<()> {
        self.check_model(config, dtype, device)?;
        self.check_room(tokens)?;
        for (layer, cache) in config.layers.iter().zip(&mut self.layers) {
            for from in (0..tokens).step_by(FILLED_AT_ONCE) {
                let count = FILLED_AT_ONCE.min(tokens - from);
                let shape = (1, layer.num_key_value_heads, count, layer.head_dim);
                let rows = || Tensor::randn(0f32, 1.0, shape, device)?.to_dtype(dtype);
                match cache.holds_values_only() {
                    true => cache.append_values(&rows()?).map(|_| ())?,
                    false => cache.append(&rows()?, &rows()?).map(|_| ())?,
                }
            }
        }
        self.commit(tokens);
        Ok(())
    }

    /// Fails if `tokens` more tokens do not fit, or if the layers do not hold the same tokens.
    pub fn check_room(&self, tokens: usize) -> Result<()> {
        if tokens > self.max_context - self.len {
            bail!(
                "gemma4: context full: {} tokens held and {tokens} more given, want at most {} in all",
                self.len,
                self.max_context
            );
        }
        if self.layers.iter().any(|layer| layer.len() != self.len) {
            bail!("gemma4: an earlier forward pass failed half way, the layers hold different tokens; clear the cache");
        }
        Ok(())
    }

    /// Fails if this is the cache of a model with other layers: their keys would be taken for this model's.
    pub(super) fn check_model(&self, config: &Config, dtype: DType, device: &Device) -> Result<()> {
        let kinds = self.layers.iter().map(LayerCache::kind);
        if !kinds.eq(config.layers.iter().map(|layer| layer.kind)) {
            bail!(
                "gemma4: the cache was made for {} layers that are not those of this model ({}), want one from its new_cache",
                self.layers.len(),
                config.layers.len()
            );
        }
        self.path.check(config, dtype, device)
    }

    /// Tables of `rope` for the tokens held and `tokens` more, which have room.
    pub(super) fn key_tables(
        &mut self,
        rope: &Rope,
        tokens: usize,
        device: &Device,
    ) -> Result<RotaryTables> {
        let frequencies = rope.inv_freq();
        let needed = self.len + tokens;
        let known = self.tables.iter().position(|t| t.are_of(frequencies));
        let held = known.map_or(0, |i| self.tables[i].positions());
        let positions = match held >= needed {
            true => held,
            false => layer_cache::grown(held, needed.max(self.reserve), self.max_context),
        };
        match known {
            Some(i) => {
                self.tables[i] = self.tables[i].extended(positions)?;
                Ok(self.tables[i].clone())
            }
            None => {
                let tables = RotaryTables::new(frequencies, positions, device)?;
                self.tables.push(tables.clone());
                Ok(tables)
            }
        }
    }

    pub(super) fn layers_mut(&mut self) -> &mut [LayerCache] {
        &mut self.layers
    }

    /// Every layer has taken its tokens.
    pub(super) fn commit(&mut self, tokens: usize) {
        self.len += tokens;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_that_hold_different_tokens_are_refused_until_cleared() -> Result<()> {
        let text = r#"{"model_type": "gemma4_text", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 6,
            "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 4, "max_position_embeddings": 64,
            "vocab_size": 16, "hidden_size_per_layer_input": 0}"#;
        let mut cache = Cache::new(&Config::from_json(text)?, AttentionPath::Reference);
        cache.check_room(1)?;
        // What a forward pass leaves that failed in the second layer.
        let row = Tensor::zeros((1, 1, 1, 4), DType::F32, &Device::Cpu)?;
        cache.layers[0].append(&row, &row)?;
        assert!(cache.check_room(1).is_err());
        cache.clear();
        cache.check_room(1)
    }
}
