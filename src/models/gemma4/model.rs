//! The decoder: embedding, layers, head.
//!
//! The residual stream and every norm are f32 whatever the type of the weights (Gemma overflows f16, and bf16 would round
//! the stream twice a layer); matrix products and the caches are in the type of the weights.

use super::cache::Cache;
use super::config::Config;
use super::gguf::{Gguf, GgufSource};
use super::layer::DecoderLayer;
use super::matrix::Matrix;
use super::norm::RmsNorm;
use super::path::AttentionPath;
use super::rope::{Angles, Rope};
use super::source::{Part, Source};
use candle::{bail, DType, Device, Result, Tensor};
use candle_nn::VarBuilder;

/// A Gemma 4 text decoder.
#[derive(Debug, Clone)]
pub struct Model {
    config: Config,
    embed_tokens: Matrix,
    layers: Vec<DecoderLayer>,
    /// The distinct rotary tables; each layer names its own by index.
    ropes: Vec<Rope>,
    norm: RmsNorm,
    /// `(vocab, hidden)`; the embedding, if they are tied.
    lm_head: Matrix,
    dtype: DType,
    device: Device,
}

impl Model {
    /// Takes the weights from `vb`, whose names begin after the checkpoint's text prefix (`embed_tokens.weight`); its
    /// dtype, one of f32, bf16 and f16, is that of the matrix products and the caches.
    ///
    /// [`Weights`](super::Weights) opens checkpoint files and checks all of them first.
    ///
    /// # Errors
    ///
    /// Another dtype, or a weight that is missing or has the wrong shape.
    pub fn new(config: &Config, vb: VarBuilder) -> Result<Self> {
        Self::load(config, &vb)
    }

    /// Loads a GGUF file, checked first. Its quantized matrices stay quantized, embedding and head included; `dtype`, one of
    /// f32, bf16 and f16, is that of its other matrices, of what is kept between products, and of the caches.
    ///
    /// # Errors
    ///
    /// As [`Gguf::check`]; another dtype; a file that can't be read; a value too large for f16.
    pub fn from_gguf(gguf: &Gguf, dtype: DType, device: &Device) -> Result<Self> {
        gguf.check()?;
        let source = GgufSource {
            gguf,
            dtype,
            device,
        };
        Self::load(gguf.config(), &source)
    }

