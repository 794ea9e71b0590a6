//! What turns text into ids and back: a `tokenizer.json`, or the tokenizer of a GGUF file.
//!
//! The input is parts divided by bytes 0xFF. If the first begins with `{` it is a `tokenizer.json` and the second a text. Else the
//! first are tokens, one a line, each after the digit of its type, the second merges, one a line, and the third a text.
#![no_main]

#[allow(dead_code, reason = "the program uses all of it")]
#[path = "../../examples/gemma4/chat/mod.rs"]
mod chat;
#[allow(dead_code, reason = "the program uses all of it")]
#[path = "../../examples/gemma4/bounded_file.rs"]
mod bounded_file;
#[path = "../../examples/gemma4/guard.rs"]
mod guard;
mod panics;
#[allow(dead_code, reason = "the program uses all of it")]
#[path = "../../examples/gemma4/replace.rs"]
mod replace;
#[allow(dead_code, reason = "the program uses all of it")]
#[path = "../../examples/gemma4/stream.rs"]
mod stream;
#[path = "../../examples/gemma4/tokenizer.rs"]
mod tokenizer;
#[allow(dead_code, reason = "the program uses all of it")]
#[path = "../../examples/quantize/write.rs"]
mod write;

use candle::quantized::GgmlDType;
use chat::{Encoder, Piece};
use gem::models::gemma4::Gguf;
use libfuzzer_sys::fuzz_target;
use stream::AnswerStream;
use tokenizer::read_tokenizer;
use write::{Meta, Tensor};

fuzz_target!(init: panics::let_be_caught(), |input: &[u8]| {
    let parts = input.split(|byte| *byte == 0xff);
    let parts: Vec<_> = parts.map(String::from_utf8_lossy).collect();
    let part = |i: usize| parts.get(i).map_or("", |part| part);
    let (json, text) = if part(0).starts_with('{') {
        (part(0).to_string(), part(1))
    } else {
        match of_gguf(part(0), part(1)) {
            Some(json) => (json, part(2)),
            None => return,
        }
    };
    let Ok(tokenizer) = read_tokenizer(json.as_bytes()) else {
        return;
    };
    let encoder = Encoder::new(tokenizer);
    let pieces = [Piece::Template(text.into()), Piece::Content(text.into())];
    let Ok(ids) = encoder.encode(&pieces, 0) else {
        return;
    };
    assert_eq!(ids[0], 0);
    let mut out = Vec::new();
    let mut answer = AnswerStream::new(encoder.tokenizer(), &mut out, false);
    if ids.iter().all(|id| answer.push(*id).is_ok()) {
        let _ = answer.finish();
    }
});

/// The `tokenizer.json` of a model of one layer and one column, made of these tokens and merges.
fn of_gguf(tokens: &str, merges: &str) -> Option<String> {
    let tokens = tokens.lines().map(|line| {
        let mut chars = line.chars();
        let kind = chars.next().and_then(|digit| digit.to_digit(10));
        (chars.as_str().to_string(), kind.unwrap_or(1) as i32)
    });
    let (tokens, types): (Vec<_>, Vec<_>) = tokens.unzip();
    let vocab = tokens.len();
    let merges = merges.lines().map(String::from).collect();
    let metadata = [
        ("general.architecture", Meta::Text("gemma4".into())),
        ("gemma4.block_count", Meta::U32(1)),
        ("gemma4.embedding_length", Meta::U32(1)),
        ("gemma4.feed_forward_length", Meta::U32(1)),
        ("gemma4.context_length", Meta::U32(8)),
        ("gemma4.attention.head_count", Meta::U32(1)),
        ("gemma4.attention.head_count_kv", Meta::U32(1)),
        ("gemma4.attention.key_length", Meta::U32(2)),
        ("gemma4.attention.layer_norm_rms_epsilon", Meta::F32(1e-6)),
        ("gemma4.attention.sliding_window", Meta::U32(8)),
        ("gemma4.attention.sliding_window_pattern", Meta::U32(1)),
        ("gemma4.final_logit_softcapping", Meta::F32(30.0)),
        ("gemma4.rope.freq_base", Meta::F32(1e6)),
        ("gemma4.rope.freq_base_swa", Meta::F32(1e4)),
        ("tokenizer.ggml.bos_token_id", Meta::U32(0)),
        ("tokenizer.ggml.eos_token_id", Meta::U32(0)),
        ("tokenizer.ggml.merges", Meta::Texts(merges)),
        ("tokenizer.ggml.model", Meta::Text("gemma4".into())),
        ("tokenizer.ggml.token_type", Meta::I32s(types)),
        ("tokenizer.ggml.tokens", Meta::Texts(tokens)),
        ("tokenizer.ggml.unknown_token_id", Meta::U32(1)),
    ];
    let metadata = metadata.map(|(key, value)| (key.to_string(), value));
    let tensor = |name: &str, shape: Vec<usize>| Tensor {
        name: name.into(),
        shape,
        dtype: GgmlDType::F32,
    };
    // A tensor of no rows is refused, and with it a vocabulary of no tokens.
    let tensors = [
        tensor("rope_freqs.weight", vec![1]),
        tensor("token_embd.weight", vec![vocab, 1]),
    ];
    let mut file = write::header(&metadata, &tensors);
    file.extend(1f32.to_le_bytes());
    file.resize(file.len() + 28, 0);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, file).unwrap();
    match Gguf::open(&path) {
        Ok(gguf) => gguf.tokenizer_json().ok(),
        Err(e) => {
            assert!(vocab == 0, "{e}");
            None
        }
    }
}
