//! A call of an op, small and otherwise anything: an error in the op's name, or the numbers of its definition.
#![no_main]

mod any_tensor;
mod attention;
mod projection;
mod qsa;
mod states;

#[allow(dead_code, reason = "the tests use all of it")]
#[path = "../../../tests/suite/attention_support.rs"]
mod attention_support;
#[allow(dead_code, reason = "the tests use all of it")]
mod common;
#[allow(dead_code, unused_imports, reason = "the tests use all of it")]
#[path = "../../../tests/suite/projection_support.rs"]
mod projection_support;
#[allow(dead_code, unused_imports, reason = "the tests use all of it")]
#[path = "../../../tests/suite/qsa_definition.rs"]
mod qsa_definition;
#[allow(dead_code, reason = "the tests use all of it")]
#[path = "../../../tests/suite/qsa_support.rs"]
mod qsa_support;
#[allow(dead_code, reason = "the tests use all of it")]
#[path = "../../../tests/suite/shared_kv_support.rs"]
mod shared_kv_support;

use arbitrary::Unstructured;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| {
    let mut bytes = Unstructured::new(input);
    let ops: [fn(&mut Unstructured) -> arbitrary::Result<()>; 8] = [
        attention::any,
        attention::defined,
        attention::shared_kv,
        states::any,
        projection::any,
        projection::defined,
        qsa::any,
        qsa::defined,
    ];
    // Too few bytes for a whole call are no call.
    let _ = bytes.choose(&ops).and_then(|op| op(&mut bytes));
});
