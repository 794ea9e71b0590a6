//! Reads both dialects of Gemma 4's `config.json` into one [`Config`], and refuses what the graph does not compute.
//!
//! Published files carry `global_head_dim` and `num_global_key_value_heads`; files saved by transformers carry
//! `per_layer_config` instead. Either may be flat (text only) or nested under `text_config`. Sizes of the model must
//! be there; other keys that a file leaves out have the defaults of transformers.

use super::config::{Config, LayerConfig, LayerKind, RopeConfig};
use super::json::{shown, Fields};
use candle::{bail, Result};
use serde_json::{Map, Value};

const MOST_LAYERS: usize = 4096;

pub(super) fn parse(text: &str) -> Result<Config> {
    let root = super::json::object(text)?;
    let outer = Fields(&root);
    match outer.value("text_config") {
        None => resolve(outer, outer),
        Some(Value::Object(text)) => {
            outer.one_of("model_type", &["gemma4", "gemma4_unified"])?;
            resolve(outer, Fields(text))
        }
        Some(other) => bail!(
            "gemma4 config: `text_config` is {}, want an object",
            shown(other)
        ),
    }
}

/// `outer` is the whole file, `text` the part about the text decoder; the same for a flat file.
fn resolve(outer: Fields, text: Fields) -> Result<Config> {
    text.one_of("model_type", &["gemma4_text", "gemma4_unified_text"])?;
    refuse_unimplemented(outer, text)?;
    let num_attention_heads = text.dim("num_attention_heads")?;
    let config = Config {
        vocab_size: text.dim("vocab_size")?,
        hidden_size: text.dim("hidden_size")?,
        intermediate_size: text.dim("intermediate_size")?,
        num_attention_heads,
        rms_norm_eps: text.positive_or("rms_norm_eps", 1e-6)?,
        final_logit_softcapping: text.positive("final_logit_softcapping")?,
        max_position_embeddings: text.dim("max_position_embeddings")?,
        tie_word_embeddings: match text.get("tie_word_embeddings")? {
            Some(tied) => tied,
            None => outer.get("tie_word_embeddings")?.unwrap_or(true),
        },
        layers: resolve_layers(text, num_attention_heads)?,
        bos_token_id: text.get("bos_token_id")?.unwrap_or(2),
        eos_token_ids: {
            let mut ids = outer.token_ids("eos_token_id")?;
            ids.extend(text.token_ids("eos_token_id")?);
            if [outer, text]
                .iter()
                .all(|fields| fields.value("eos_token_id").is_none())
            {
                ids.push(1);
            }
            ids.sort_unstable();
            ids.dedup();
            ids
        },
    };
    match config.of_real_size() {
        Ok(config) => Ok(config),
        Err(fault) => bail!("gemma4 config: {fault}"),
    }
}

/// Refuses, by name, what the graph does not compute: ignoring such a key would load and then babble.
fn refuse_unimplemented(outer: Fields, text: Fields) -> Result<()> {
    // An absent key means 256 here, so only an explicit 0 or null says that there are no per-layer inputs.
    match text.value("hidden_size_per_layer_input") {
        Some(Value::Null) => {}
        Some(v) if v.as_u64() == Some(0) => {}
        Some(v) => bail!("gemma4 config: `hidden_size_per_layer_input` is {v}: per-layer inputs (E2B, E4B) are not implemented, want 0"),
        None => bail!("gemma4 config: `hidden_size_per_layer_input` is absent, which means 256: per-layer inputs (E2B, E4B) are not implemented, want 0"),
    }
    if text.get::<usize>("num_kv_shared_layers")?.unwrap_or(0) > 0 {
        bail!("gemma4 config: `num_kv_shared_layers` is {}: layers that share their KV cache are not implemented, want 0", text.shown("num_kv_shared_layers"));
    }
    for (key, what) in [
        ("enable_moe_block", "mixture-of-experts layers are"),
        ("use_double_wide_mlp", "a double-wide MLP is"),
        ("attention_bias", "projection biases are"),
    ] {
        if text.get::<bool>(key)?.unwrap_or(false) {
            bail!("gemma4 config: `{key}` is true: {what} not implemented, want false");
        }
    }
    for (key, what) in [
        ("attn_logit_softcapping", "a cap of attention scores is"),
        (
            "query_pre_attn_scalar",
            "another scale of queries than 1 is",
        ),
    ] {
        if text.present(key) {
            bail!(
                "gemma4 config: `{key}` is {}: {what} not implemented, want null",
                text.shown(key)
            );
        }
    }
    match text.get::<String>("hidden_activation")?.as_deref() {
        None | Some("gelu_pytorch_tanh") => {}
        Some(other) => {
            bail!("gemma4 config: `hidden_activation` is {other:?}, want \"gelu_pytorch_tanh\"")
        }
    }
    match text.get::<String>("use_bidirectional_attention")?.as_deref() {
        // "vision" changes nothing for text.
        None | Some("vision") => {}
        Some(other) => bail!("gemma4 config: `use_bidirectional_attention` is {other:?}: only causal text is implemented, want null or \"vision\""),
    }
    for fields in [outer, text] {
        if fields.present("quantization_config") {
            bail!("gemma4 config: `quantization_config` is present: quantized safetensors are not implemented, want bf16, f16 or f32 weights");
        }
        if fields.present("rope_scaling") {
            bail!("gemma4 config: `rope_scaling` is {}, want it absent: Gemma 4 has `rope_parameters`", fields.shown("rope_scaling"));
        }
    }
    Ok(())
}

