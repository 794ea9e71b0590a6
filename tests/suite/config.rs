//! Both dialects of `config.json` resolve to the same layers, and what the graph does not compute is refused by name.

use crate::common::message;
use gem::models::gemma4::{Config, LayerKind, StopTokens};
use serde_json::{json, Value};

/// The text part of the published 31B configuration.
fn text_31b() -> Value {
    let layer_types: Vec<_> = (0..60)
        .map(|i| {
            if i % 6 == 5 {
                "full_attention"
            } else {
                "sliding_attention"
            }
        })
        .collect();
    json!({
        "model_type": "gemma4_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 60,
        "layer_types": layer_types, "num_attention_heads": 32, "num_key_value_heads": 16,
        "num_global_key_value_heads": 4, "head_dim": 256, "global_head_dim": 512, "attention_k_eq_v": true,
        "sliding_window": 1024, "max_position_embeddings": 262144,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
        },
        "rms_norm_eps": 1e-6, "hidden_activation": "gelu_pytorch_tanh", "final_logit_softcapping": 30.0,
        "vocab_size": 262144, "tie_word_embeddings": true, "attention_bias": false, "attention_dropout": 0.0,
        "use_bidirectional_attention": "vision", "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0,
        "enable_moe_block": false, "use_double_wide_mlp": false, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
    })
}

fn nested(text: Value) -> Value {
    json!({
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "eos_token_id": [1, 106],
        "image_token_id": 258880, "audio_config": null, "vision_config": {"hidden_size": 1152, "model_type": "gemma4_vision"},
        "text_config": text,
    })
}

fn parse(config: &Value) -> candle::Result<Config> {
    Config::from_json(&config.to_string())
}

/// `text` with one key set, or removed by `null`-free deletion where `value` is `None`.
fn with(mut text: Value, key: &str, value: Option<Value>) -> Value {
    let fields = text.as_object_mut().unwrap();
    match value {
        Some(value) => fields.insert(key.into(), value),
        None => fields.remove(key),
    };
    text
}

fn per_layer_dialect() -> Value {
    let mut text = text_31b();
    for key in ["global_head_dim", "num_global_key_value_heads"] {
        text = with(text, key, None);
    }
    let overrides: serde_json::Map<_, _> = (5..60)
        .step_by(6)
        .map(|i| {
            (
                i.to_string(),
                json!({"head_dim": 512, "num_key_value_heads": 4}),
            )
        })
        .collect();
    with(text, "per_layer_config", Some(overrides.into()))
}

#[test]
fn the_31b_resolves_to_ten_full_layers_of_four_kv_heads_without_v_proj() {
    let config = parse(&nested(text_31b())).unwrap();
    assert_eq!(config.layers.len(), 60);
    for (i, layer) in config.layers.iter().enumerate() {
        if i % 6 == 5 {
            assert_eq!(
                (layer.kind, layer.head_dim, layer.num_key_value_heads),
                (LayerKind::Full, 512, 4)
            );
            assert!(layer.value_is_key);
            assert_eq!((layer.rope.theta, layer.rope.rotated_pairs), (1e6, 64));
        } else {
            let sliding = LayerKind::Sliding { window: 1024 };
            assert_eq!(
                (layer.kind, layer.head_dim, layer.num_key_value_heads),
                (sliding, 256, 16)
            );
            assert!(!layer.value_is_key);
            assert_eq!((layer.rope.theta, layer.rope.rotated_pairs), (1e4, 128));
        }
    }
    assert_eq!(config.eos_token_ids, [1, 106]);
    assert_eq!(config.final_logit_softcapping, Some(30.0));
}

#[test]
fn the_31b_has_832_tensors_and_30_697_345_340_parameters() {
    let shapes = parse(&nested(text_31b())).unwrap().tensor_shapes();
    assert_eq!(shapes.len(), 832);
    assert_eq!(
        shapes
            .iter()
            .map(|(_, s)| s.iter().product::<usize>())
            .sum::<usize>(),
        30_697_345_340
    );
    assert!(!shapes
        .iter()
        .any(|(name, _)| name == "layers.5.self_attn.v_proj.weight"));
    assert!(shapes
        .iter()
        .any(|(name, s)| name == "layers.4.self_attn.v_proj.weight" && *s == [4096, 5376]));
}

#[test]
fn flat_nested_and_per_layer_dialects_resolve_to_the_same_layers() {
    let published = parse(&nested(text_31b())).unwrap();
    assert_eq!(parse(&nested(per_layer_dialect())).unwrap(), published);
    let flat = parse(&text_31b()).unwrap();
    assert_eq!(flat.layers, published.layers);
    assert_eq!(flat.eos_token_ids, [1]);
    // A text-only export says so with a null.
    let mut text_only = nested(text_31b());
    text_only["vision_config"] = Value::Null;
    assert_eq!(parse(&text_only).unwrap(), published);
}