    fn load(config: &Config, source: &dyn Source) -> Result<Self> {
        let (dtype, hidden, vocab) = (source.dtype(), config.hidden_size, config.vocab_size);
        if !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            bail!("gemma4: dtype is {dtype:?}, want F32, BF16 or F16");
        }
        let part = Part::root(source);
        let embed_tokens = part.matrix("embed_tokens", vocab, hidden)?;
        let lm_head = match config.tie_word_embeddings {
            true => embed_tokens.clone(),
            false => part.matrix("lm_head", vocab, hidden)?,
        };
        let mut ropes = Vec::new();
        let mut layers = Vec::with_capacity(config.layers.len());
        for (i, layer) in config.layers.iter().enumerate() {
            let rope = Rope::new(&layer.rope, layer.head_dim);
            let rope_index = ropes
                .iter()
                .position(|known| *known == rope)
                .unwrap_or(ropes.len());
            if rope_index == ropes.len() {
                ropes.push(rope);
            }
            layers.push(DecoderLayer::load(
                config,
                layer,
                rope_index,
                part.pp("layers").pp(i),
            )?);
        }
        Ok(Self {
            config: config.clone(),
            embed_tokens,
            layers,
            ropes,
            norm: RmsNorm::load(hidden, config.rms_norm_eps, &part.pp("norm"))?,
            lm_head,
            dtype,
            device: source.device().clone(),
        })
    }

    /// The configuration it was made from.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Type of the matrix products and the caches.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the weights are.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// An empty cache for this model.
    ///
    /// # Errors
    ///
    /// The model can't run on `path`.
    pub fn new_cache(&self, path: AttentionPath) -> Result<Cache> {
        path.check(&self.config, self.dtype, &self.device)?;
        Ok(Cache::new(&self.config, path))
    }

    /// Feeds `input_ids`, u32 `(batch, tokens)`, after what `cache` holds, and returns the logits of the last token, f32
    /// `(batch, vocab)`, soft-capped.
    ///
    /// # Errors
    ///
    /// No tokens, ids outside the vocabulary, or more tokens than the context has room for: refused before anything is
    /// written to the cache.
    pub fn forward(&self, input_ids: &Tensor, cache: &mut Cache) -> Result<Tensor> {
        let hidden = self.decode(input_ids, cache, |_| ())?;
        let tokens = hidden.dim(1)?;
        self.logits(&hidden.narrow(1, tokens - 1, 1)?)?.squeeze(1)
    }

    /// As [`forward`](Self::forward), with the logits of every token: f32 `(batch, tokens, vocab)`.
    pub fn forward_all(&self, input_ids: &Tensor, cache: &mut Cache) -> Result<Tensor> {
        let hidden = self.decode(input_ids, cache, |_| ())?;
        self.logits(&hidden)
    }

    /// As [`forward`](Self::forward), in chunks of at most `chunk` tokens: memory for activations is bounded by the chunk,
    /// not by the prompt.
    pub fn prefill(&self, input_ids: &Tensor, chunk: usize, cache: &mut Cache) -> Result<Tensor> {
        let tokens = self.check_input(input_ids, cache)?;
        if chunk == 0 {
            bail!("gemma4: prefill chunk is 0, want at least 1 token");
        }
        let last = (tokens - 1) / chunk * chunk;
        for start in (0..last).step_by(chunk) {
            self.decode(&input_ids.narrow(1, start, chunk)?, cache, |_| ())?;
        }
        self.forward(&input_ids.narrow(1, last, tokens - last)?, cache)
    }

    /// As [`forward`](Self::forward), but returns the embedding, the output of every layer and the final norm, in this
    /// order: f32 `(batch, tokens, hidden)` each.
    pub fn hidden_states(&self, input_ids: &Tensor, cache: &mut Cache) -> Result<Vec<Tensor>> {
        let mut states = Vec::with_capacity(self.layers.len() + 2);
        let last = self.decode(input_ids, cache, |state| states.push(state.clone()))?;
        states.push(last);
        Ok(states)
    }

    /// Everything but the head; `observe` sees the embedding and the output of every layer.
    fn decode(
        &self,
        input_ids: &Tensor,
        cache: &mut Cache,
        mut observe: impl FnMut(&Tensor),
    ) -> Result<Tensor> {
        let tokens = self.check_input(input_ids, cache)?;
        let _span = tracing::trace_span!("forward", tokens).entered();
        let (start, path) = (cache.len(), cache.path());
        let mut ropes = Vec::with_capacity(self.ropes.len());
        for (i, rope) in self.ropes.iter().enumerate() {
            let (cos, sin) = rope.cos_sin(start, tokens, &self.device)?;
            let layers = self.layers.iter().zip(&self.config.layers);
            let mut of_rope = layers.filter(|(layer, _)| layer.rope() == i);
            let keys = match of_rope.any(|(_, config)| path.rebuilds_keys(config)) {
                true => Some(cache.key_tables(rope, tokens, &self.device)?),
                false => None,
            };
            ropes.push(Angles { cos, sin, keys });
        }
        let mut xs = self.embed(input_ids)?;
        observe(&xs);
        for (layer, cache) in self.layers.iter().zip(cache.layers_mut()) {
            xs = layer.forward(&xs, self.dtype, &ropes[layer.rope()], cache, path)?;
            observe(&xs);
        }
        cache.commit(tokens);
        self.norm.forward(&xs)
    }

    /// The number of tokens, if they can be fed.
    fn check_input(&self, input_ids: &Tensor, cache: &Cache) -> Result<usize> {
        let (batch, tokens) = match (input_ids.dims(), input_ids.dtype()) {
            (&[batch, tokens], DType::U32) => (batch, tokens),
            (dims, dtype) => {
                bail!("gemma4: input_ids is {dims:?} {dtype:?}, want (batch, tokens) U32")
            }
        };
        if batch == 0 || tokens == 0 {
            bail!("gemma4: input_ids is ({batch}, {tokens}), want at least one token");
        }
        let vocab = self.config.vocab_size;
        let ids = input_ids.flatten_all()?.to_vec1::<u32>()?;
        if let Some(at) = ids.iter().position(|&id| id as usize >= vocab) {
            bail!(
                "gemma4: token {at} of input_ids is {}, want an id below the vocabulary of {vocab}",
                ids[at]
            );
        }
        cache.check_model(&self.config, self.dtype, &self.device)?;
        cache.check_room(tokens)?;
        Ok(tokens)
    }

    fn embed(&self, input_ids: &Tensor) -> Result<Tensor> {
        let (batch, tokens) = input_ids.dims2()?;
        let rows = self.embed_tokens.rows(&input_ids.flatten_all()?)?;
        let rows = rows.reshape((batch, tokens, self.config.hidden_size))?;
        rows * rounded((self.config.hidden_size as f64).sqrt(), self.dtype)
    }

    /// The head and its soft cap in f32, whatever the type of the weights: bf16 steps by 1/8 at a logit of 20.
    fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let _span = tracing::trace_span!("logits").entered();
        let (batch, tokens, size) = hidden.dims3()?;
        let hidden = hidden.reshape((batch * tokens, size))?;
        let vocab = self.config.vocab_size;
        let logits = self.lm_head.forward_f32(&hidden)?;
        let logits = logits.reshape((batch, tokens, vocab))?;
        soft_cap(&logits, self.config.final_logit_softcapping)
    }
}

/// `cap * tanh(logits / cap)`, or the logits themselves without a cap. What is infinite becomes NaN under a cap, never the cap.
pub fn soft_cap(logits: &Tensor, cap: Option<f64>) -> Result<Tensor> {
    let Some(cap) = cap else {
        return Ok(logits.clone());
    };
    let capped = ((logits / cap)?.tanh()? * cap)?;
    // A product with 0 is 0, and of what is not finite NaN, which tanh would hide.
    capped + (logits * 0.0)?
}

/// `factor` as a scalar of type `dtype` holds it: transformers multiplies by the rounded factor.
fn rounded(factor: f64, dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => half::bf16::from_f64(factor).to_f64(),
        DType::F16 => half::f16::from_f64(factor).to_f64(),
        _ => factor,
    }
}
