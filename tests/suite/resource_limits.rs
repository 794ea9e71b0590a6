//! Files that claim, nest, lead or loop without end: each is refused by name, soon, and in a process that may have a GiB.
#![cfg(target_os = "linux")]

use crate::common::{example, trained_model};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const FILES: [&str; 4] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "model.safetensors",
];
const INDEX: &str = "model.safetensors.index.json";

/// The trained model as a hub's cache has it: a folder of links.
fn linked() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in FILES {
        symlink(trained_model().join(name), dir.path().join(name)).unwrap();
    }
    dir
}

/// The linked model with one file in place of another.
fn with(name: &str, bytes: impl AsRef<[u8]>) -> TempDir {
    let dir = linked();
    std::fs::remove_file(dir.path().join(name)).ok();
    std::fs::write(dir.path().join(name), bytes).unwrap();
    dir
}

fn link_to(name: &str, target: impl AsRef<Path>) -> TempDir {
    let dir = linked();
    std::fs::remove_file(dir.path().join(name)).ok();
    symlink(target, dir.path().join(name)).unwrap();
    dir
}

/// Success, and what is on stderr, of a run that gets no more than a GiB of addresses.
fn run(weights: &Path, args: &[&str]) -> (bool, String) {
    let model = [
        "--prompt",
        "Once",
        "--weight-files",
        weights.to_str().unwrap(),
    ];
    run_with(Stdio::null(), &[&model, args].concat())
}

