//! One attention layer: projections, norms, rotary embedding, cache, and the path that the cache asks for.

use super::config::{Config, LayerConfig, LayerKind};
use super::layer_cache::LayerCache;
use super::norm::RmsNorm;
use super::path::AttentionPath;
use crate::attention::reference;
use candle::{DType, Module, Result, Tensor};
use candle_nn::{linear_no_bias, Linear, VarBuilder};

/// Gemma 4 does not divide scores by `sqrt(head_dim)`: the norms of q and k carry the scale.
const SOFTMAX_SCALE: f32 = 1.0;

#[derive(Debug, Clone)]
pub(super) struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    /// `None`: the values are the raw output of `k_proj`.
    v_proj: Option<Linear>,
    o_proj: Linear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    v_norm: RmsNorm,
    kind: LayerKind,
    head_dim: usize,
}

impl Attention {
    pub(super) fn load(config: &Config, layer: &LayerConfig, vb: VarBuilder) -> Result<Self> {
        let (hidden, d, eps) = (config.hidden_size, layer.head_dim, config.rms_norm_eps);
        let (q_rows, kv_rows) = (
            config.num_attention_heads * d,
            layer.num_key_value_heads * d,
        );
        let v_proj = match layer.value_is_key {
            true => None,
            false => Some(linear_no_bias(hidden, kv_rows, vb.pp("v_proj"))?),
        };
        Ok(Self {
            q_proj: linear_no_bias(hidden, q_rows, vb.pp("q_proj"))?,
            k_proj: linear_no_bias(hidden, kv_rows, vb.pp("k_proj"))?,
            v_proj,
            o_proj: linear_no_bias(q_rows, hidden, vb.pp("o_proj"))?,
            q_norm: RmsNorm::load(d, eps, &vb.pp("q_norm"))?,
            k_norm: RmsNorm::load(d, eps, &vb.pp("k_norm"))?,
            v_norm: RmsNorm::weightless(d, eps, vb.device())?,
            kind: layer.kind,
            head_dim: d,
        })
    }

    /// `xs`: `(batch, tokens, hidden)` in the type of the weights; `rope`: f32 tables of these tokens' positions.
    pub(super) fn forward(
        &self,
        xs: &Tensor,
        (cos, sin): &(Tensor, Tensor),
        cache: &mut LayerCache,
        path: AttentionPath,
    ) -> Result<Tensor> {
        let (batch, tokens, _) = xs.dims3()?;
        // Norms and rotation are f32; each of q, k and v is rounded to the type of the weights once.
        let rotated = |x: &Tensor| candle_nn::rotary_emb::rope(x, cos, sin)?.to_dtype(xs.dtype());
        let q = self
            .q_norm
            .forward(&self.heads(&self.q_proj.forward(xs)?)?)?;
        let q = rotated(&by_head(&q)?)?;
        let k_raw = self.heads(&self.k_proj.forward(xs)?)?;
        let k = rotated(&by_head(&self.k_norm.forward(&k_raw)?)?)?;
        let v_raw = match &self.v_proj {
            Some(v_proj) => self.heads(&v_proj.forward(xs)?)?,
            None => k_raw,
        };
        let v = by_head(&self.v_norm.forward(&v_raw)?)?.to_dtype(xs.dtype())?;
        let view = cache.append(&k, &v)?;
        let out = match (path, self.kind) {
            // Causal at the end of the cache, where these tokens are.
            (AttentionPath::Fused, LayerKind::Full) => {
                crate::attention_d512(&q, &view.k, &view.v, SOFTMAX_SCALE)?
            }
            _ => reference::attention(&q, &view.k, &view.v, SOFTMAX_SCALE, view.visible)?,
        };
        let out = out.transpose(1, 2)?.reshape((batch, tokens, ()))?;
        self.o_proj.forward(&out)
    }

    /// `(batch, tokens, heads * head_dim)` as f32 `(batch, tokens, heads, head_dim)`.
    fn heads(&self, xs: &Tensor) -> Result<Tensor> {
        let (batch, tokens, _) = xs.dims3()?;
        xs.reshape((batch, tokens, (), self.head_dim))?
            .to_dtype(DType::F32)
    }
}

/// `(batch, tokens, heads, head_dim)` to contiguous `(batch, heads, tokens, head_dim)`.
fn by_head(xs: &Tensor) -> Result<Tensor> {
    xs.transpose(1, 2)?.contiguous()
}