fn resolve_layers(text: Fields, num_attention_heads: usize) -> Result<Vec<LayerConfig>> {
    let count = text.get::<usize>("num_hidden_layers")?.unwrap_or(0);
    if count == 0 || count > MOST_LAYERS {
        bail!("gemma4 config: `num_hidden_layers` is {count}, want 1 to {MOST_LAYERS}");
    }
    let types = match text.get::<Vec<String>>("layer_types")? {
        Some(types) if types.len() == count => types,
        Some(types) => bail!(
            "gemma4 config: `layer_types` has {} entries, want `num_hidden_layers` = {count}",
            types.len()
        ),
        None => (1..=count)
            .map(|i| {
                if i % 6 == 0 {
                    "full_attention"
                } else {
                    "sliding_attention"
                }
                .to_string()
            })
            .collect(),
    };
    let window = text.dim("sliding_window")?;
    let key_is_value = text.get::<bool>("attention_k_eq_v")?.unwrap_or(false);
    let overrides = Overrides::new(text, count)?;
    let mut layers = Vec::with_capacity(count);
    for (i, name) in types.iter().enumerate() {
        let kind = match name.as_str() {
            "sliding_attention" => LayerKind::Sliding { window },
            "full_attention" => LayerKind::Full,
            other => bail!("gemma4 config: `layer_types[{i}]` is {other:?}, want \"sliding_attention\" or \"full_attention\""),
        };
        let full = kind == LayerKind::Full;
        let (head_dim, num_key_value_heads) =
            overrides.sizes(text, i, full && key_is_value, full)?;
        if head_dim % 2 != 0 {
            bail!("gemma4 config: head_dim of layer {i} is {head_dim}, want an even number");
        }
        if !num_attention_heads.is_multiple_of(num_key_value_heads) {
            bail!("gemma4 config: layer {i} has {num_attention_heads} query heads and {num_key_value_heads} KV heads, want a multiple");
        }
        layers.push(LayerConfig {
            kind,
            head_dim,
            num_key_value_heads,
            value_is_key: full && key_is_value,
            rope: rope_config(text, name, head_dim)?,
        });
    }
    // transformers turns a sliding last layer into a full one; a file that needs that is no Gemma 4.
    match layers.last() {
        Some(last) if last.kind == LayerKind::Full => Ok(layers),
        _ => bail!("gemma4 config: `layer_types[{}]` is \"sliding_attention\", want \"full_attention\" for the last layer", count - 1),
    }
}

/// Where full layers differ in size from the sliding ones, in either dialect.
enum Overrides<'a> {
    /// `global_head_dim`, `num_global_key_value_heads`.
    Global {
        head_dim: usize,
        num_key_value_heads: Option<usize>,
    },
    /// `per_layer_config`, keyed by layer index.
    PerLayer(&'a Map<String, Value>),
}

impl<'a> Overrides<'a> {
    fn new(text: Fields<'a>, count: usize) -> Result<Self> {
        let per_layer = match text.value("per_layer_config") {
            None | Some(Value::Null) => {
                return Ok(Self::Global {
                    head_dim: text.dim_or("global_head_dim", 512)?,
                    num_key_value_heads: text.opt_dim("num_global_key_value_heads")?,
                })
            }
            Some(Value::Object(map)) => map,
            Some(other) => bail!(
                "gemma4 config: `per_layer_config` is {}, want an object keyed by layer index",
                shown(other)
            ),
        };
        for key in ["global_head_dim", "num_global_key_value_heads"] {
            if text.present(key) {
                bail!("gemma4 config: both `per_layer_config` and `{key}` are present, want one dialect");
            }
        }
        for (key, value) in per_layer {
            if !key
                .parse::<usize>()
                .is_ok_and(|i| i < count && i.to_string() == *key)
            {
                bail!("gemma4 config: `per_layer_config` has the key {key:?}, want a layer index below {count}");
            }
            let Value::Object(fields) = value else {
                bail!(
                    "gemma4 config: `per_layer_config.{key}` is {}, want an object",
                    shown(value)
                );
            };
            if let Some(name) = fields
                .keys()
                .find(|k| !["head_dim", "num_key_value_heads"].contains(&k.as_str()))
            {
                bail!("gemma4 config: `per_layer_config.{key}.{name}` is not implemented, want only head_dim and num_key_value_heads");
            }
        }
        Ok(Self::PerLayer(per_layer))
    }

