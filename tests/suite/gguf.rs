//! GGUF files of the fixtures and of the trained model: the same config, tokens and logits as the checkpoint they are of.

use crate::common::fixture::{fixture_checkpoint, FIXTURES};
use crate::common::model::paths;
use crate::common::numeric::{max_abs_diff, rms_diff};
use crate::common::{message, trained_model};
use crate::example_chat::{Encoder, Piece};
use crate::example_quantize_convert::{encode, Plan};
use crate::example_quantize_write::Meta;
use crate::gguf_support::{altered, made, placed, set, trained_model_with, try_altered, write};
use candle::quantized::{GgmlDType, QStorage, QTensor};
use candle::{DType, Device, Result, Tensor};
use gem::models::gemma4::{AttentionPath, Config, Gguf, Model, StopTokens, Weights};
use std::path::Path;
use tokenizers::Tokenizer;

fn dense(folder: &Path, dtype: DType) -> Model {
    let config = Config::from_file(folder.join("config.json")).unwrap();
    let weights = Weights::open_dir(folder).unwrap();
    Model::new(&config, weights.var_builder(dtype, &Device::Cpu)).unwrap()
}

fn logits(model: &Model, path: AttentionPath, tokens: usize) -> Tensor {
    let ids: Vec<u32> = (0..tokens as u32).map(|i| (i * 37 + 2) % 250).collect();
    let ids = Tensor::new(ids, &Device::Cpu)
        .unwrap()
        .unsqueeze(0)
        .unwrap();
    let mut cache = model.new_cache(path).unwrap();
    model.forward_all(&ids, &mut cache).unwrap()
}

#[test]
fn the_config_and_the_logits_of_plain_types_are_those_of_the_checkpoint() {
    for name in FIXTURES {
        let dir = fixture_checkpoint(name);
        let config = Config::from_file(dir.path().join("config.json")).unwrap();
        // The fixtures are bf16, which f32 holds; what a model of either type computes is the same to the bit.
        for (stored, dtype) in [
            (GgmlDType::F32, DType::F32),
            (GgmlDType::BF16, DType::F32),
            (GgmlDType::BF16, DType::BF16),
        ] {
            let (_file, gguf) = made(dir.path(), stored);
            let mut of_file = gguf.config().clone();
            // Without a tokenizer there is nothing to say of these.
            (of_file.bos_token_id, of_file.eos_token_ids) =
                (config.bos_token_id, config.eos_token_ids.clone());
            assert_eq!(of_file, config, "{name}");
            let (model, want) = (
                Model::from_gguf(&gguf, dtype, &Device::Cpu).unwrap(),
                dense(dir.path(), dtype),
            );
            for path in paths(&model) {
                let distance =
                    max_abs_diff(&logits(&model, path, 40), &logits(&want, path, 40)).unwrap();
                assert_eq!(distance, 0.0, "{name} {stored:?} as {dtype:?}, {path}");
            }
        }
    }
}

/// The format's default is 32.
#[test]
fn a_file_of_any_alignment_gives_the_same_logits() {
    let dir = fixture_checkpoint(FIXTURES[0]);
    let of = |gguf: &Gguf| {
        let model = Model::from_gguf(gguf, DType::F32, &Device::Cpu).unwrap();
        logits(&model, AttentionPath::Reference, 40)
    };
    let (_file, want) = made(dir.path(), GgmlDType::Q8_0);
    for alignment in [1u32, 8, 32, 64, 4096, 65536] {
        let next = std::cell::Cell::new(0usize);
        let place = |_, _, bytes| {
            // At an odd multiple, which no larger alignment allows.
            let step = alignment as usize;
            let start = (next.get().div_ceil(step) | 1) * step;
            next.set(start + bytes);
            start
        };
        let (_file, gguf) = placed(dir.path(), GgmlDType::Q8_0, alignment, place);
        let gguf = gguf.unwrap();
        gguf.check().unwrap();
        assert_eq!(gguf.config(), want.config());
        let distance = max_abs_diff(&of(&gguf), &of(&want)).unwrap();
        assert_eq!(distance, 0.0, "alignment {alignment}");
    }
}