#[test]
fn left_out_keys_have_the_defaults_of_transformers() {
    let mut text = text_31b();
    for key in [
        "layer_types",
        "rope_parameters",
        "head_dim",
        "global_head_dim",
        "rms_norm_eps",
        "bos_token_id",
    ] {
        text = with(text, key, None);
    }
    assert_eq!(
        parse(&nested(text)).unwrap(),
        parse(&nested(text_31b())).unwrap()
    );
    let unshared = with(text_31b(), "num_global_key_value_heads", None);
    assert_eq!(parse(&unshared).unwrap().layers[5].num_key_value_heads, 16);
    // Own KV heads of full layers apply only where K and V are one projection.
    let separate = parse(&with(text_31b(), "attention_k_eq_v", Some(json!(false)))).unwrap();
    assert_eq!(
        (
            separate.layers[5].num_key_value_heads,
            separate.layers[5].value_is_key
        ),
        (16, false)
    );
}

#[test]
fn declared_keys_are_taken_over() {
    let mut text = with(text_31b(), "bos_token_id", Some(json!(7)));
    text["rope_parameters"]["full_attention"]["factor"] = json!(8.0);
    let config = parse(&text).unwrap();
    assert_eq!(
        (
            config.bos_token_id,
            config.layers[5].rope.factor,
            config.layers[4].rope.factor
        ),
        (7, 8.0, 1.0)
    );
    assert_eq!(
        parse(&with(text_31b(), "eos_token_id", None))
            .unwrap()
            .eos_token_ids,
        [1]
    );
}

#[test]
fn no_per_layer_inputs_is_said_by_zero_or_null() {
    for none in [json!(0), Value::Null] {
        parse(&with(text_31b(), "hidden_size_per_layer_input", Some(none))).unwrap();
    }
}

/// Every refusal names the key, what it holds and what is wanted. huggingface/candle#3967: variants with inputs that the graph
/// ignored loaded, and printed random words.
#[test]
fn variants_and_malformed_values_are_refused_by_name() {
    let cases: Vec<(&str, Option<Value>)> = vec![
        ("hidden_size_per_layer_input", Some(json!(256))),
        ("hidden_size_per_layer_input", None),
        ("num_kv_shared_layers", Some(json!(20))),
        ("enable_moe_block", Some(json!(true))),
        ("use_double_wide_mlp", Some(json!(true))),
        ("attention_bias", Some(json!(true))),
        ("hidden_activation", Some(json!("gelu"))),
        ("use_bidirectional_attention", Some(json!("all"))),
        (
            "quantization_config",
            Some(json!({"quant_method": "bitsandbytes"})),
        ),
        ("model_type", Some(json!("gemma3_text"))),
        ("model_type", None),
        ("hidden_size", None),
        ("hidden_size", Some(json!(0))),
        ("hidden_size", Some(json!(-1))),
        ("hidden_size", Some(json!("5376"))),
        ("vocab_size", Some(json!(1u64 << 40))),
        ("num_hidden_layers", Some(json!(1_000_000))),
        ("num_hidden_layers", Some(json!(59))),
        ("num_key_value_heads", Some(json!(5))),
        ("num_global_key_value_heads", Some(json!(0))),
        ("head_dim", Some(json!(255))),
        ("sliding_window", Some(json!(0))),
        ("rms_norm_eps", Some(json!(0.0))),
        ("final_logit_softcapping", Some(json!(-30.0))),
        ("layer_types", Some(json!("full_attention"))),
        (
            "rope_parameters",
            Some(json!({"sliding_attention": {"rope_type": "default"}})),
        ),
        (
            "rope_parameters",
            Some(json!({"sliding_attention": {"rope_type": "yarn"}, "full_attention": {}})),
        ),
        ("per_layer_config", Some(json!({"5": {"head_dim": 512}}))),
        ("eos_token_id", Some(json!("</s>"))),
        (
            "rope_scaling",
            Some(json!({"rope_type": "linear", "factor": 8.0})),
        ),
        (
            "rope_parameters",
            Some(
                json!({"sliding_attention": {"rope_type": "default", "factor": 8.0}, "full_attention": {}}),
            ),
        ),
        ("num_hidden_layers", Some(json!(0))),
        // Each is a number that a file may hold; bytes of such models passed 64 bits.
        ("hidden_size", Some(json!(1 << 24))),
        ("intermediate_size", Some(json!((1 << 20) + 1))),
        ("num_attention_heads", Some(json!(1 << 24))),
        ("attn_logit_softcapping", Some(json!(50.0))),
        ("query_pre_attn_scalar", Some(json!(256))),
        ("bos_token_id", Some(json!(262144))),
        ("eos_token_id", Some(json!([1, 262144]))),
        ("rms_norm_eps", Some(json!(1e-300))),
        ("rms_norm_eps", Some(json!(1.0))),
        ("final_logit_softcapping", Some(json!(1e-40))),
        ("final_logit_softcapping", Some(json!(1e300))),
    ];
    let errors: Vec<_> = cases
        .into_iter()
        .map(|(key, value)| {
            let shown = value.as_ref().map_or("absent".into(), Value::to_string);
            match parse(&with(text_31b(), key, value)) {
                Ok(_) => panic!("{key} = {shown} was accepted"),
                Err(e) => message(e),
            }
        })
        .collect();
    insta::assert_snapshot!(errors.join("\n"));
}

