//! One decoder layer: attention and MLP, each between two norms, on an f32 residual stream.

use super::attention::Attention;
use super::config::{Config, LayerConfig};
use super::layer_cache::LayerCache;
use super::matrix::Matrix;
use super::norm::RmsNorm;
use super::path::AttentionPath;
use super::rope::Angles;
use super::source::Part;
use candle::{DType, Result, Tensor};

#[derive(Debug, Clone)]
pub(super) struct DecoderLayer {
    input_layernorm: RmsNorm,
    attention: Attention,
    post_attention_layernorm: RmsNorm,
    pre_feedforward_layernorm: RmsNorm,
    mlp: Mlp,
    post_feedforward_layernorm: RmsNorm,
    /// Multiplies the whole stream at the end of the layer, the residual included.
    layer_scalar: Tensor,
    /// Index of the layer's rotary table.
    rope: usize,
}

impl DecoderLayer {
    pub(super) fn load(
        config: &Config,
        layer: &LayerConfig,
        rope: usize,
        part: Part,
    ) -> Result<Self> {
        let norm =
            |name: &str| RmsNorm::load(config.hidden_size, config.rms_norm_eps, &part.pp(name));
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            attention: Attention::load(config, layer, part.pp("self_attn"))?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            pre_feedforward_layernorm: norm("pre_feedforward_layernorm")?,
            mlp: Mlp::load(config, &part.pp("mlp"))?,
            post_feedforward_layernorm: norm("post_feedforward_layernorm")?,
            layer_scalar: part.vector("layer_scalar", 1)?,
            rope,
        })
    }

    /// Index of the layer's rotary table.
    pub(super) fn rope(&self) -> usize {
        self.rope
    }

    /// `xs`: the residual stream, f32; `dtype` is that of the weights.
    pub(super) fn forward(
        &self,
        xs: &Tensor,
        dtype: DType,
        angles: &Angles,
        cache: &mut LayerCache,
        path: AttentionPath,
    ) -> Result<Tensor> {
        let xs = {
            let _span = tracing::trace_span!("attention").entered();
            let normed = self.input_layernorm.forward(xs)?.to_dtype(dtype)?;
            let attended = self.attention.forward(&normed, angles, cache, path)?;
            (xs + self
                .post_attention_layernorm
                .forward(&attended.to_dtype(DType::F32)?)?)?
        };
        let _span = tracing::trace_span!("mlp").entered();
        let normed = self
            .pre_feedforward_layernorm
            .forward(&xs)?
            .to_dtype(dtype)?;
        let fed = self.mlp.forward(&normed)?;
        let xs = (xs
            + self
                .post_feedforward_layernorm
                .forward(&fed.to_dtype(DType::F32)?)?)?;
        xs.broadcast_mul(&self.layer_scalar)
    }
}

#[derive(Debug, Clone)]
struct Mlp {
    gate_proj: Matrix,
    up_proj: Matrix,
    down_proj: Matrix,
}

impl Mlp {
    fn load(config: &Config, part: &Part) -> Result<Self> {
        let (hidden, inter) = (config.hidden_size, config.intermediate_size);
        Ok(Self {
            gate_proj: part.matrix("gate_proj", inter, hidden)?,
            up_proj: part.matrix("up_proj", inter, hidden)?,
            down_proj: part.matrix("down_proj", hidden, inter)?,
        })
    }

    /// The activation and the product are f32: candle's half-precision GELU rounds at every step.
    fn forward(&self, xs: &Tensor) -> Result<Tensor> {
        let gate = self.gate_proj.forward(xs)?.to_dtype(DType::F32)?.gelu()?;
        let up = self.up_proj.forward(xs)?.to_dtype(DType::F32)?;
        self.down_proj.forward(&(gate * up)?.to_dtype(xs.dtype())?)
    }
}