#[test]
fn tensors_that_overlap_are_refused_by_both_names() {
    let dir = fixture_checkpoint(FIXTURES[0]);
    let plan = Plan::new(dir.path(), GgmlDType::Q8_0).unwrap();
    let number = |name| plan.tensors.iter().position(|t| t.name == name).unwrap();
    let starts: Vec<usize> = plan
        .tensors
        .iter()
        .scan(0, |at, tensor| {
            let start = *at;
            *at += tensor.bytes().next_multiple_of(32);
            Some(start)
        })
        .collect();
    let (up, gate) = (
        number("blk.0.ffn_up.weight"),
        number("blk.0.ffn_gate.weight"),
    );
    let (norm, embd) = (
        number("blk.3.attn_norm.weight"),
        number("token_embd.weight"),
    );
    // In the same place, and far inside of a larger one.
    for (moved, onto, by) in [(gate, up, 0), (norm, embd, 64)] {
        let place = |i, start, _| if i == moved { starts[onto] + by } else { start };
        let (file, gguf) = placed(dir.path(), GgmlDType::Q8_0, 32, place);
        let gguf = gguf.unwrap();
        let error = message(gguf.check().unwrap_err());
        let path = file.path().join("model.gguf").display().to_string();
        let [moved, onto] = [moved, onto].map(|i| plan.tensors[i].name.as_str());
        for want in [path.as_str(), moved, onto, "starts at byte", ", inside of "] {
            assert!(error.contains(want), "want {want}: {error}");
        }
        assert!(!error.contains("faults"), "{error}");
        Model::from_gguf(&gguf, DType::F32, &Device::Cpu).unwrap_err();
    }
}

/// The error of the logits by type, model dtype and path.
fn assert_logits_are_near(dir: &Path, cases: &[(GgmlDType, f64)], dtypes: &[DType], tokens: usize) {
    let want = dense(dir, DType::F32);
    for &(stored, bound) in cases {
        let (_file, gguf) = made(dir, stored);
        for &dtype in dtypes {
            let model = Model::from_gguf(&gguf, dtype, &Device::Cpu).unwrap();
            for path in paths(&model) {
                let want = logits(&want, path, tokens);
                let rms = rms_diff(&logits(&model, path, tokens), &want).unwrap();
                println!("{stored:?} {dtype:?} {path}: rms {rms}");
                assert!(
                    rms > 0.0 && rms < bound,
                    "{stored:?} {dtype:?} {path}: rms {rms}, want at most {bound}"
                );
            }
        }
    }
}

#[test]
fn quantized_logits_are_within_the_error_of_their_type() {
    let cases = [(GgmlDType::Q8_0, 0.15), (GgmlDType::Q4_0, 2.5)];
    assert_logits_are_near(&trained_model(), &cases, &[DType::F32], 60);
}

/// `cargo test --release -- --ignored --nocapture every_quantized_type_has_logits`
#[test]
#[ignore = "takes minutes"]
fn every_quantized_type_has_logits_within_its_error() {
    let cases = [
        (GgmlDType::Q8_0, 0.15),
        (GgmlDType::Q6K, 0.2),
        (GgmlDType::Q5K, 0.8),
        (GgmlDType::Q4K, 1.2),
        (GgmlDType::Q4_0, 2.5),
    ];
    let dtypes = [DType::F32, DType::BF16, DType::F16];
    assert_logits_are_near(&trained_model(), &cases, &dtypes, 300);
}

/// huggingface/candle#3856: row r of the weight holds r + 1, so no row can stand for another.
#[test]
fn every_row_of_a_quantized_matrix_is_multiplied() -> Result<()> {
    for dtype in [
        GgmlDType::Q4_0,
        GgmlDType::Q4_1,
        GgmlDType::Q5_0,
        GgmlDType::Q5_1,
        GgmlDType::Q8_0,
        GgmlDType::Q2K,
        GgmlDType::Q3K,
        GgmlDType::Q4K,
        GgmlDType::Q5K,
        GgmlDType::Q6K,
    ] {
        let k = dtype.block_size().max(64);
        for n in [1usize, 24, 30] {
            // Half and one and a half times that, since a block of equal values is no scale to some types.
            let value = |i| (i / k + 1) as f32 * [0.5, 1.5][i % 2];
            let values: Vec<f32> = (0..n * k).map(value).collect();
            let bytes = encode(&values, dtype).unwrap();
            let weight = QTensor::new(
                QStorage::from_data(bytes.into(), &Device::Cpu, dtype)?,
                (n, k),
            )?;
            let rows = weight.dequantize(&Device::Cpu)?.sum(1)?.to_vec1::<f32>()?;
            for m in [1usize, 5] {
                let xs = Tensor::ones((m, k), DType::F32, &Device::Cpu)?;
                for row in xs.apply_op1_no_bwd(&weight)?.to_vec2::<f32>()? {
                    for (r, got) in row.into_iter().enumerate() {
                        let (want, about) = (rows[r], (k * (r + 1)) as f32);
                        assert!(
                            (got / want - 1.0).abs() < 1e-3 && (want / about - 1.0).abs() < 0.1,
                            "{dtype:?} n {n} m {m} row {r}: {got}, want {want}, about {about}"
                        );
                    }
                }
            }
        }
    }
    Ok(())
}

