//! What a device that fails, or leaves memory unwritten, may not become: text.

use crate::common::{self, trained_model};
use crate::example_quantize_convert::Plan;
use crate::gguf_support::write;
use candle::quantized::GgmlDType;
use candle::{DType, Device, Result, Tensor};

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

/// The trained model with another tensor in the place of one, and whatever is to be changed in its config.
fn changed(
    name: &str,
    change: impl Fn(&Tensor) -> Result<Tensor>,
    config: impl Fn(&mut serde_json::Value),
) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for name in ["tokenizer.json", "generation_config.json"] {
        std::fs::copy(trained_model().join(name), folder.path().join(name)).unwrap();
    }
    let text = std::fs::read(trained_model().join("config.json")).unwrap();
    let mut json = serde_json::from_slice(&text).unwrap();
    config(&mut json);
    std::fs::write(folder.path().join("config.json"), json.to_string()).unwrap();
    let weights = trained_model().join("model.safetensors");
    let mut tensors = candle::safetensors::load(weights, &Device::Cpu).unwrap();
    let tensor = tensors.get_mut(name).unwrap();
    *tensor = change(tensor).unwrap().to_dtype(tensor.dtype()).unwrap();
    common::fixture::save(&tensors, &folder.path().join("model.safetensors"));
    folder
}

/// One weight of the head that is infinite makes one logit infinite, which is no cap of anything.
#[test]
fn a_single_infinity_is_an_error_and_no_text() {
    const TOKEN: usize = 3000;
    let name = "model.embed_tokens.weight";
    for infinity in [f32::INFINITY, f32::NEG_INFINITY] {
        for capped in [true, false] {
            let change = |weight: &Tensor| {
                let one = Tensor::full(infinity, (1, 1), &Device::Cpu)?;
                let weight = weight.to_dtype(DType::F32)?;
                weight.slice_assign(&[TOKEN..TOKEN + 1, 0..1], &one)
            };
            let folder = changed(name, change, |config| {
                assert!(config["final_logit_softcapping"].is_number());
                if !capped {
                    config["final_logit_softcapping"] = serde_json::Value::Null;
                }
            });
            let folder = folder.path().to_str().unwrap();
            let args = ["--cpu", "--weight-files", folder, "-n", "4"];
            let args = [&args[..], &["--prompt", "Once upon a time"]].concat();
            let out = common::start("gemma4", &args).wait_with_output().unwrap();
            let log = String::from_utf8(out.stderr).unwrap();
            let what = format!("{infinity}, capped {capped}: {log}");
            assert!(!out.status.success(), "{what}");
            assert!(
                log.contains("gemma4: the logit of token 3000 is "),
                "{what}"
            );
            assert_eq!(String::from_utf8(out.stdout).unwrap().trim(), "", "{what}");
        }
    }
}

/// The same report: memory that nobody wrote was read as logits, and fluent nonsense was printed.
#[test]
fn logits_that_are_not_numbers_are_an_error_of_the_program_and_no_text() {
    let nan = |norm: &Tensor| Tensor::full(f32::NAN, norm.dims(), &Device::Cpu);
    let folder = changed("model.norm.weight", nan, |_| ());
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
