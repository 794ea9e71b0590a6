//! The `quantize` example as its users run it, and what it makes in the hands of the `gemma4` example.

use crate::common::{self, trained_model};
use crate::example_quantize_convert::encode;
use crate::gguf_support::trained_model_with;
use candle::quantized::GgmlDType;
use gem::models::gemma4::Gguf;
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

/// Status, stdout, stderr.
fn run(name: &str, args: &[&str], stdin: &str) -> (bool, String, String) {
    let mut child = common::start(name, args);
    // A program that refuses its arguments does not read.
    child.stdin.take().unwrap().write_all(stdin.as_bytes()).ok();
    let out = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (out.status.success(), text(out.stdout), text(out.stderr))
}

fn len(file: &Path) -> u64 {
    std::fs::metadata(file).map_or(0, |file| file.len())
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
    entries
        .map(|entry| name(entry).into_string().unwrap())
        .collect()
}

#[test]
fn mistakes_are_named_and_leave_no_file() {
    let (folder, out) = (trained_model(), tempfile::tempdir().unwrap());
    let (folder, file) = (folder.to_str().unwrap(), out.path().join("model.gguf"));
    let nowhere = out.path().join("none/model.gguf");
    let damaged = trained_model_with(&[("model.safetensors", "no tensors")]);
    let bad_tokenizer = trained_model_with(&[("tokenizer.json", "{}")]);
    let path = |path: &'static str| path;
    for (from, to, kind, wanted) in [
        (folder, &file, "q3_k", "[possible values: q4_0, q8_0, q4_k"),
        (path("no/such/folder"), &file, "q8_0", "no/such/folder"),
        (folder, &nowhere, "q8_0", "none/model.gguf"),
        (
            damaged.path().to_str().unwrap(),
            &file,
            "q8_0",
            "model.safetensors",
        ),
        (
            bad_tokenizer.path().to_str().unwrap(),
            &file,
            "q8_0",
            "missing field `model`",
        ),
    ] {
        let args = [from, to.to_str().unwrap(), "--type", kind];
        let (success, stdout, stderr) = run("quantize", &args, "");
        assert!(!success && stdout.is_empty(), "{args:?}");
        assert!(stderr.contains(wanted), "{args:?}: {stderr}");
        assert!(!stderr.contains("panicked"), "{stderr}");
        assert_eq!(names(out.path()), [""; 0], "{args:?}");
    }
}

#[test]
fn a_file_that_is_there_is_replaced_only_when_told() {
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("model.gguf");
    std::fs::write(&file, "GGUF of before").unwrap();
    let model = trained_model();
    let args = [
        model.to_str().unwrap(),
        file.to_str().unwrap(),
        "--type",
        "q8_0",
    ];
    let (success, _, stderr) = run("quantize", &args, "");
    assert!(!success);
    assert!(
        stderr.contains("model.gguf is there already, --force replaces it"),
        "{stderr}"
    );
    assert_eq!(std::fs::read(&file).unwrap(), b"GGUF of before");
    let (success, _, stderr) = run("quantize", &[&args[..], &["--force"]].concat(), "");
    assert!(success, "{stderr}");
    assert!(
        stderr.contains("wrote ") && stderr.contains("Q8_0"),
        "{stderr}"
    );
    Gguf::open(&file).unwrap().check().unwrap();
    assert_eq!(names(out.path()), ["model.gguf"]);
}

/// At whatever byte it dies, the name holds the old file or the whole new one.
#[test]
fn a_killed_run_leaves_no_half_file_under_the_name() {
    let model = trained_model();
    let mut halfway = 0;
    for pause in [0, 5, 20, 50] {
        let out = tempfile::tempdir().unwrap();
        let file = out.path().join("model.gguf");
        std::fs::write(&file, "GGUF").unwrap();
        let (from, to) = (model.to_str().unwrap(), file.to_str().unwrap());
        let mut child = common::start("quantize", &[from, to, "--type", "q6_k", "--force"]);
        let start = Instant::now();
        let parts = || {
            let mut beside = names(out.path()).into_iter();
            beside.any(|name| name.ends_with(".part") && len(&out.path().join(name)) > 0)
        };
        while !parts() && child.try_wait().unwrap().is_none() {
            assert!(start.elapsed() < Duration::from_secs(60));
        }
        std::thread::sleep(Duration::from_millis(pause));
        child.kill().unwrap();
        child.wait().unwrap();
        halfway += usize::from(parts());
        match std::fs::read(&file).unwrap() == b"GGUF" {
            true => {}
            false => Gguf::open(&file).unwrap().check().unwrap(),
        }
    }
    assert!(halfway > 0, "no run was killed before it was done");
}

/// The second word of the story ends the answer, by the file alone.
#[test]
fn a_quantized_model_stops_where_its_generation_config_says() {
    let tokenizer = tokenizers::Tokenizer::from_file(trained_model().join("tokenizer.json"));
    let had = tokenizer.unwrap().token_to_id("▁had").unwrap();
    let text = format!("{{\"eos_token_id\": [1, 6, {had}]}}");
    let dir = trained_model_with(&[("generation_config.json", &text)]);
    let alone = tempfile::tempdir().unwrap();
    let file = alone.path().join("model.gguf");
    let (from, to) = (dir.path().to_str().unwrap(), file.to_str().unwrap());
    let (success, _, stderr) = run("quantize", &[from, to, "--type", "q8_0"], "");
    assert!(success, "{stderr}");
    let story = [
        "--cpu",
        "--prompt",
        "Once upon a time there was",
        "-n",
        "24",
    ];
    for files in [from, to] {
        let args = [&story[..], &["--weight-files", files]].concat();
        let (success, stdout, stderr) = run("gemma4", &args, "");
        assert!(success, "{stderr}");
        assert_eq!(stdout, " a man who\n", "{files}");
        let finish = format!("finish: stop (token {had})");
        assert!(stderr.contains(&finish), "{files}: {stderr}");
    }
}