#[test]
fn the_tokenizer_is_that_of_the_checkpoint() {
    let (_file, gguf) = made(&trained_model(), GgmlDType::Q8_0);
    let of_file = Tokenizer::from_bytes(gguf.tokenizer_json().unwrap()).unwrap();
    let want = Tokenizer::from_file(trained_model().join("tokenizer.json")).unwrap();
    assert_eq!(of_file.get_vocab(true), want.get_vocab(true));
    let stories = std::fs::read_to_string(trained_model().join("stories.txt")).unwrap();
    let part: String = stories.chars().skip(1000).take(60_000).collect();
    for text in [
        part.as_str(),
        "",
        " ",
        "   a  b ",
        "\n\n \n",
        "12 345",
        "naïve 漢字 🦀\u{0}\t",
        "<bos><|turn>user\nHi<turn|>\n<|turn>model\n",
        "<|turn>x<eos><pad><unk><mask>",
        "▁",
        "<0x41>",
        "é\r\n",
    ] {
        let (got, want_ids) = (
            of_file.encode(text, false).unwrap(),
            want.encode(text, false).unwrap(),
        );
        let shown: String = text.chars().take(40).collect();
        assert_eq!(got.get_ids(), want_ids.get_ids(), "{shown:?}");
        for skip in [true, false] {
            assert_eq!(
                of_file.decode(got.get_ids(), skip).unwrap(),
                want.decode(got.get_ids(), skip).unwrap(),
                "{shown:?}"
            );
        }
    }
    assert_eq!(gguf.config().eos_token_ids, [1, 6]);
    assert_eq!(gguf.chat_template(), None);
}

/// The format has room for one token beside `<eos>`, `<turn|>` and `<|tool_response>`.
#[test]
fn the_stop_tokens_of_the_generation_config_are_in_the_file() {
    let stops = |ids: &str| {
        let text = format!("{{\"eos_token_id\": {ids}}}");
        let dir = trained_model_with(&[("generation_config.json", &text)]);
        let plan = Plan::new(dir.path(), GgmlDType::Q8_0).unwrap();
        let notes = plan.notes.clone();
        let path = dir.path().join("model.gguf");
        write(plan, &path);
        let gguf = Gguf::open(&path).unwrap();
        let stop = StopTokens::new(gguf.config(), None).unwrap();
        let mut ids = stop.ids().to_vec();
        ids.sort();
        let left_out: Vec<_> = notes
            .into_iter()
            .filter(|note| note.contains("stop token"))
            .collect();
        (ids, left_out)
    };
    assert_eq!(stops("[1, 6]"), (vec![1, 6], vec![]));
    assert_eq!(stops("106"), (vec![1, 6, 106], vec![]));
    let left_out = vec!["GGUF has no room for the stop token 400".to_string()];
    assert_eq!(stops("[300, 6, 400, 1]"), (vec![1, 6, 300], left_out));
}

#[test]
fn the_chat_template_of_either_file_is_in_the_file() {
    let list = r#"{"chat_template": [{"name": "default", "template": "two"}]}"#;
    for (files, want) in [
        (&[][..], None),
        (&[("tokenizer_config.json", list)][..], Some("two")),
        (
            &[
                ("tokenizer_config.json", list),
                ("chat_template.jinja", "one"),
            ],
            Some("one"),
        ),
    ] {
        let (_file, gguf) = made(trained_model_with(files).path(), GgmlDType::Q8_0);
        assert_eq!(gguf.chat_template(), want);
    }
}

