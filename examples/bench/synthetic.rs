//! Models of a published shape with random weights: time and memory do not depend on what the weights are.

use crate::args::Shape;
use candle::{DType, Device, Result, Shape as TensorShape, Tensor};
use candle_nn::var_builder::SimpleBackend;
use candle_nn::{Init, VarBuilder};
use gem::models::gemma4::Config;
use half::{bf16, f16};
use serde_json::json;

/// The layers of the 31B: five sliding ones, a full one, and so on.
const PERIOD: usize = 6;
const LAYERS_31B: usize = 60;

/// The configuration of `shape`, with the last `layers` of its layers and `vocab` of its tokens.
pub fn config(shape: Shape, layers: Option<usize>, vocab: Option<usize>) -> Result<Config> {
    let Shape::Gemma31B = shape;
    let layers = layers.unwrap_or(LAYERS_31B);
    if layers > LAYERS_31B {
        candle::bail!("--layers is {layers}, want at most the {LAYERS_31B} of the shape");
    }
    let kind = |from_the_end: usize| match from_the_end % PERIOD {
        0 => "full_attention",
        _ => "sliding_attention",
    };
    let kinds: Vec<&str> = (0..layers).rev().map(kind).collect();
    let config = json!({
        "model_type": "gemma4_text",
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_global_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": true,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            "sliding_attention": { "rope_type": "default", "rope_theta": 10000.0 },
            "full_attention": { "rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25 },
        },
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "vocab_size": vocab.unwrap_or(262144),
        "tie_word_embeddings": true,
        "attention_bias": false,
        "attention_dropout": 0.0,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "enable_moe_block": false,
        "use_double_wide_mlp": false,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    });
    Config::from_json(&config.to_string())
}

/// Weights for `config`, made where they are asked for.
pub fn weights(dtype: DType, device: &Device) -> VarBuilder<'static> {
    VarBuilder::from_backend(Box::new(Random), dtype, device.clone())
}

struct Random;

/// So many values, over and over: odd, so that rows next to each other are not alike.
const BLOCK: usize = 65_537;

impl SimpleBackend for Random {
    fn get(
        &self,
        shape: TensorShape,
        name: &str,
        _: Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        if shape.rank() == 1 {
            return Tensor::ones(shape, dtype, device);
        }
        // Outputs of the size of inputs.
        let size = (3.0 / shape.dims()[1] as f64).sqrt();
        if !device.is_cpu() {
            return Tensor::rand(-size as f32, size as f32, shape, device)?.to_dtype(dtype);
        }
        let block = Tensor::rand(-size as f32, size as f32, BLOCK, device)?;
        let offset = name
            .bytes()
            .fold(0usize, |sum, byte| sum * 31 % BLOCK + byte as usize);
        fn repeated<T: candle::WithDType>(
            block: Tensor,
            offset: usize,
            shape: TensorShape,
        ) -> Result<Tensor> {
            let block = block.to_dtype(T::DTYPE)?.to_vec1::<T>()?;
            let values = block.iter().copied().cycle().skip(offset % BLOCK);
            let values: Vec<T> = values.take(shape.elem_count()).collect();
            Tensor::from_vec(values, shape, &Device::Cpu)
        }
        match dtype {
            DType::BF16 => repeated::<bf16>(block, offset, shape),
            DType::F16 => repeated::<f16>(block, offset, shape),
            _ => repeated::<f32>(block, offset, shape),
        }
    }

    fn get_unchecked(&self, name: &str, _: DType, _: &Device) -> Result<Tensor> {
        candle::bail!("synthetic weights: {name} was asked for without a shape")
    }

    fn contains_tensor(&self, _: &str) -> bool {
        true
    }
}
