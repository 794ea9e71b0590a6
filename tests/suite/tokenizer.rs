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

fn trained() -> Value {
    let file = std::fs::read(trained_model().join("tokenizer.json")).unwrap();
    serde_json::from_slice(&file).unwrap()
}

/// The trained model's, with one value in the place of another.
fn with(pointer: &str, value: Value) -> Vec<u8> {
    let mut json = trained();
    let (at, key) = pointer.rsplit_once('/').unwrap();
    json.pointer_mut(at).unwrap()[key] = value;
    json.to_string().into_bytes()
}

/// The tokenizers crate panics at JSON that breaks off or is none inside of a decoder; found by fuzzing.
#[test]
fn damage_is_an_error_even_where_the_tokenizers_crate_panics() {
    let decoder = br#"{"decoder":{"type":"Fuse"}}"#;
    for len in 0..=decoder.len() {
        refused(&decoder[..len]);
    }
    let text = refused(br#"{"decoder":{"type""#);
    assert!(text.starts_with("EOF while parsing"), "{text}");
    refused(br#"{"decoder":{"type";"Fuse"}}"#);
}

#[test]
fn tokenizers_that_cut_or_pad_or_are_of_another_kind_are_refused() {
    assert!(read_tokenizer(trained().to_string().as_bytes()).is_ok());
    let with = |key: &str, value| refused(&with(&format!("/{key}"), value));
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
        "the tokenizer's model is of type \"WordLevel\", want \"BPE\""
    );
}

/// Each would give other tokens than the file says, or others each time, without a word.
#[test]
fn what_would_change_tokens_without_a_word_is_refused() {
    for none in [json!(0), json!(0.0), Value::Null] {
        read_tokenizer(&with("/model/dropout", none)).unwrap();
    }
    assert_eq!(
        refused(&with("/model/dropout", json!(0.9))),
        "the tokenizer's model has `dropout` 0.9, want null: the same text would get other tokens each time"
    );
    let key = refused(&with("/model/lowercase", json!(true)));
    assert!(key.starts_with("unknown field `lowercase`"), "{key}");
    assert_eq!(
        refused(&with("/model/unk_token", json!("<what>"))),
        "the tokenizer's `unk_token` is \"<what>\", want a token"
    );
    // With a token for every byte there is nothing unknown.
    let mut json = trained();
    json["model"]["unk_token"] = Value::Null;
    read_tokenizer(json.to_string().as_bytes()).unwrap();
    let mut without_fallback = json.clone();
    without_fallback["model"]["byte_fallback"] = json!(false);
    json["model"]["vocab"]
        .as_object_mut()
        .unwrap()
        .remove("<0xFF>");
    for json in [json, without_fallback] {
        assert_eq!(refused(json.to_string().as_bytes()), "the tokenizer has no `unk_token` and not a token for every byte: other characters would be left out");
    }
    assert_eq!(
        refused(&with("/added_tokens/1/id", json!(77))),
        "the tokenizer's added token \"<eos>\" is to be 77, but the model makes it Some(1)"
    );
    let (first, second) = ("\u{2581}t", "he");
    let id = trained()["model"]["vocab"][first].clone();
    let twice = refused(&with(&format!("/model/vocab/{second}"), id.clone()));
    let want = format!("the tokenizer has two tokens of id {id}, one of them ");
    assert!(twice.starts_with(&want), "{twice}");
    let again =
        json!([{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]);
    assert_eq!(
        refused(&with("/post_processor/single", again)),
        "the tokenizer's post_processor makes 2 tokens of one, want only special ones added"
    );
}

#[test]
fn a_key_that_is_there_twice_is_refused() {
    let text = trained().to_string();
    for (at, twin, want) in [
        (
            "{",
            r#""added_tokens":[],"#,
            "duplicate field `added_tokens`",
        ),
        ("{", r#""normalizer":null,"#, "duplicate field `normalizer`"),
        (
            r#""model":{"#,
            r#""dropout":null,"#,
            "duplicate field `dropout`",
        ),
        (r#""vocab":{"#, r#""<eos>":1,"#, "\"<eos>\" is there twice"),
        (
            r#""normalizer":{"#,
            r#""content":"x","#,
            "\"content\" is there twice",
        ),
    ] {
        let error = refused(text.replacen(at, &format!("{at}{twin}"), 1).as_bytes());
        assert!(error.starts_with(want), "want {want}: {error}");
    }
}

/// A prompt of a few bytes would become gigabytes, or go on without end.
#[test]
fn parts_that_make_a_text_much_longer_are_refused() {
    let sequence = |list: &str, parts: Vec<Value>| json!({"type": "Sequence", list: parts});
    let replace = |pattern: &str, content: &str| json!({"type": "Replace", "pattern": {"String": pattern}, "content": content});
    let regex = |content: &str| json!({"type": "Replace", "pattern": {"Regex": "(a*)*b"}, "content": content});
    let strip = |stop| json!({"type": "Strip", "content": " ", "start": 1, "stop": stop});
    let prepend = json!({"type": "Prepend", "prepend": "x"});
    let fifty = "x".repeat(50);
    let mut grown = vec![prepend.clone()];
    grown.extend((0..6).map(|_| replace("x", &fifty)));
    let times = |list, part: &Value, n| sequence(list, vec![part.clone(); n]);
    for (place, part) in [
        (
            "normalizer",
            sequence("normalizers", vec![prepend.clone(), replace("x", &fifty)]),
        ),
        ("normalizer", replace(" ", "\u{2581}")),
        ("normalizer", regex("")),
        ("normalizer", json!({"type": "NFKC"})),
        ("normalizer", times("normalizers", &replace("xx", "yy"), 63)),
        (
            "pre_tokenizer",
            json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}),
        ),
        (
            "decoder",
            sequence(
                "decoders",
                vec![
                    replace("\u{2581}", " "),
                    json!({"type": "ByteFallback"}),
                    json!({"type": "Fuse"}),
                    strip(0),
                ],
            ),
        ),
    ] {
        let taken = read_tokenizer(&with(&format!("/{place}"), part.clone()));
        assert!(taken.is_ok(), "{part}: {}", taken.err().unwrap());
    }
    let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    for (place, part, want) in [
        (
            "normalizer",
            sequence("normalizers", grown),
            "has up to 15625000000 bytes for each of a text, want at most 64",
        ),
        (
            "normalizer",
            replace("", &fifty),
            "has a Replace of the pattern \"\", want one that is not empty",
        ),
        (
            "normalizer",
            replace("x", &"y".repeat(65)),
            "has up to 65 bytes for each of a text, want at most 64",
        ),
        (
            "normalizer",
            regex("x"),
            "has a Replace of the pattern {\"Regex\":\"(a*)*b\"} by text, want a String",
        ),
        (
            "normalizer",
            json!({"type": "Prepend", "prepend": "x".repeat(5000)}),
            "has up to 5000 bytes before a text, want at most 4096",
        ),
        (
            "normalizer",
            times("normalizers", &replace("x", "y"), 64),
            "has up to 65 parts, want at most 64",
        ),
        (
            "normalizer",
            times("normalizers", &byte_level, 40),
            "bytes for each of a text, want at most 64",
        ),
        (
            "normalizer",
            json!({"type": "Precompiled", "precompiled_charsmap": ""}),
            "has a \"Precompiled\", which is not implemented",
        ),
        ("normalizer", json!({"content": "x"}), "has no `type`"),
        (
            "pre_tokenizer",
            times("pretokenizers", &byte_level, 40),
            "bytes for each of a text, want at most 64",
        ),
        (
            "decoder",
            times("decoders", &replace("x", &fifty), 6),
            "has up to 15625000000 bytes for each of a text, want at most 64",
        ),
        (
            "decoder",
            replace("", "x"),
            "has a Replace of the pattern \"\"",
        ),
        ("decoder", strip(1), "has a Strip with `stop` 1, want 0"),
        (
            "decoder",
            json!({"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": true}),
            "has a \"CTC\", which is not implemented",
        ),
    ] {
        let error = refused(&with(&format!("/{place}"), part));
        assert!(
            error.starts_with(&format!("the tokenizer's {place} ")) && error.contains(want),
            "want {want}: {error}"
        );
    }
}