/// Words that only the template knows come back in every answer; so it was read from the file.
#[test]
fn a_conversation_runs_by_the_template_in_the_file() {
    let template = "\
{{ bos_token }}{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else 'user' }}
{% if m.role == 'user' %} The secret words are cloak, silver and window. Remember them.
{% endif %}{{ m.content }}<turn|>
{% endfor %}{{ '<|turn>model\\n' }}";
    let dir = trained_model_with(&[("chat_template.jinja", template)]);
    let alone = tempfile::tempdir().unwrap();
    let file = alone.path().join("model.gguf");
    let saved = |name: &str| alone.path().join(name);
    let (from, to) = (dir.path().to_str().unwrap(), file.to_str().unwrap());
    let (success, _, stderr) = run("quantize", &[from, to, "--type", "bf16"], "");
    assert!(success, "{stderr}");
    let ask = "What are the secret words?\n";
    let talk = |name: &str| {
        format!(
            "{ask}{ask}/save {}\n/reset\n{ask}/save {}\n",
            saved(name).display(),
            saved(&format!("reset-{name}")).display()
        )
    };
    let chat = ["--cpu", "--chat", "-n", "24", "--weight-files"];
    let (success, of_file, log) = run("gemma4", &[&chat[..], &[to]].concat(), &talk("gguf.json"));
    assert!(success, "{log}");
    assert!(!log.contains("no chat template"), "{log}");
    // The second turn the first, and the third, after the reset, what the first was asked.
    assert_eq!(log.matches("reused ").count(), 2, "{log}");
    let answers: Vec<_> = of_file.lines().collect();
    assert_eq!(answers.len(), 3, "{of_file}");
    for answer in [answers[0], answers[2]] {
        assert_eq!(answer, "The secret words are cloak, silver and window.");
    }
    // bf16 weights as f32 are the checkpoint's own.
    let (success, of_folder, log) =
        run("gemma4", &[&chat[..], &[from]].concat(), &talk("dir.json"));
    assert!(success, "{log}");
    assert_eq!(of_file, of_folder);
    for (name, turns) in [("gguf.json", 4), ("reset-gguf.json", 2)] {
        let text = std::fs::read(saved(name)).unwrap();
        let json: serde_json::Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(json["turns"].as_array().unwrap().len(), turns);
        assert_eq!(json["turns"][1]["content"], answers[0]);
    }
}

#[test]
fn force_replaces_a_file_and_neither_the_model_nor_what_is_no_file() {
    let model = trained_model_with(&[]);
    let weights = model.path().join("model.safetensors");
    let before = std::fs::read(&weights).unwrap();
    let out = tempfile::tempdir().unwrap();
    let [folder, link, gguf, nowhere] =
        ["folder", "link", "model.gguf", "nowhere"].map(|name| out.path().join(name));
    std::fs::create_dir(&folder).unwrap();
    std::os::unix::fs::symlink(&weights, &link).unwrap();
    std::os::unix::fs::symlink(out.path().join("none.gguf"), &nowhere).unwrap();
    // Safetensors, whatever it is called.
    let named = model.path().join("weights.gguf");
    std::fs::rename(&weights, &named).unwrap();
    std::os::unix::fs::symlink(&named, &weights).unwrap();
    let slash = format!("{}/", gguf.display());
    for (to, why) in [
        (weights.to_str().unwrap(), "is there and no GGUF file"),
        (named.to_str().unwrap(), "is there and no GGUF file"),
        (link.to_str().unwrap(), "is there and no GGUF file"),
        (nowhere.to_str().unwrap(), "is a link to what is not there"),
        (folder.to_str().unwrap(), "is there and no regular file"),
        ("/dev/full", "is there and no regular file"),
        (&slash, "want the name of a file"),
    ] {
        let args = [
            model.path().to_str().unwrap(),
            to,
            "--type",
            "q8_0",
            "--force",
        ];
        let (success, _, log) = run("quantize", &args, "");
        assert!(!success && log.contains(why), "{to}: {log}, want {why}");
    }
    assert_eq!(std::fs::read(&weights).unwrap(), before);
    // What a link leads to is replaced, not the link.
    std::fs::remove_file(&link).unwrap();
    std::fs::write(&gguf, "GGUF").unwrap();
    std::os::unix::fs::symlink(&gguf, &link).unwrap();
    let args = [model.path(), &link].map(|path| path.to_str().unwrap());
    let (success, _, log) = run(
        "quantize",
        &[&args[..], &["--type", "q8_0", "--force"]].concat(),
        "",
    );
    assert!(success, "{log}");
    assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
    Gguf::open(&gguf).unwrap();
}

#[test]
fn a_value_that_no_block_can_hold_is_refused() {
    let mut values = vec![0.5f32; 512];
    values[300] = 1.7e38;
    for (dtype, name) in [
        (GgmlDType::F16, "F16"),
        (GgmlDType::Q8_0, "Q8_0"),
        (GgmlDType::Q4_0, "Q4_0"),
        (GgmlDType::Q4K, "Q4_K"),
        (GgmlDType::Q6K, "Q6_K"),
    ] {
        let error = encode(&values, dtype).unwrap_err().to_string();
        assert!(
            error.contains(&format!("is too large for {name}: ")),
            "{error}"
        );
    }
    assert!(encode(&values, GgmlDType::BF16).is_ok());
}