fn run_with(stdin: Stdio, args: &[&str]) -> (bool, String) {
    let start = Instant::now();
    let mut child = Command::new("sh")
        .args(["-c", "ulimit -v 1048576; exec \"$0\" \"$@\""])
        .arg(example("gemma4"))
        .args(["--cpu", "-n", "2"])
        .args(args)
        // Threads and their arenas take addresses too, whatever the machine.
        .env("RAYON_NUM_THREADS", "2")
        .env("MALLOC_ARENA_MAX", "2")
        .env("RUST_BACKTRACE", "0")
        .stdin(stdin)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    while child.try_wait().unwrap().is_none() {
        if start.elapsed() > Duration::from_secs(240) {
            child.kill().unwrap();
            panic!("{args:?}: it goes on and on");
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    let out = child.wait_with_output().unwrap();
    (out.status.success(), String::from_utf8(out.stderr).unwrap())
}

fn assert_refused(dir: &TempDir, args: &[&str], file: &str, why: &str) {
    let (success, log) = run(dir.path(), args);
    assert!(!success, "{file} was taken, want {why}");
    for want in [file, why] {
        assert!(log.contains(want), "want {want}: {log}");
    }
    for not in ["panicked", "memory allocation"] {
        assert!(!log.contains(not), "{log}");
    }
}

#[test]
fn a_checkpoint_may_be_a_folder_of_links() {
    let (success, log) = run(linked().path(), &[]);
    assert!(success, "{log}");
}

#[test]
fn json_that_nests_without_end_is_refused() {
    let arrays = "[".repeat(1_000_000);
    let objects = r#"{"a":"#.repeat(200_000);
    let inside = |key: &str| format!(r#"{{"{key}":{arrays}"#);
    for text in [&arrays, &objects] {
        for name in [FILES[0], FILES[1], FILES[2], INDEX] {
            // Other parsers say it otherwise, or stop at what should be there.
            let why = match name == FILES[2] || name == INDEX {
                true => "",
                false => "recursion limit",
            };
            assert_refused(&with(name, text), &[], name, why);
        }
    }
    assert_refused(
        &with(INDEX, inside("weight_map")),
        &[],
        INDEX,
        "invalid type",
    );
    assert_refused(
        &with(FILES[0], inside("text_config")),
        &[],
        FILES[0],
        "recursion limit",
    );
    assert_refused(&with(FILES[2], inside("model")), &[], FILES[2], "");
    let header = inside("model.norm.weight");
    let header = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    assert_refused(
        &with(FILES[3], header),
        &[],
        FILES[3],
        "model.norm.weight: ",
    );
    let config = with("tokenizer_config.json", &arrays);
    assert_refused(
        &config,
        &["--chat"],
        "tokenizer_config.json",
        "recursion limit",
    );
}

#[test]
fn sizes_that_no_file_has_are_refused() {
    let safetensors =
        |len: u64, header: &str| [&len.to_le_bytes()[..], header.as_bytes(), &[0; 16]].concat();
    let of = |header: &str| safetensors(header.len() as u64, header);
    let tensor = |shape: &str, end: u64| {
        of(&format!(
            r#"{{"model.norm.weight":{{"dtype":"F32","shape":{shape},"data_offsets":[0,{end}]}}}}"#
        ))
    };
    let weights = FILES[3];
    for (bytes, why) in [
        (safetensors(1 << 63, "{}"), "header should have"),
        (safetensors(99_999_999, "{}"), "header should have"),
        (tensor("[1099511627776]", 1 << 42), "truncated"),
        (tensor("[1099511627776,1099511627776]", 16), "does not fill"),
        (tensor("[18446744073709551615]", 16), "does not fill"),
    ] {
        assert_refused(&with(weights, bytes), &[], weights, why);
    }
    // Many tensors of nothing: a header costs a small multiple of itself.
    let many: Vec<_> = (0..200_000)
        .map(|i| format!(r#""model.{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#))
        .collect();
    let many = of(&format!("{{{}}}", many.join(",")));
    assert_refused(&with(weights, many), &[], weights, "");

    let config = |key: &str, value: u64| {
        let text = std::fs::read_to_string(trained_model().join(FILES[0])).unwrap();
        let mut config: serde_json::Value = serde_json::from_str(&text).unwrap();
        match config.get_mut("text_config") {
            Some(text) => text[key] = value.into(),
            None => config[key] = value.into(),
        }
        with(FILES[0], config.to_string())
    };
    for key in [
        "num_hidden_layers",
        "vocab_size",
        "hidden_size",
        "head_dim",
        "intermediate_size",
    ] {
        for value in [1 << 40, u64::MAX] {
            assert_refused(&config(key, value), &[], FILES[0], key);
            assert_refused(&config(key, value), &["--plan"], FILES[0], key);
        }
    }
    for key in ["vocab_size", "intermediate_size"] {
        assert_refused(&config(key, 1 << 20), &[], weights, "has shape");
    }
}

#[test]
fn gguf_headers_that_claim_more_than_their_file_are_refused() {
    let header = |tensors: u64, entries: u64, rest: &[u8]| {
        let counts = [tensors.to_le_bytes(), entries.to_le_bytes()].concat();
        [b"GGUF\x03\0\0\0", counts.as_slice(), rest].concat()
    };
    let tensor = |dims: &[u64]| {
        let mut out = [&1u64.to_le_bytes()[..], b"t"].concat();
        out.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|dim| out.extend(dim.to_le_bytes()));
        out.extend([0; 12 + 64]);
        out
    };
    let text = [&(1u64 << 40).to_le_bytes()[..], &[b'k'; 64]].concat();
    for (bytes, why) in [
        (header(1_000_000_000, 0, &[0; 64]), "cannot be in the"),
        (header(0, 1_000_000_000, &[0; 64]), "cannot be in the"),
        (header(0, 1, &text), "a string of 1099511627776 bytes"),
        (header(1, 0, &tensor(&[1 << 40, 1 << 40])), "has dimensions"),
        (header(1, 0, &tensor(&[1 << 40])), "rope_freqs"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("m.gguf"), bytes).unwrap();
        let (success, log) = run(&dir.path().join("m.gguf"), &[]);
        assert!(
            !success && log.contains("m.gguf") && log.contains(why),
            "want {why}: {log}"
        );
        assert!(
            !log.contains("panicked") && !log.contains("memory allocation"),
            "{log}"
        );
    }
}

#[test]
fn links_to_what_is_no_file_are_refused() {
    for name in FILES {
        let why = if name == FILES[3] {
            "found no checkpoint"
        } else {
            "is no regular file"
        };
        assert_refused(&link_to(name, "/dev/zero"), &[], name, why);
        let dir = linked();
        let pipe = dir.path().join(name);
        std::fs::remove_file(&pipe).unwrap();
        assert!(Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success());
        assert_refused(&dir, &[], name, why);
    }
    for name in ["chat_template.jinja", "tokenizer_config.json"] {
        assert_refused(
            &link_to(name, "/dev/zero"),
            &["--chat"],
            name,
            "is no regular file",
        );
    }
    // In a circle.
    assert_refused(&link_to(FILES[0], FILES[0]), &[], FILES[0], "");
    let index = |file: &str| format!(r#"{{"weight_map":{{"model.norm.weight":"{file}"}}}}"#);
    for (file, why) in [
        (
            "../../x.safetensors",
            "want the name of a file beside the index",
        ),
        ("/dev/zero", "want the name of a file beside the index"),
        ("zero", "which is not beside the index"),
        ("circle", "which is not beside the index"),
        // The index itself.
        (INDEX, "header should have"),
    ] {
        let dir = with(INDEX, index(file));
        symlink("/dev/zero", dir.path().join("zero")).unwrap();
        symlink("circle", dir.path().join("circle")).unwrap();
        assert_refused(&dir, &[], INDEX, why);
    }
    let (zero, dir) = (Path::new("/dev/zero"), tempfile::tempdir().unwrap());
    let (success, log) = run(zero, &["--config-file", dir.path().to_str().unwrap()]);
    assert!(
        !success && log.contains("/dev/zero: is no regular file"),
        "{log}"
    );
}

#[test]
fn prompts_that_do_not_end_are_refused() {
    let zeros = || Stdio::from(std::fs::File::open("/dev/zero").unwrap());
    for args in [
        &["--prompt-file", "/dev/zero"][..],
        &["--prompt-file", "-"],
        &["--chat", "--prompt", "Once", "--system", "@/dev/zero"],
        &["--chat"],
    ] {
        let (success, log) = run_with(zeros(), args);
        assert!(!success, "{args:?}");
        let why = "does not end, want at most 67108864 bytes";
        assert!(log.contains(why), "{args:?}: {log}");
        assert!(!log.contains("memory allocation"), "{args:?}: {log}");
    }
}

/// One shard under two names: every tensor of it would be there twice.
#[test]
fn a_shard_that_is_there_under_two_names_is_refused() {
    let dir = linked();
    let weights = dir.path().join(FILES[3]);
    for name in ["a.safetensors", "b.safetensors"] {
        symlink(&weights, dir.path().join(name)).unwrap();
    }
    let bytes = std::fs::read(&weights).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let names = tensors.names();
    let entries = names
        .iter()
        .enumerate()
        .map(|(i, name)| format!(r#""{name}":"{}.safetensors""#, ["a", "b"][i % 2]));
    let entries: Vec<_> = entries.collect();
    let index = format!(r#"{{"weight_map":{{{}}}}}"#, entries.join(","));
    std::fs::write(dir.path().join(INDEX), index).unwrap();
    assert_refused(&dir, &[], INDEX, "does not put it");
    // The same tensor put into two files.
    let twice = entries.iter().map(|e| e.replace("b.", "a."));
    let twice: Vec<_> = twice
        .chain([format!(r#""{}":"b.safetensors""#, names[0])])
        .collect();
    let index = format!(r#"{{"weight_map":{{{}}}}}"#, twice.join(","));
    std::fs::write(dir.path().join(INDEX), index).unwrap();
    assert_refused(&dir, &[], INDEX, "is there twice");
}

#[test]
fn chat_templates_that_loop_or_grow_are_refused() {
    let file = "chat_template.jinja";
    let double = "{% set ns.s = ns.s ~ ns.s %}";
    let begin = "{% set ns = namespace(s='0123456789abcdef') %}";
    let memory = "it takes more than 64 MiB of memory";
    for (source, why) in [
        (
            "{% for a in range(99999) %}".repeat(4) + "x" + &"{% endfor %}".repeat(4),
            "fuel",
        ),
        (
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}".into(),
            "recursion",
        ),
        // A string that doubles 60 times, in a loop and in so many words.
        (
            format!(
                "{begin}{{% for i in range(60) %}}{double}{{% endfor %}}{{{{ ns.s | length }}}}"
            ),
            memory,
        ),
        (
            format!("{begin}{}{{{{ ns.s | length }}}}", double.repeat(60)),
            memory,
        ),
        // What the compiler works out, again and again.
        ("{{ 'x' * 99999999 }}".repeat(1000), memory),
        // By a filter: 8,192 times 128 KiB.
        (
            format!(
                "{begin}{}{{{{ ns.s | replace('0', ns.s) }}}}",
                double.repeat(13)
            ),
            memory,
        ),
        ("{% if %}".into(), "chat template failed"),
        ("{{ messages".into(), "chat template failed"),
    ] {
        assert_refused(&with(file, &source), &["--chat"], file, why);
    }
    let long = " ".repeat((4 << 20) + 1);
    assert_refused(&with(file, long), &["--chat"], file, "want at most 4194304");
}

/// As large as a file may be, of what costs most once it is read: taken or refused, but never an abort.
#[test]
fn files_at_their_limits_are_read_in_a_gib() {
    // `before`, as many of `item` (with its number) as fit, `after`, and space up to `len`.
    let filled = |len: usize, before: &str, item: &dyn Fn(usize) -> String, after: &str| {
        let mut text = before.to_string();
        let mut next = item(0);
        let mut i = 0;
        while text.len() + next.len() + 1 + after.len() <= len {
            text += &next;
            i += 1;
            next = format!(",{}", item(i));
        }
        text += after;
        text += &" ".repeat(len - text.len());
        text
    };
    let ones = |len, before: &str, after: &str| filled(len, before, &|_| "1".into(), after);
    let fits = |dir: &TempDir, args: &[&str], refused: Option<&str>| {
        let (success, log) = run(dir.path(), args);
        assert_eq!(success, refused.is_none(), "{log}");
        for not in ["panicked", "memory allocation"] {
            assert!(!log.contains(not), "{log}");
        }
        let want = refused.unwrap_or("");
        assert!(log.contains(want), "want {want}: {log}");
    };
    let own = |name: &str| {
        let text = std::fs::read_to_string(trained_model().join(name)).unwrap();
        text.trim_end().strip_suffix('}').unwrap().to_string()
    };
    const MIB: usize = 1 << 20;
    for name in [FILES[0], FILES[1]] {
        let text = ones(MIB, &format!("{}, \"x\":[", own(name)), "]}");
        fits(&with(name, &text), &[], None);
        fits(&with(name, text + " "), &[], Some("want at most 1048576"));
    }
    let template = r#"{"chat_template":"{% for m in messages %}{{ m.content }}{% endfor %}","x":["#;
    let settings = ones(4 * MIB, template, "]}");
    fits(&with("tokenizer_config.json", settings), &["--chat"], None);

    let map = |i| format!(r#""{i:x}":"""#);
    let index = filled(16 * MIB, r#"{"weight_map":{"#, &map, "}}");
    fits(&with(INDEX, &index), &[], Some("want the name of a file"));
    fits(
        &with(INDEX, index + " "),
        &[],
        Some("want at most 16777216"),
    );

    let weights = std::fs::read(trained_model().join(FILES[3])).unwrap();
    let (len, rest) = weights.split_at(8);
    let (header, data) = rest.split_at(u64::from_le_bytes(len.try_into().unwrap()) as usize);
    let of = |header: String, data: &[u8]| {
        let len = (header.len() as u64).to_le_bytes();
        with(FILES[3], [&len, header.as_bytes(), data].concat())
    };
    let header = std::str::from_utf8(header).unwrap().trim_end();
    let padded = header.to_string() + &" ".repeat(16 * MIB - header.len());
    fits(&of(padded.clone(), data), &[], None);
    fits(&of(padded + " ", data), &[], Some("want at most 16777216"));
    let zeros = |before: &str, after: &str| filled(16 * MIB, before, &|_| "0".into(), after);
    let shape = r#"{"model.norm.weight":{"dtype":"F32","shape":["#;
    for (header, why) in [
        (ones(16 * MIB, r#"{"a":["#, "]}"), "a: "),
        (
            zeros(shape, r#"],"data_offsets":[0,0]}}"#),
            "dimensions, want at most 8",
        ),
        (
            filled(
                16 * MIB,
                "{",
                &|i| format!(r#""model.{i:x}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#),
                "}",
            ),
            "faults",
        ),
    ] {
        fits(&of(header, &[]), &[], Some(why));
    }
}

/// A tokenizer of 128 MiB, in which other values are in the place of the trained model's.
#[test]
fn tokenizers_at_their_limits_are_read_in_a_gib() {
    const LARGEST: usize = 128 << 20;
    let own = std::fs::read_to_string(trained_model().join(FILES[2])).unwrap();
    let mut grown: serde_json::Value = serde_json::from_str(&own).unwrap();
    let own = grown.to_string();
    let filled = |text: String| {
        let space = " ".repeat(LARGEST - text.len());
        text + &space
    };
    let tokens = |n: usize| {
        let tokens: Vec<_> = (0..n)
            .map(|i| format!(r#""@@{i:x}":{}"#, i + 4096))
            .collect();
        tokens.join(",")
    };
    let put = |at: &str, text: &str| {
        assert_eq!(own.matches(at).count(), 1, "{at}");
        own.replacen(at, &format!("{at}{text}"), 1)
    };
    let (vocab, merges, added) = (r#""vocab":{"#, r#""merges":["#, r#""added_tokens":["#);
    let added_token = |i| {
        format!(
            r#"{{"id":{i},"content":"<{i:x}>","single_word":false,"lstrip":false,"rstrip":false,"normalized":true,"special":false}},"#
        )
    };
    let added_tokens: String = (4096..4096 + 32_000).map(added_token).collect();
    let long = "x".repeat(LARGEST - own.len() - 100);
    grown["normalizer"]["content"] = long.clone().into();
    let ones = "1,".repeat(60 << 20);
    for (text, want) in [
        (own.clone(), None),
        (format!(r#"{{"model":[{ones}1]}}"#), Some("")),
        (
            put(vocab, &format!(r#""x":[{ones}1],"#)),
            Some("more than 524288 values"),
        ),
        (put(merges, &ones), Some("more than 3145728 values")),
        (
            own.replacen('{', &format!(r#"{{"x":[{ones}1],"#), 1),
            Some("unknown field `x`"),
        ),
        // All that the bounds of numbers allow.
        (
            put(vocab, &(tokens((1 << 19) - 5000) + ",")),
            Some("below the vocabulary of 4096"),
        ),
        (put(merges, &r#"["h","e"],"#.repeat((1 << 20) - 5000)), None),
        (put(added, &added_tokens), Some("")),
        // One text as long as the file.
        (
            put(vocab, &format!(r#""{long}":5000,"#)),
            Some("below the vocabulary of 4096"),
        ),
        (grown.to_string(), Some("bytes for each of a text")),
    ] {
        let (success, log) = run(with(FILES[2], filled(text)).path(), &[]);
        assert_eq!(success, want.is_none(), "{log}");
        for not in ["panicked", "memory allocation"] {
            assert!(!log.contains(not), "{log}");
        }
        let want = want.unwrap_or("");
        assert!(log.contains(want), "want {want}: {log}");
    }
    let log = run(with(FILES[2], filled(own.clone()) + " ").path(), &[]).1;
    assert!(log.contains("want at most 134217728"), "{log}");
}
