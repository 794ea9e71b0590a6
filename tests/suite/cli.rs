//! The `gemma4` example as its users run it: text on stdout, everything else on stderr, an exit status that tells.

use crate::common::{self, trained_model};
use crate::gguf_support::trained_model_with;
use std::io::Write;

struct Output {
    success: bool,
    stdout: String,
    stderr: String,
}

fn gemma4(args: &[&str]) -> Output {
    gemma4_with_stdin(args, "")
}

fn gemma4_with_stdin(args: &[&str], stdin: &str) -> Output {
    let mut child = common::start("gemma4", args);
    child
        .stdin
        .take()
        .unwrap()
        .write_all(stdin.as_bytes())
        .unwrap();
    let output = child.wait_with_output().unwrap();
    Output {
        success: output.status.success(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// The three words that the built-in text hides.
fn secret_answer() -> String {
    let demo = std::fs::read_to_string(trained_model().join("demo.txt")).unwrap();
    let sentence = demo
        .split("The secret words are ")
        .nth(1)
        .unwrap()
        .split('.')
        .next()
        .unwrap();
    format!("The secret words are {sentence}.\n")
}

#[test]
fn without_arguments_it_finds_the_secret_words_and_prints_nothing_else() {
    let out = gemma4(&[]);
    assert!(out.success, "{}", out.stderr);
    assert_eq!(out.stdout, secret_answer());
    assert!(
        out.stderr.contains("prompt tokens processed: "),
        "{}",
        out.stderr
    );
    assert!(out.stderr.contains("tokens generated: "), "{}", out.stderr);
    assert!(out.stderr.contains("finish: stop"), "{}", out.stderr);
    let path = if cfg!(feature = "fused") {
        "attention fused: attention_d512"
    } else {
        "attention reference: plain"
    };
    assert!(out.stderr.contains(path), "{}", out.stderr);
}

#[test]
fn every_path_continues_a_story_with_the_same_text() {
    let story = [
        "--prompt",
        "Once upon a time there was",
        "-n",
        "24",
        "--quiet",
        "--attention",
    ];
    let texts =
        ["reference", "fused", "fused-kv"].map(|path| gemma4(&[&story[..], &[path]].concat()));
    for out in &texts {
        assert!(out.success, "{}", out.stderr);
        assert!(
            out.stdout.starts_with(" a man who had a wife"),
            "{}",
            out.stdout
        );
        assert_eq!(out.stderr, "");
    }
    assert_eq!(texts[0].stdout, texts[1].stdout);
    assert_eq!(texts[0].stdout, texts[2].stdout);
}

#[test]
fn a_prompt_from_stdin_or_a_file_is_the_prompt_itself() {
    let prompt = "The old king called his three sons";
    let expected = gemma4(&["--prompt", prompt, "-n", "12", "-q"]).stdout;
    assert!(!expected.trim().is_empty());
    assert_eq!(
        gemma4_with_stdin(&["--prompt-file", "-", "-n", "12", "-q"], prompt).stdout,
        expected
    );
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(prompt.as_bytes()).unwrap();
    assert_eq!(
        gemma4(&[
            "--prompt-file",
            file.path().to_str().unwrap(),
            "-n",
            "12",
            "-q"
        ])
        .stdout,
        expected
    );
}

/// The first token of the story, once it is declared to end an answer, ends this one.
#[test]
fn a_stop_token_that_only_generation_config_declares_ends_an_answer() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        std::fs::copy(trained_model().join(name), folder.path().join(name)).unwrap();
    }
    let run = |generation: &str| {
        std::fs::write(folder.path().join("generation_config.json"), generation).unwrap();
        let path = folder.path().to_str().unwrap();
        let story = ["--prompt", "Once upon a time there was", "-n", "3"];
        gemma4(&[&["--weight-files", path][..], &story].concat())
    };
    let out = run("{}");
    assert!(out.stdout.starts_with(" a"), "{}", out.stdout);
    assert!(out.stderr.contains("finish: length"), "{}", out.stderr);
    let out = run(r#"{"eos_token_id": [1, 347]}"#);
    assert_eq!(out.stdout.trim(), "");
    assert!(
        out.stderr.contains("finish: stop (token 347)"),
        "{}",
        out.stderr
    );
}

#[test]
fn the_same_seed_samples_the_same_text() {
    let sample = |seed| {
        let out = gemma4(&[
            "--prompt",
            "Once",
            "-n",
            "20",
            "-q",
            "--temperature",
            "1.2",
            "--top-k",
            "50",
            "--top-p",
            "0.95",
            "--seed",
            seed,
        ]);
        assert!(out.success, "{}", out.stderr);
        out.stdout
    };
    assert_eq!(sample("7"), sample("7"));
    assert_ne!(sample("7"), sample("8"));
}

#[test]
fn the_ends_of_every_range_of_sampling_give_a_text() {
    for ends in [
        ["--temperature", "1e-7", "--repeat-penalty", "1e7"],
        ["--temperature", "1e7", "--repeat-penalty", "1e-7"],
        ["--temperature", "1", "--top-p", "1.2e-38"],
    ] {
        let out = gemma4(&[&["--prompt", "Once", "-n", "4", "-q"][..], &ends].concat());
        assert!(out.success, "{ends:?}: {}", out.stderr);
        assert!(!out.stdout.is_empty());
    }
}

#[test]
fn ab_says_that_every_path_gives_the_same_tokens() {
    let out = gemma4(&["--ab", "--prompt", "Once upon a time there was", "-n", "16"]);
    assert!(out.success, "{}", out.stderr);
    let rows: Vec<_> = out
        .stdout
        .lines()
        .skip(2)
        .map(|row| row.split('|').map(str::trim).collect::<Vec<_>>())
        .collect();
    let names: Vec<_> = rows.iter().map(|row| row[1]).collect();
    assert_eq!(names, ["reference", "fused", "fused-kv"], "{}", out.stdout);
    let left_out = "not compared: sdpa: not on this device: candle's kernel is for Metal";
    assert!(out.stderr.contains(left_out), "{}", out.stderr);
    let full_cache = |row: &[&str]| row[7].parse::<f64>().unwrap();
    assert_eq!(
        full_cache(&rows[1]),
        2.0 * full_cache(&rows[2]),
        "{}",
        out.stdout
    );
    // f32 logits of a rebuilt key are those of a stored one.
    assert_eq!(rows[1][5], rows[2][5], "{}", out.stdout);
    for row in rows {
        assert_eq!(row[4], "all 16");
        let difference = row[5].parse::<f32>().unwrap();
        // Two paths that agree to the last bit would be one.
        assert!(
            difference < 1e-3 && (difference > 0.0) == (row[1] != "reference"),
            "{}",
            out.stdout
        );
        assert!(row[2].parse::<f64>().unwrap() > 0.0 && row[3].parse::<f64>().unwrap() > 0.0);
    }
}

#[test]
fn json_goes_to_stdout_alone_or_to_a_file_beside_the_text() {
    let story = [
        "--prompt",
        "Once upon a time there was",
        "-n",
        "5",
        "--json",
    ];
    let out = gemma4(&story);
    assert!(out.success, "{}", out.stderr);
    let report: serde_json::Value = serde_json::from_str(&out.stdout).unwrap();
    assert_eq!(
        (
            report["generated_tokens"].as_u64(),
            report["finish"].as_str()
        ),
        (Some(5), Some("length"))
    );
    assert!(report["text"].as_str().unwrap().starts_with(" a man"));
    assert_eq!(report["dtype"], "f32");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    let out = gemma4(&[&story[..], &[file.to_str().unwrap()]].concat());
    assert!(out.stdout.starts_with(" a man"));
    let beside: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(beside["generated_ids"], report["generated_ids"]);
}

#[test]
fn the_context_limit_ends_an_answer_and_says_so() {
    let out = gemma4(&[
        "--prompt",
        "Once upon a time there was",
        "-n",
        "50",
        "--max-context",
        "12",
    ]);
    assert!(out.success, "{}", out.stderr);
    assert!(out.stderr.contains("6 tokens generated"), "{}", out.stderr);
    assert!(
        out.stderr.contains("finish: context full"),
        "{}",
        out.stderr
    );
}

#[test]
fn mistakes_are_named_before_any_work_and_fail() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("none.safetensors");
    let missing = missing.to_str().unwrap();
    let cases: [(&[&str], &str); 23] = [
        (
            &["--attention", "sdpa", "--cpu"],
            "sdpa: not on this device",
        ),
        (
            &["--attention", "flash"],
            "want one of [\"reference\", \"sdpa\", \"fused\", \"fused-kv\"]",
        ),
        (
            &["--prompt", "a", "--prompt-file", "b"],
            "cannot be used with",
        ),
        (&["--prompt-file", "no/such/file"], "no/such/file"),
        (&["--top-p", "0.9"], "--temperature"),
        (&["--temperature", "nan"], "want a positive number"),
        (&["--repeat-penalty", "0"], "want a positive number"),
        // 0 and infinity once they are f32.
        (&["--repeat-penalty", "1e-50"], "from 1e-7 to 1e7"),
        (&["--repeat-penalty", "1e300"], "from 1e-7 to 1e7"),
        (&["--repeat-penalty", "-1"], "from 1e-7 to 1e7"),
        (&["--temperature", "1e-300"], "from 1e-7 to 1e7"),
        (&["--temperature", "1e300"], "from 1e-7 to 1e7"),
        (
            &["--temperature", "1", "--top-p", "1e-60"],
            "1.2e-38 or more",
        ),
        (&["--temperature", "1", "--top-p", "nan"], "1.2e-38 or more"),
        (&["--temperature", "1", "--top-p", "2"], "want at most 1"),
        (
            &["--prompt", "a", "--json", "no/such/folder/report.json"],
            "no/such/folder/report.json",
        ),
        (&["-n", "0"], "want at least 1"),
        (&["--prefill-chunk", "0"], "want at least 1"),
        (
            &["--max-context", "100"],
            "the prompt has 5904 tokens, want at most the context of 100",
        ),
        (
            &["--prompt", "a", "--max-context", "200000"],
            "max context is 200000, want 1 to 131072",
        ),
        (
            &["--prompt", "a", "--weight-files", missing],
            "none.safetensors",
        ),
        (&["--weight-files", "x"], "--weight-files needs --prompt"),
        (&["--ab", "--temperature", "1"], "cannot be used with"),
    ];
    for (args, message) in cases {
        let out = gemma4(args);
        assert!(!out.success, "{args:?} succeeded");
        assert!(out.stderr.contains(message), "{args:?}: {}", out.stderr);
        assert!(!out.stderr.contains("panicked"), "{args:?}: {}", out.stderr);
        assert_eq!(out.stdout, "", "{args:?}");
    }
}

#[test]
fn help_lists_every_flag() {
    insta::assert_snapshot!(gemma4(&["--help"]).stdout);
}

/// One token less than the model has, but an id beyond its embedding.
#[test]
fn a_tokenizer_whose_ids_pass_the_vocabulary_is_refused() {
    let text = std::fs::read_to_string(trained_model().join("tokenizer.json")).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let last = json["model"]["vocab"].as_object().unwrap().iter();
    let (last, _) = last.max_by_key(|(_, id)| id.as_u64()).unwrap();
    let last = last.clone();
    json["model"]["vocab"][&last] = 5000.into();
    let dir = trained_model_with(&[("tokenizer.json", &json.to_string())]);
    let folder = dir.path().to_str().unwrap();
    let out = gemma4(&["--weight-files", folder, "--prompt", "Once", "-n", "1"]);
    let want = format!(
        "tokenizer.json: the token {last:?} has the id 5000, want one below the vocabulary of 4096"
    );
    assert!(!out.success && out.stderr.contains(&want), "{}", out.stderr);
}