/// ggml-org/llama.cpp#21500: files of older converters say that no BOS is to be added.
#[test]
fn the_flag_of_the_bos_changes_no_prompt() {
    let ids = [None, Some(true), Some(false)].map(|flag| {
        let (_file, gguf) = altered(&trained_model(), GgmlDType::Q8_0, |plan| {
            set(plan, "tokenizer.ggml.add_bos_token", flag.map(Meta::Bool))
        });
        let encoder = Encoder::new(Tokenizer::from_bytes(gguf.tokenizer_json().unwrap()).unwrap());
        let bos = gguf.config().bos_token_id;
        let text = Piece::Template("Once upon a time".into());
        encoder.encode(&[text], bos).unwrap()
    });
    assert_eq!((ids[0][0], ids[0].len() > 1), (2, true));
    assert_eq!(ids[0].iter().filter(|&&id| id == 2).count(), 1);
    assert_eq!([&ids[1], &ids[2]], [&ids[0]; 2]);
}

fn refused(alter: impl FnOnce(&mut Plan)) -> String {
    let dir = fixture_checkpoint(FIXTURES[1]);
    let (file, gguf) = try_altered(dir.path(), GgmlDType::F32, alter);
    let text = match gguf {
        Ok(gguf) => message(gguf.check().unwrap_err()),
        Err(e) => message(e),
    };
    let place = format!("gguf: {}: ", file.path().join("model.gguf").display());
    text.replace(&place, "")
        .replace(&file.path().display().to_string(), "[dir]")
}

/// FlashML-org/FreeToken#63.
#[test]
fn kv_heads_are_one_number_or_one_a_layer() {
    let key = "gemma4.attention.head_count_kv";
    let dir = fixture_checkpoint(FIXTURES[1]);
    let heads = |value: Meta| {
        let (_file, gguf) = altered(dir.path(), GgmlDType::F32, |plan| {
            set(plan, key, Some(value))
        });
        gguf.config()
            .layers
            .iter()
            .map(|l| l.num_key_value_heads)
            .collect::<Vec<_>>()
    };
    assert_eq!(heads(Meta::U32(4)), [4; 6]);
    for value in [
        Meta::I32s(vec![8, 8, 8, 8, 8, 2]),
        Meta::U32s(vec![8, 8, 8, 8, 8, 2]),
        Meta::U64s(vec![8, 8, 8, 8, 8, 2]),
    ] {
        assert_eq!(heads(value), [8, 8, 8, 8, 8, 2]);
    }
    let with = |value| refused(|plan| set(plan, key, value));
    assert_eq!(
        with(Some(Meta::I32s(vec![8; 5]))),
        format!("`{key}` has 5 entries, want one for each of the 6 layers")
    );
    assert_eq!(with(None), format!("`{key}` is missing"));
    assert_eq!(
        with(Some(Meta::U32(0))),
        format!("`{key}` is 0, want 1 to 16777216")
    );
    assert_eq!(
        with(Some(Meta::I32s(vec![8, -1, 8, 8, 8, 2]))),
        format!("`{key}[1]` is -1, want 1 to 16777216")
    );
    let widest = |plan: &mut _| {
        let heads = "gemma4.attention.head_count";
        set(plan, heads, Some(Meta::U32(1 << 24)))
    };
    assert!(refused(widest).starts_with("num_attention_heads * head_dim is "));
    assert_eq!(
        with(Some(Meta::U32(5))),
        format!("`gemma4.attention.head_count` is 16 and `{key}` of layer 0 is 5, want a multiple")
    );
}

#[test]
fn a_pattern_may_be_a_period() {
    let dir = fixture_checkpoint(FIXTURES[1]);
    let key = "gemma4.attention.sliding_window_pattern";
    let (_a, want) = made(dir.path(), GgmlDType::F32);
    let (_b, got) = altered(dir.path(), GgmlDType::F32, |plan| {
        set(plan, key, Some(Meta::U32(6)))
    });
    assert_eq!(got.config(), want.config());
    let slides = refused(|plan| set(plan, key, Some(Meta::U32(4))));
    assert!(slides.contains("the last layer slides"), "{slides}");
}

#[test]
fn what_the_graph_does_not_compute_is_refused_by_its_key() {
    for (key, value) in [
        ("gemma4.attention.shared_kv_layers", Meta::U32(2)),
        ("gemma4.embedding_length_per_layer_input", Meta::U32(256)),
        ("gemma4.expert_count", Meta::U32(128)),
        ("general.architecture", Meta::Text("gemma3".into())),
        ("gemma4.rope.scaling.type", Meta::Text("yarn".into())),
        ("gemma4.attention.value_length", Meta::U32(256)),
        (
            "gemma4.feed_forward_length",
            Meta::I32s(vec![96, 96, 96, 96, 96, 192]),
        ),
    ] {
        let text = refused(|plan| set(plan, key, Some(value)));
        assert!(text.starts_with(&format!("`{key}` is ")), "{text}");
    }
    let split = refused(|plan| set(plan, "split.count", Some(Meta::U32(3))));
    assert!(
        split.contains("one of 3 parts") && split.contains("--merge"),
        "{split}"
    );
}