#[test]
fn damaged_layers_and_files_are_refused_by_name() {
    let layer_types = |at: usize, name: &str| {
        let mut text = text_31b();
        text["layer_types"][at] = json!(name);
        text
    };
    let per_layer = |key: &str, value: Value| {
        let mut text = per_layer_dialect();
        text["per_layer_config"][key] = value;
        text.to_string()
    };
    let deep = "[".repeat(100_000);
    let cases = [
        layer_types(3, "linear_attention").to_string(),
        layer_types(59, "sliding_attention").to_string(),
        per_layer("60", json!({"head_dim": 512})),
        per_layer("five", json!({"head_dim": 512})),
        per_layer("05", json!({"head_dim": 512})),
        per_layer("5", json!({"sliding_window": 512})),
        per_layer("5", json!(512)),
        with(nested(text_31b()), "text_config", Some(json!(7))).to_string(),
        with(nested(text_31b()), "model_type", Some(json!("gemma3"))).to_string(),
        "[1, 2]".into(),
        "{\"hidden_size\": 1".into(),
        deep,
    ];
    let errors: Vec<_> = cases
        .iter()
        .map(|text| match Config::from_json(text) {
            Ok(_) => panic!("{text} was accepted"),
            Err(e) => message(e),
        })
        .collect();
    insta::assert_snapshot!(errors.join("\n"));
}

#[test]
fn a_rotation_is_what_its_keys_say_or_refused() {
    let with = |key: &str, value: Value| {
        let mut text = text_31b();
        text["rope_parameters"]["full_attention"][key] = value;
        parse(&text)
    };
    let plain = parse(&text_31b()).unwrap();
    for (key, value) in [
        ("attention_factor", json!(1.0)),
        ("attention_factor", Value::Null),
        ("beta_fast", Value::Null),
    ] {
        assert_eq!(with(key, value).unwrap(), plain, "{key}");
    }
    for (key, value, want) in [
        ("attention_factor", json!(2), "`rope_parameters.full_attention.attention_factor` is 2: scaled rotations are not implemented, want 1"),
        ("beta_fast", json!(32), "`rope_parameters.full_attention.beta_fast` is 32, which is not implemented, want it absent"),
        ("rope_theta", json!(1e-300), "the base of rotary frequencies is 1e-300, want 1.0 to 1000000000000.0"),
        ("rope_theta", json!(1e300), "the base of rotary frequencies is 1e300, want 1.0 to 1000000000000.0"),
        ("factor", json!(1e-300), "the factor of rotary frequencies is 1e-300, want 0.001 to 1000000.0"),
    ] {
        assert_eq!(message(with(key, value).unwrap_err()), format!("gemma4 config: {want}"));
    }
}

#[test]
fn stop_tokens_are_tokens() {
    let config = parse(&text_31b()).unwrap();
    let stop = |id: u32| StopTokens::new(&config, Some(&format!(r#"{{"eos_token_id":[1,{id}]}}"#)));
    assert_eq!(stop(262143).unwrap().ids(), [1, 262143]);
    assert_eq!(
        message(stop(262144).unwrap_err()),
        "gemma4 config: eos_token_id is 262144, want one below the vocabulary of 262144"
    );
}

/// The last of the two counted, and gave another text.
#[test]
fn a_key_that_is_there_twice_is_refused() {
    let nested = nested(text_31b()).to_string();
    for (at, twin) in [
        ("{", r#""model_type":"gemma4","#),
        (r#""text_config":{"#, r#""sliding_window":3,"#),
        (r#""full_attention":{"#, r#""rope_theta":1.0,"#),
        (r#""full_attention":{"#, r#""rope_theta":null,"#),
    ] {
        let text = nested.replacen(at, &format!("{at}{twin}"), 1);
        let error = message(Config::from_json(&text).unwrap_err());
        let (key, _) = twin.split_once(':').unwrap();
        let want = format!("gemma4 config: {key} is there twice at line 1 ");
        assert!(error.starts_with(&want), "want {want}: {error}");
    }
    let config = parse(&text_31b()).unwrap();
    let generation = r#"{"eos_token_id":[1],"eos_token_id":[2]}"#;
    let error = message(StopTokens::new(&config, Some(generation)).unwrap_err());
    assert_eq!(
        error,
        "gemma4 config: \"eos_token_id\" is there twice at line 1 column 34"
    );
}