    /// Head dimension and KV heads of layer `i`.
    fn sizes(
        &self,
        text: Fields,
        i: usize,
        own_kv_heads: bool,
        full: bool,
    ) -> Result<(usize, usize)> {
        let sliding = || {
            Ok((
                text.dim_or("head_dim", 256)?,
                text.dim("num_key_value_heads")?,
            ))
        };
        match self {
            Self::Global {
                head_dim,
                num_key_value_heads,
            } if full => match num_key_value_heads {
                Some(heads) if own_kv_heads => Ok((*head_dim, *heads)),
                _ => Ok((*head_dim, text.dim("num_key_value_heads")?)),
            },
            Self::Global { .. } => sliding(),
            Self::PerLayer(map) => {
                let (head_dim, heads) = sliding()?;
                match map.get(&i.to_string()) {
                    Some(Value::Object(fields)) => {
                        let own = Fields(fields);
                        Ok((
                            own.dim_or("head_dim", head_dim)?,
                            own.dim_or("num_key_value_heads", heads)?,
                        ))
                    }
                    _ => Ok((head_dim, heads)),
                }
            }
        }
    }
}

fn rope_config(text: Fields, layer_type: &str, head_dim: usize) -> Result<RopeConfig> {
    let full = layer_type == "full_attention";
    let (wanted, theta) = if full {
        ("proportional", 1e6)
    } else {
        ("default", 1e4)
    };
    let all = match text.value("rope_parameters") {
        None | Some(Value::Null) => None,
        Some(Value::Object(map)) => Some(map),
        Some(other) => bail!(
            "gemma4 config: `rope_parameters` is {}, want an object",
            shown(other)
        ),
    };
    let Some(all) = all else {
        let rotated_pairs = if full { head_dim / 8 } else { head_dim / 2 };
        return Ok(RopeConfig {
            theta,
            rotated_pairs,
            factor: 1.0,
        });
    };
    let Some(Value::Object(own)) = all.get(layer_type) else {
        bail!("gemma4 config: `rope_parameters.{layer_type}` is missing, want an object with rope_type and rope_theta");
    };
    let known = [
        "rope_type",
        "rope_theta",
        "partial_rotary_factor",
        "factor",
        "attention_factor",
    ];
    let other = own
        .iter()
        .find(|(key, value)| !value.is_null() && !known.contains(&key.as_str()));
    if let Some((key, value)) = other {
        bail!("gemma4 config: `rope_parameters.{layer_type}.{key}` is {}, which is not implemented, want it absent", shown(value));
    }
    let own = Fields(own);
    let scale = own.positive_or("attention_factor", 1.0)?;
    if scale != 1.0 {
        bail!("gemma4 config: `rope_parameters.{layer_type}.attention_factor` is {scale}: scaled rotations are not implemented, want 1");
    }
    let rope_type = own
        .get::<String>("rope_type")?
        .unwrap_or_else(|| "default".into());
    if rope_type != wanted && !(full && rope_type == "default") {
        bail!("gemma4 config: `rope_parameters.{layer_type}.rope_type` is {rope_type:?}, want {wanted:?}");
    }
    let partial = own.positive_or("partial_rotary_factor", 1.0)?;
    if partial > 1.0 {
        bail!("gemma4 config: `rope_parameters.{layer_type}.partial_rotary_factor` is {partial}, want at most 1");
    }
    let factor = own.positive_or("factor", 1.0)?;
    if rope_type == "default" && (partial != 1.0 || factor != 1.0) {
        bail!("gemma4 config: `rope_parameters.{layer_type}` has partial_rotary_factor {partial} and factor {factor} with rope_type \"default\", want 1 and 1, or \"proportional\"");
    }
    Ok(RopeConfig {
        theta: own.positive_or("rope_theta", theta)?,
        rotated_pairs: (partial * head_dim as f64 / 2.0) as usize,
        factor,
    })
}
