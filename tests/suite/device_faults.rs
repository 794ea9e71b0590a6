//! What a device that fails, or leaves memory unwritten, may not become: text.

use crate::common::{self, trained_model};
use crate::example_quantize_convert::Plan;
use crate::gguf_support::write;
use candle::quantized::GgmlDType;
use candle::{Device, Tensor};

/// huggingface/candle#3850: the state of a command buffer was asked for only before the wait. candle's own encoder and
/// its wait ask again; an executor that makes buffers or waits of its own would have to, and this one does neither.
#[test]
fn the_metal_executor_leaves_buffers_and_waiting_to_candle() {
    let source = include_str!("../../src/backend/metal.rs");
    assert_eq!(source.matches("command_encoder()?").count(), 1);
    for own in [
        "commandBuffer",
        "command_buffer",
        "commit",
        "wait_until",
        "waitUntil",
        "status()",
    ] {
        assert!(!source.contains(own), "src/backend/metal.rs has {own}");
    }
}

/// The same report: memory that nobody wrote was read as logits, and fluent nonsense was printed.
#[test]
fn logits_that_are_not_numbers_are_an_error_of_the_program_and_no_text() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "tokenizer.json", "generation_config.json"] {
        std::fs::copy(trained_model().join(name), folder.path().join(name)).unwrap();
    }
    let weights = trained_model().join("model.safetensors");
    let mut tensors = candle::safetensors::load(weights, &Device::Cpu).unwrap();
    let norm = tensors.get_mut("model.norm.weight").unwrap();
    let (dims, dtype) = (norm.dims().to_vec(), norm.dtype());
    let nan = Tensor::full(f32::NAN, dims, &Device::Cpu).unwrap();
    *norm = nan.to_dtype(dtype).unwrap();
    common::fixture::save(&tensors, &folder.path().join("model.safetensors"));
    let folder = folder.path().to_str().unwrap();
    for form in [&[][..], &["--chat"]] {
        let args = [
            "--cpu",
            "--weight-files",
            folder,
            "--prompt",
            "Once",
            "-n",
            "4",
        ];
        let child = common::start("gemma4", &[&args, form].concat());
        let out = child.wait_with_output().unwrap();
        let log = String::from_utf8(out.stderr).unwrap();
        assert!(!out.status.success());
        assert!(log.contains("gemma4: the logit of token 0 is NaN"), "{log}");
        assert_eq!(String::from_utf8(out.stdout).unwrap().trim(), "");
    }
}

/// The products of quantized weights on the CPU make numbers of what is none, so it would end as text without a word.
#[test]
fn a_quantized_weight_that_is_not_a_number_is_an_error_and_no_text() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.gguf");
    let plan = Plan::new(&trained_model(), GgmlDType::Q8_0).unwrap();
    write(plan, &file);
    let whole = std::fs::read(&file).unwrap();
    for percent in [30, 60, 90, 99] {
        let mut bytes = whole.clone();
        let at = whole.len() / 100 * percent;
        bytes[at..at + 64].fill(0xff);
        std::fs::write(&file, bytes).unwrap();
        let path = file.to_str().unwrap();
        let args = [
            "--cpu",
            "--weight-files",
            path,
            "--prompt",
            "Once",
            "-n",
            "4",
        ];
        let out = common::start("gemma4", &args).wait_with_output().unwrap();
        let log = String::from_utf8(out.stderr).unwrap();
        assert!(!out.status.success(), "{percent} %: {log}");
        assert!(log.contains("is NaN"), "{percent} %: {log}");
        assert_eq!(String::from_utf8(out.stdout).unwrap().trim(), "");
    }
}
