//! One attention layer: projections, norms, rotary embedding, cache, and the path that the cache asks for.
//!
//! Dense weights of q, k and v are held once, packed: the fused path multiplies them as one, the reference path block by
//! block. Quantized ones are multiplied block by block on every path.

use super::config::{Config, LayerConfig, LayerKind};
use super::layer_cache::LayerCache;
use super::matrix::Matrix;
use super::norm::RmsNorm;
use super::path::AttentionPath;
use super::rope::Angles;
use super::source::Part;
use crate::attention::{reference, sdpa, RotaryKeys};
use crate::projection::FusedProjection;
use candle::{bail, DType, Result, Tensor};

/// Gemma 4 does not divide scores by `sqrt(head_dim)`: the norms of q and k carry the scale.
const SOFTMAX_SCALE: f32 = 1.0;

#[derive(Debug, Clone)]
pub(super) struct Attention {
    qkv: Qkv,
    /// The values are the raw output of `k`.
    value_is_key: bool,
    o_proj: Matrix,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    v_norm: RmsNorm,
    kind: LayerKind,
    head_dim: usize,
}

impl Attention {
    pub(super) fn load(config: &Config, layer: &LayerConfig, part: Part) -> Result<Self> {
        let (hidden, d, eps) = (config.hidden_size, layer.head_dim, config.rms_norm_eps);
        let (q_rows, kv_rows) = (
            config.num_attention_heads * d,
            layer.num_key_value_heads * d,
        );
        let q = part.matrix("q_proj", q_rows, hidden)?;
        let k = part.matrix("k_proj", kv_rows, hidden)?;
        let v = match layer.value_is_key {
            true => None,
            false => Some(part.matrix("v_proj", kv_rows, hidden)?),
        };
        Ok(Self {
            qkv: Qkv::new(q, k, v)?,
            value_is_key: layer.value_is_key,
            o_proj: part.matrix("o_proj", hidden, q_rows)?,
            q_norm: RmsNorm::load(d, eps, &part.pp("q_norm"))?,
            k_norm: RmsNorm::load(d, eps, &part.pp("k_norm"))?,
            v_norm: RmsNorm::weightless(d, eps, part.source.device())?,
            kind: layer.kind,
            head_dim: d,
        })
    }

    /// `xs`: `(batch, tokens, hidden)` in the type of the weights.
    pub(super) fn forward(
        &self,
        xs: &Tensor,
        angles: &Angles,
        cache: &mut LayerCache,
        path: AttentionPath,
    ) -> Result<Tensor> {
        let (batch, tokens, _) = xs.dims3()?;
        // Norms and rotation are f32; each of q, k and v is rounded to the type of the weights once.
        let rotated = |x: &Tensor| {
            candle_nn::rotary_emb::rope(x, &angles.cos, &angles.sin)?.to_dtype(xs.dtype())
        };
        let (q, k, v) = self.projected(xs, path)?;
        let q = rotated(&by_head(&self.q_norm.forward(&self.heads(&q)?)?)?)?;
        let k_raw = self.heads(&k)?;
        let v_raw = match v {
            Some(v) => self.heads(&v)?,
            None => k_raw.clone(),
        };
        let v = by_head(&self.v_norm.forward(&v_raw)?)?.to_dtype(xs.dtype())?;
        let out = if cache.holds_values_only() {
            // Both norms divide by the same root, so the weight of one is all that is between their outputs.
            let keys = self.rebuilt_keys(angles)?;
            let v = cache.append_values(&v)?;
            crate::attention_d512_shared_kv(&q, &v, &keys, SOFTMAX_SCALE)?
        } else {
            let k = rotated(&by_head(&self.k_norm.forward(&k_raw)?)?)?;
            let view = cache.append(&k, &v)?;
            match (path, self.kind) {
                // Causal at the end of the cache, where these tokens are.
                (AttentionPath::Fused, LayerKind::Full) => {
                    crate::attention_d512(&q, &view.k, &view.v, SOFTMAX_SCALE)?
                }
                // One row, the last, sees every key.
                (AttentionPath::Sdpa, LayerKind::Full) if tokens == 1 => {
                    sdpa::attention(&q, &view.k, &view.v, SOFTMAX_SCALE)?
                }
                _ => reference::attention(&q, &view.k, &view.v, SOFTMAX_SCALE, view.visible)?,
            }
        };
        let out = out.transpose(1, 2)?.reshape((batch, tokens, ()))?;
        self.o_proj.forward(&out)
    }

    /// Raw q, k and v, `(batch, tokens, heads * head_dim)`: in the type of the weights on plain ops, f32 from one product and
    /// from quantized weights.
    fn projected(
        &self,
        xs: &Tensor,
        path: AttentionPath,
    ) -> Result<(Tensor, Tensor, Option<Tensor>)> {
        let packed = match &self.qkv {
            Qkv::Packed(packed) => packed,
            Qkv::Apart { q, k, v } => {
                let v = v.as_ref().map(|v| v.forward(xs)).transpose()?;
                return Ok((q.forward(xs)?, k.forward(xs)?, v));
            }
        };
        let results = match path {
            AttentionPath::Reference | AttentionPath::Sdpa => None,
            AttentionPath::Fused | AttentionPath::FusedSharedKv => Some(packed.forward(xs)?),
        };
        let part = |name| match &results {
            None => Matrix::Dense(packed.block(name)?).forward(xs),
            Some(results) => results.get(name),
        };
        let v = match self.value_is_key {
            true => None,
            false => Some(part("v")?),
        };
        Ok((part("q")?, part("k")?, v))
    }

    fn rebuilt_keys(&self, angles: &Angles) -> Result<RotaryKeys> {
        match (&angles.keys, self.value_is_key) {
            (Some(tables), true) => RotaryKeys::new(self.k_norm.weight(), tables),
            _ => bail!("gemma4: the cache of a layer holds values alone, from which its keys do not follow"),
        }
    }

    /// `(batch, tokens, heads * head_dim)` as f32 `(batch, tokens, heads, head_dim)`.
    fn heads(&self, xs: &Tensor) -> Result<Tensor> {
        let (batch, tokens, _) = xs.dims3()?;
        xs.reshape((batch, tokens, (), self.head_dim))?
            .to_dtype(DType::F32)
    }
}

/// The weights of q, k and v; no v where the values are the keys.
#[derive(Debug, Clone)]
enum Qkv {
    /// Dense, one block a name.
    Packed(FusedProjection),
    /// One of them at least is quantized.
    Apart {
        q: Matrix,
        k: Matrix,
        v: Option<Matrix>,
    },
}

impl Qkv {
    fn new(q: Matrix, k: Matrix, v: Option<Matrix>) -> Result<Self> {
        let packed = match (&q, &k, &v) {
            (Matrix::Dense(q), Matrix::Dense(k), None) => {
                FusedProjection::pack(&[("q", q), ("k", k)])?
            }
            (Matrix::Dense(q), Matrix::Dense(k), Some(Matrix::Dense(v))) => {
                FusedProjection::pack(&[("q", q), ("k", k), ("v", v)])?
            }
            _ => return Ok(Self::Apart { q, k, v }),
        };
        Ok(Self::Packed(packed))
    }
}

/// `(batch, tokens, heads, head_dim)` to contiguous `(batch, heads, tokens, head_dim)`.
fn by_head(xs: &Tensor) -> Result<Tensor> {
    xs.transpose(1, 2)?.contiguous()
}
