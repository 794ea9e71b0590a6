//! A checkpoint's tokenizer is read whole or refused, whatever the crate that reads it makes of damage.

use crate::common::trained_model;
use crate::example_tokenizer::read_tokenizer;
use serde_json::{json, Value};

fn refused(json: &[u8]) -> String {
    match read_tokenizer(json) {
        Ok(_) => panic!("{} was accepted", String::from_utf8_lossy(json)),
        Err(e) => format!("{e:#}"),
    }
}

/// The tokenizers crate panics at JSON that breaks off or is none inside of a decoder; found by fuzzing.
#[test]
fn damage_is_an_error_even_where_the_tokenizers_crate_panics() {
    let decoder = br#"{"decoder":{"type":"Fuse"}}"#;
    for len in 0..=decoder.len() {
        refused(&decoder[..len]);
    }
    let text = refused(br#"{"decoder":{"type""#);
    assert!(text.starts_with("it panicked: "), "{text}");
    refused(br#"{"decoder":{"type";"Fuse"}}"#);
}

#[test]
fn tokenizers_that_cut_or_pad_or_are_of_another_kind_are_refused() {
    let file = std::fs::read(trained_model().join("tokenizer.json")).unwrap();
    assert!(read_tokenizer(&file).is_ok());
    let with = |key: &str, value: Value| {
        let mut json: Value = serde_json::from_slice(&file).unwrap();
        json[key] = value;
        refused(json.to_string().as_bytes())
    };
    let truncation =
        json!({"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0});
    assert_eq!(
        with("truncation", truncation),
        "the tokenizer has `truncation`, want null"
    );
    let padding = json!({
        "strategy": {"Fixed": 1u64 << 40}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>",
    });
    assert_eq!(
        with("padding", padding),
        "the tokenizer has `padding`, want null"
    );
    let words = json!({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"});
    assert_eq!(
        with("model", words),
        "the tokenizer's model is of another type, want BPE"
    );
}
