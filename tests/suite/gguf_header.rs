//! Crafted and damaged GGUF files: each gets an error that says what is wrong, soon and in little memory.
//! huggingface/candle#3712.

use crate::common::message;
use crate::example_quantize_write::{header, Meta, Tensor};
use candle::quantized::GgmlDType;
use gem::models::gemma4::Gguf;
use std::io::Write;

fn refused(bytes: &[u8]) -> String {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    let start = std::time::Instant::now();
    let text = message(Gguf::open(file.path()).unwrap_err());
    assert!(start.elapsed().as_secs_f64() < 1.0, "{text}");
    let place = format!("gguf: {}: ", file.path().display());
    text.strip_prefix(&place).expect(&text).to_string()
}

fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text].concat()
}

/// A header with these counts, then whatever follows.
fn raw(tensors: u64, entries: u64, rest: &[u8]) -> Vec<u8> {
    let counts = [tensors.to_le_bytes(), entries.to_le_bytes()].concat();
    [b"GGUF\x03\0\0\0", counts.as_slice(), rest, &[0; 64]].concat()
}

fn entry(key: &[u8], kind: u32, value: &[u8]) -> Vec<u8> {
    [&string(key), &kind.to_le_bytes()[..], value].concat()
}

fn tensor(name: &str, dims: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let mut out = string(name.as_bytes());
    out.extend((dims.len() as u32).to_le_bytes());
    dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
    out.extend(kind.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out
}

#[test]
fn an_alignment_that_is_no_power_of_two_is_refused() {
    for n in [0u32, 24, 1 << 31] {
        let text = refused(&raw(
            0,
            1,
            &entry(b"general.alignment", 4, &n.to_le_bytes()),
        ));
        assert_eq!(
            text,
            format!("`general.alignment` is {n}, want a power of two up to 65536")
        );
    }
}

#[test]
fn dimensions_that_overflow_or_wrap_are_refused() {
    for dims in [
        vec![1 << 40, 1 << 40],
        vec![(1 << 63) + 2, 2],
        vec![0, 4],
        vec![u64::MAX],
    ] {
        let text = refused(&raw(1, 0, &tensor("t", &dims, 0, 0)));
        assert!(
            text.starts_with(&format!("tensor \"t\": has dimensions {dims:?}, want")),
            "{text}"
        );
    }
    let text = refused(&raw(1, 0, &tensor("t", &[1; 5], 0, 0)));
    assert_eq!(text, "tensor \"t\": has 5 dimensions, want 1 to 4");
}

#[test]
fn an_offset_past_the_end_or_off_the_alignment_is_refused() {
    for offset in [1 << 20, u64::MAX - 31] {
        let text = refused(&raw(1, 0, &tensor("t", &[4], 0, offset)));
        assert!(text.contains("is past the end of the file"), "{text}");
    }
    let text = refused(&raw(1, 0, &tensor("t", &[4], 0, 8)));
    assert_eq!(
        text,
        "tensor \"t\": its offset 8 is no multiple of the alignment 32"
    );
}

#[test]
fn counts_that_cannot_be_in_the_file_are_refused() {
    for (tensors, entries) in [(0, 1 << 30), (1 << 30, 0), (0, u64::MAX), (u64::MAX, 1)] {
        let text = refused(&raw(tensors, entries, &[]));
        assert!(text.contains("cannot be in the"), "{text}");
    }
    let long = [&(1u64 << 30).to_le_bytes()[..], b"x"].concat();
    assert!(refused(&raw(0, 1, &long)).contains("a string of 1073741824 bytes"));
    assert!(refused(&raw(0, 1, &entry(b"k", 8, &long))).contains("k: a string of 1073741824 bytes"));
    let array = [&4u32.to_le_bytes()[..], &(1u64 << 30).to_le_bytes()].concat();
    let text = refused(&raw(0, 1, &entry(b"k", 9, &array)));
    assert!(
        text.contains("1073741824 elements of k cannot be in the"),
        "{text}"
    );
}

#[test]
fn a_file_of_one_huge_array_is_refused_before_it_is_held() {
    let len = 1u64 << 23;
    let array = [
        &0u32.to_le_bytes()[..],
        &len.to_le_bytes(),
        &vec![0; len as usize],
    ]
    .concat();
    let text = refused(&raw(0, 1, &entry(b"k", 9, &array)));
    assert!(
        text.contains("arrays have 8388608 elements so far, want at most 4194304"),
        "{text}"
    );
}

#[test]
fn nested_arrays_are_refused() {
    let mut value = Vec::new();
    for _ in 0..100 {
        value.extend(9u32.to_le_bytes());
        value.extend(1u64.to_le_bytes());
    }
    let text = refused(&raw(0, 1, &entry(b"k", 9, &value)));
    assert!(
        text.ends_with("k: arrays are nested more than 2 deep"),
        "{text}"
    );
}

#[test]
fn text_must_be_utf8_and_names_must_differ() {
    assert!(refused(&raw(0, 1, &entry(b"\xff\xfe", 7, &[1]))).contains("no UTF-8"));
    assert!(refused(&raw(0, 1, &entry(b"k", 8, &string(b"\xc3")))).contains("k: no UTF-8"));
    let twice = [entry(b"k", 7, &[1]), entry(b"k", 7, &[0])].concat();
    assert_eq!(
        refused(&raw(0, 2, &twice)),
        "metadata key \"k\" is there twice"
    );
    let twice = [tensor("t", &[4], 0, 0), tensor("t", &[4], 0, 32)].concat();
    assert_eq!(refused(&raw(2, 0, &twice)), "tensor \"t\" is there twice");
    assert!(refused(&raw(0, 1, &entry(b"k", 7, &[2]))).contains("k: a bool of 2"));
    assert!(refused(&raw(0, 1, &entry(b"k", 13, &[2]))).contains("value type 13 is unknown"));
}

#[test]
fn other_files_and_other_versions_are_refused() {
    assert!(refused(b"PK\x03\x04 and more").starts_with("no GGUF file"));
    assert!(refused(b"GGUF\x01\0\0\0\0\0\0\0").contains("version 1 of GGUF is not implemented"));
    assert!(refused(b"GGUF\0\0\0\x03\0\0\0\0").contains("big-endian"));
}

/// No panic, and no success, at any length short of the whole.
#[test]
fn a_file_cut_short_at_any_byte_is_refused() {
    let metadata = [
        (
            "general.architecture".to_string(),
            Meta::Text("gemma4".into()),
        ),
        ("flags".into(), Meta::Bools(vec![true, false])),
        ("numbers".into(), Meta::I32s(vec![1, -2])),
        ("texts".into(), Meta::Texts(vec!["a".into(), "▁b".into()])),
        ("x".into(), Meta::F32(1.0)),
    ];
    let tensors = [Tensor {
        name: "rope_freqs.weight".into(),
        shape: vec![4],
        dtype: GgmlDType::F32,
    }];
    let mut whole = header(&metadata, &tensors);
    whole.extend([0; 16]);
    for len in 0..whole.len() {
        refused(&whole[..len]);
    }
    // Whole, it gets as far as what it is of.
    assert_eq!(refused(&whole), "`gemma4.block_count` is missing");
}