#[test]
fn divisors_are_the_proportional_rule_or_refused() {
    let dir = fixture_checkpoint(FIXTURES[1]);
    let (_file, gguf) = altered(dir.path(), GgmlDType::F32, |plan| {
        plan.rope_freqs[..64].fill(8.0);
    });
    let rope = gguf.config().layers[5].rope;
    assert_eq!(
        (rope.rotated_pairs, rope.factor, rope.theta),
        (64, 8.0, 1e6)
    );
    for (at, value) in [
        (3, 2.0),
        (3, 0.0),
        (3, f32::NAN),
        (3, -1.0),
        (100, 1.0),
        (100, f32::NAN),
    ] {
        let text = refused(|plan| plan.rope_freqs[at] = value);
        assert!(text.starts_with("tensor rope_freqs.weight has "), "{text}");
    }
}

#[test]
fn types_without_code_and_tensors_of_other_models_are_refused_by_name() {
    let dir = fixture_checkpoint(FIXTURES[1]);
    let (file, _) = made(dir.path(), GgmlDType::F32);
    let path = file.path().join("model.gguf");
    let mut bytes = std::fs::read(&path).unwrap();
    let name = b"blk.0.attn_q.weight";
    let at = bytes.windows(name.len()).position(|w| w == name).unwrap() + name.len() + 4 + 16;
    for (id, kind) in [
        (23u32, "IQ4_XS"),
        (34, "TQ1_0"),
        (39, "MXFP4"),
        (40, "NVFP4"),
        (15, "Q8_K"),
        (99, "type 99"),
    ] {
        bytes[at..at + 4].copy_from_slice(&id.to_le_bytes());
        std::fs::write(&path, &bytes).unwrap();
        let text = message(
            gem::models::gemma4::Gguf::open(&path)
                .unwrap()
                .check()
                .unwrap_err(),
        );
        let want = format!("blk.0.attn_q.weight: is {kind}, want Q4_0, Q4_K, Q5_K, Q6_K, Q8_0");
        assert!(text.contains(&want), "{text}");
    }
    let text = refused(|plan| plan.tensors[4].name = "blk.0.attn_p.weight".into());
    assert_eq!(text, "gguf: 2 faults\n  [dir]/model.gguf: blk.0.attn_k.weight: missing\n  [dir]/model.gguf: blk.0.attn_p.weight: not a tensor of this model");
    let text = refused(|plan| plan.tensors[5].name = "blk.0.x.weight".into());
    assert!(
        text.starts_with("tensor blk.0.attn_v.weight is missing"),
        "{text}"
    );
}

#[test]
fn data_cut_short_names_the_tensor() {
    let dir = fixture_checkpoint(FIXTURES[1]);
    let (file, _) = made(dir.path(), GgmlDType::Q8_0);
    let path = file.path().join("model.gguf");
    let bytes = std::fs::read(&path).unwrap();
    std::fs::write(&path, &bytes[..bytes.len() - 40]).unwrap();
    let text = message(
        gem::models::gemma4::Gguf::open(&path)
            .map(|_| ())
            .unwrap_err(),
    );
    assert!(
        text.contains("blk.5.layer_output_scale.weight\": its offset")
            && text.contains("past the end of the file"),
        "{text}"
    );
}

/// K types come in blocks of 256, which few rows of the trained model are a multiple of.
#[test]
fn what_a_file_says_otherwise_than_asked_is_noted() {
    let plan = Plan::new(&trained_model(), GgmlDType::Q4K).unwrap();
    let noted = |text: &str| plan.notes.iter().filter(|note| note.contains(text)).count();
    let fallen_back = plan.tensors.iter().filter(|t| t.dtype == GgmlDType::Q8_0);
    assert_eq!(noted("are no multiple of 256"), fallen_back.count());
    assert!(noted("are no multiple of 256") > 0);
    assert_eq!(noted("pre_tokenizer"), 1, "{:?}", plan.notes);
}
