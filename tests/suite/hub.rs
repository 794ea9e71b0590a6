//! `--model-id`, against a hub on this machine (huggingface/hf-hub#141 among its faults).

use crate::common::{example, trained_model};
use crate::mock_hub::{git_blob, sha256, Faults, MockHub, COMMIT, MODEL};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// An example that knows of no other hub, cache, token or proxy.
fn program(name: &str, home: &Path, endpoint: &str) -> Command {
    let mut command = Command::new(example(name));
    for name in [
        "HF_TOKEN",
        "HF_TOKEN_PATH",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "HF_HUB_DOWNLOAD_TIMEOUT",
    ] {
        command.env_remove(name);
    }
    for name in ["ALL_PROXY", "HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"] {
        command.env_remove(name).env_remove(name.to_lowercase());
    }
    command
        .env("HF_HOME", home)
        .env("HF_ENDPOINT", endpoint)
        .env("RUST_BACKTRACE", "0")
        .args(["--model-id", MODEL]);
    command
}

/// Begins a story.
pub fn story(home: &Path, endpoint: &str) -> Command {
    let mut command = program("gemma4", home, endpoint);
    command
        .args(["--cpu", "-n", "4"])
        .args(["--prompt", "Once upon a time there was"]);
    command
}

fn gemma4(
    home: &Path,
    endpoint: &str,
    args: &[&str],
    variables: &[(&str, &str)],
) -> (bool, String, String) {
    let mut command = story(home, endpoint);
    command.envs(variables.iter().copied());
    let Output {
        status,
        stdout,
        stderr,
    } = command.args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.success(), text(stdout), text(stderr))
}

/// The trained model as a repository of one file of weights.
fn tiny() -> Vec<(&'static str, Vec<u8>)> {
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "model.safetensors",
    ]
    .map(|name| (name, std::fs::read(trained_model().join(name)).unwrap()))
    .to_vec()
}

fn home() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn folder(home: &Path) -> PathBuf {
    home.join("hub/models--tests--tiny")
}

fn snapshot(home: &Path) -> PathBuf {
    folder(home).join("snapshots").join(COMMIT)
}

/// Everything that a run leaves behind where a finished file could be.
fn assert_no_weights(home: &Path) {
    assert!(!snapshot(home).join("model.safetensors").exists());
    let weights = sha256(&std::fs::read(trained_model().join("model.safetensors")).unwrap());
    assert!(!folder(home).join("blobs").join(weights).exists());
}

#[test]
fn a_model_of_the_hub_runs_then_runs_without_it_and_is_where_every_library_looks() {
    let (home, hub) = (home(), MockHub::serve(tiny(), Faults::default()));
    let (success, stdout, stderr) = gemma4(home.path(), &hub.address, &[], &[]);
    assert!(success, "{stderr}");
    assert!(stdout.starts_with(" a man"), "{stdout}");
    assert!(
        stderr.contains("model.safetensors: 17.5 MiB in "),
        "{stderr}"
    );
    let refs = std::fs::read_to_string(folder(home.path()).join("refs/main")).unwrap();
    assert_eq!(refs, COMMIT);
    for name in [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "model.safetensors",
    ] {
        let file = snapshot(home.path()).join(name);
        assert_eq!(
            std::fs::read(&file).unwrap(),
            std::fs::read(trained_model().join(name)).unwrap()
        );
        #[cfg(unix)]
        assert!(std::fs::read_link(&file)
            .unwrap()
            .starts_with("../../blobs"));
    }
    let fetched = hub.fetched().len();
    let (success, again, _) = gemma4(home.path(), &hub.address, &[], &[]);
    assert!(success);
    assert_eq!((again, hub.fetched().len()), (stdout.clone(), fetched));
    // Whoever reaches for this network fails.
    let asked = hub.seen().len();
    for (args, variables) in [
        (&["--offline"][..], &[][..]),
        (&[], &[("HF_HUB_OFFLINE", "1")]),
    ] {
        let (success, offline, stderr) = gemma4(home.path(), &hub.address, args, variables);
        assert!(success, "{stderr}");
        assert_eq!(offline, stdout);
    }
    assert_eq!(hub.seen().len(), asked);
    let (success, offline, stderr) = gemma4(home.path(), "http://127.0.0.1:9", &["--offline"], &[]);
    assert!(success, "{stderr}");
    assert_eq!(offline, stdout);
}

#[test]
fn offline_names_the_first_missing_file_at_once() {
    let (home, hub) = (home(), MockHub::serve(tiny(), Faults::default()));
    let offline = |wanted: &str| {
        let start = Instant::now();
        let (success, _, stderr) = gemma4(home.path(), &hub.address, &["--offline"], &[]);
        assert!(!success);
        assert!(
            start.elapsed() < Duration::from_secs(1),
            "{:?}",
            start.elapsed()
        );
        assert!(stderr.contains(wanted), "{stderr}");
    };
    offline("hub: offline, and config.json of tests/tiny at main is not in");
    assert!(hub.seen().is_empty());
    let (success, _, stderr) = gemma4(home.path(), &hub.address, &[], &[]);
    assert!(success, "{stderr}");
    std::fs::remove_file(snapshot(home.path()).join("model.safetensors")).unwrap();
    offline("hub: offline, and model.safetensors of tests/tiny at main is not in");
}

#[test]
fn a_cut_download_goes_on_where_it_was_cut() {
    let faults = Faults {
        cut_once: Some(40),
        ..Faults::default()
    };
    for no_ranges in [false, true] {
        let (home, hub) = (
            home(),
            MockHub::serve(
                tiny(),
                Faults {
                    no_ranges,
                    ..faults.clone()
                },
            ),
        );
        // The tokenizer is large too, and comes first.
        let (success, stdout, stderr) = gemma4(home.path(), &hub.address, &[], &[]);
        assert!(success, "{stderr}");
        assert!(stdout.starts_with(" a man"), "{stdout}");
        assert!(stderr.contains("cut at"), "{stderr}");
        let ranges: Vec<_> = hub
            .seen()
            .into_iter()
            .filter_map(|s| s.headers.get("range").cloned())
            .collect();
        let tokenizer = std::fs::metadata(trained_model().join("tokenizer.json"))
            .unwrap()
            .len();
        assert_eq!(ranges, [format!("bytes={}-", tokenizer * 40 / 100)]);
        assert_eq!(
            std::fs::read(snapshot(home.path()).join("tokenizer.json")).unwrap(),
            std::fs::read(trained_model().join("tokenizer.json")).unwrap()
        );
    }
}

#[test]
fn what_an_earlier_run_left_is_kept() {
    let (home, hub) = (home(), MockHub::serve(tiny(), Faults::default()));
    let weights = std::fs::read(trained_model().join("model.safetensors")).unwrap();
    let blobs = folder(home.path()).join("blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::write(
        blobs.join(format!("{}.incomplete", sha256(&weights))),
        &weights[..1_000_000],
    )
    .unwrap();
    let (success, _, stderr) = gemma4(home.path(), &hub.address, &[], &[]);
    assert!(success, "{stderr}");
    let ranges: Vec<_> = hub
        .seen()
        .into_iter()
        .filter_map(|s| s.headers.get("range").cloned())
        .collect();
    assert_eq!(ranges, ["bytes=1000000-"]);
}

/// Large ones by their SHA-256, small ones by what git calls them.
#[test]
fn a_file_with_another_digest_never_gets_its_name() {
    for (file, wanted) in [
        ("tokenizer.json", "its SHA-256 is "),
        ("config.json", "its SHA-1 as a git blob is "),
        ("generation_config.json", "its SHA-1 as a git blob is "),
    ] {
        let (home, hub) = (
            home(),
            MockHub::serve(
                tiny(),
                Faults {
                    corrupt: Some(file),
                    ..Faults::default()
                },
            ),
        );
        let (success, _, stderr) = gemma4(home.path(), &hub.address, &[], &[]);
        assert!(!success);
        assert!(
            stderr.contains(&format!("hub: {file}: {wanted}")),
            "{stderr}"
        );
        assert_no_weights(home.path());
        assert!(!snapshot(home.path()).join(file).exists());
        let whole = std::fs::read(trained_model().join(file)).unwrap();
        let left = std::fs::read_dir(folder(home.path()).join("blobs")).unwrap();
        for name in left.map(|f| f.unwrap().file_name().into_string().unwrap()) {
            assert!(
                ![sha256(&whole), git_blob(&whole)].contains(&name),
                "{name}"
            );
            assert!(!name.ends_with(".incomplete"), "{name}");
        }
    }
}

/// `git hash-object` of these says the same.
#[test]
fn a_git_blob_is_named_as_git_does() {
    assert_eq!(git_blob(b""), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
    assert_eq!(
        git_blob(b"hello\n"),
        "ce013625030ba8dba906f756967f9e9ca394464a"
    );
}

/// A file that the hub does not have is no news; one that was never asked for, or lost, is.
#[test]
fn offline_a_file_that_may_be_missing_is_said() {
    let (home, hub) = (home(), MockHub::serve(tiny(), Faults::default()));
    let (success, _, stderr) = gemma4(home.path(), &hub.address, &[], &[]);
    assert!(success, "{stderr}");
    let offline = || gemma4(home.path(), &hub.address, &["--offline"], &[]);
    let (success, stdout, stderr) = offline();
    assert!(success && !stderr.contains("hub: offline"), "{stderr}");
    std::fs::remove_file(snapshot(home.path()).join("generation_config.json")).unwrap();
    let (success, again, stderr) = offline();
    assert!(success, "{stderr}");
    assert_eq!(again, stdout);
    let said = "hub: offline, and generation_config.json is not in ";
    assert!(stderr.contains(said), "{stderr}");
    assert_eq!(stderr.matches("hub: offline").count(), 1, "{stderr}");
}

#[test]
fn an_index_that_its_shards_do_not_follow_is_refused_by_tensor() {
    let index = "model.safetensors.index.json";
    let mut files = sharded("model-00003-of-00003.safetensors");
    let (_, text) = files.iter_mut().find(|(name, _)| *name == index).unwrap();
    let mut json: serde_json::Value = serde_json::from_slice(text).unwrap();
    json["weight_map"]["model.layers.9.layer_scalar"] = "model-00001-of-00003.safetensors".into();
    *text = json.to_string().into_bytes();
    let (home, hub) = (home(), MockHub::serve(files, Faults::default()));
    let (success, _, stderr) = gemma4(home.path(), &hub.address, &[], &[]);
    assert!(!success);
    assert!(
        stderr.contains("model.layers.9.layer_scalar: not in ")
            && stderr.contains("model-00001-of-00003.safetensors, where"),
        "{stderr}"
    );
}

#[test]
fn a_server_that_stops_in_the_middle_is_left_and_asked_again() {
    let faults = Faults {
        stall_once: Some(Duration::from_secs(60)),
        ..Faults::default()
    };
    let (home, hub) = (home(), MockHub::serve(tiny(), faults));
    let start = Instant::now();
    let (success, _, stderr) = gemma4(
        home.path(),
        &hub.address,
        &[],
        &[("HF_HUB_DOWNLOAD_TIMEOUT", "1")],
    );
    assert!(success, "{stderr}");
    assert!(stderr.contains("tokenizer.json: cut at "), "{stderr}");
    assert!(
        start.elapsed() < Duration::from_secs(30),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn refusals_say_what_to_do() {
    let cases = [
        (
            401,
            "GatedRepo",
            "accept its licence at ENDPOINT/tests/tiny, then set HF_TOKEN",
        ),
        (
            403,
            "GatedRepo",
            "accept its licence at ENDPOINT/tests/tiny, then set HF_TOKEN",
        ),
        (401, "", "no access to tests/tiny (status 401)"),
        (
            404,
            "RepoNotFound",
            "there is no model tests/tiny at ENDPOINT/tests/tiny",
        ),
        (404, "RevisionNotFound", "tests/tiny has no revision main"),
        (
            404,
            "EntryNotFound",
            "tests/tiny has no file config.json at main",
        ),
        (500, "", "the server says 500"),
    ];
    for (status, code, wanted) in cases {
        let (home, hub) = (
            home(),
            MockHub::serve(
                tiny(),
                Faults {
                    refuse: Some((status, code)),
                    ..Faults::default()
                },
            ),
        );
        let (success, stdout, stderr) = gemma4(home.path(), &hub.address, &[], &[]);
        let wanted = wanted.replace("ENDPOINT", &hub.address);
        assert!(!success && stdout.is_empty());
        assert!(stderr.contains(&wanted), "{status} {code}: {stderr}");
    }
    let home = home();
    let (_, _, stderr) = gemma4(home.path(), "http://127.0.0.1:9", &[], &[]);
    assert!(
        stderr.contains(
            "hub: can't reach 127.0.0.1: check the network and HTTPS_PROXY, or use --offline"
        ),
        "{stderr}"
    );
    let (_, _, stderr) = gemma4(
        home.path(),
        "http://127.0.0.1:9",
        &["--model-id", "../x"],
        &[],
    );
    assert!(stderr.contains("--model-id"), "{stderr}");
}

#[test]
fn the_token_goes_to_the_hub_and_nowhere_else() {
    let cdn = MockHub::serve(tiny(), Faults::default());
    let hub = MockHub::serve(
        tiny(),
        Faults {
            cdn: Some(cdn.address.clone()),
            ..Faults::default()
        },
    );
    let home = home();
    std::fs::write(home.path().join("token"), "hf_of_the_file\n").unwrap();
    let (success, stdout, stderr) = gemma4(home.path(), &hub.address, &[], &[]);
    assert!(success, "{stderr}");
    assert!(stdout.starts_with(" a man"), "{stdout}");
    assert!(hub
        .seen()
        .iter()
        .all(|s| s.headers["authorization"] == "Bearer hf_of_the_file"));
    assert_eq!(cdn.fetched(), ["tokenizer.json", "model.safetensors"]);
    assert!(cdn
        .seen()
        .iter()
        .all(|s| !s.headers.contains_key("authorization")));
    let other = self::home();
    let (success, _, stderr) = gemma4(
        other.path(),
        &hub.address,
        &[],
        &[("HF_TOKEN", "hf_of_the_variable")],
    );
    assert!(success, "{stderr}");
    assert_eq!(
        hub.seen().last().unwrap().headers["authorization"],
        "Bearer hf_of_the_variable"
    );
}

#[test]
fn a_proxy_is_asked_where_one_is_named() {
    let (home, proxy) = (home(), MockHub::serve(tiny(), Faults::default()));
    for variable in ["HTTPS_PROXY", "HTTP_PROXY"] {
        gemma4(
            home.path(),
            "http://hub.invalid",
            &[],
            &[(variable, &proxy.address)],
        );
    }
    let seen = proxy.seen();
    assert!(
        seen.len() >= 2 && seen.iter().all(|s| s.path.contains("hub.invalid")),
        "{seen:?}"
    );
}

#[test]
fn a_full_disk_is_found_before_a_large_file_is_fetched() {
    let (home, hub) = (
        home(),
        MockHub::serve(
            tiny(),
            Faults {
                claim: Some(("model.safetensors", Some(1 << 60))),
                ..Faults::default()
            },
        ),
    );
    let (success, _, stderr) = gemma4(home.path(), &hub.address, &[], &[]);
    assert!(!success);
    assert!(
        stderr.contains("hub: tests/tiny needs 1048576.0 TiB more, "),
        "{stderr}"
    );
    assert!(stderr.contains("set HF_HOME"), "{stderr}");
    assert_eq!(
        hub.fetched(),
        ["config.json", "tokenizer.json", "generation_config.json"]
    );
}

#[test]
fn a_file_without_a_size_or_with_an_absurd_one_is_not_fetched() {
    let huge = Some((128 << 20) + 1);
    let unsaid = "the answer has no usable Content-Length or X-Linked-Size";
    for (file, size, wanted, fetched) in [
        (
            "tokenizer.json",
            huge,
            "tokenizer.json of tests/tiny has 134217729 bytes, want at most 134217728",
            &["config.json"][..],
        ),
        ("tokenizer.json", None, unsaid, &["config.json"]),
        (
            "model.safetensors",
            None,
            unsaid,
            &["config.json", "tokenizer.json", "generation_config.json"],
        ),
    ] {
        let faults = Faults {
            claim: Some((file, size)),
            ..Faults::default()
        };
        let (home, hub) = (home(), MockHub::serve(tiny(), faults));
        let (success, stdout, stderr) = gemma4(home.path(), &hub.address, &[], &[]);
        assert!(!success && stdout.is_empty());
        assert!(stderr.contains(wanted), "{file} {size:?}: {stderr}");
        assert_eq!(hub.fetched(), fetched, "{file} {size:?}");
    }
}

#[test]
fn a_model_that_no_memory_holds_is_refused_before_its_weights_are_fetched() {
    let (home, hub) = (home(), MockHub::serve(tiny(), Faults::default()));
    let limit = ["--memory-limit", "0.01"];
    let (success, stdout, stderr) = gemma4(home.path(), &hub.address, &limit, &[]);
    assert!(!success && stdout.is_empty());
    assert!(
        stderr.contains("no context fits: the weights are "),
        "{stderr}"
    );
    assert_eq!(hub.fetched(), ["config.json"]);
}

#[test]
fn a_model_of_the_hub_is_quantized_without_room_to_run_it() {
    let (home, hub) = (home(), MockHub::serve(tiny(), Faults::default()));
    let out = home.path().join("tiny.gguf");
    let mut command = program("quantize", home.path(), &hub.address);
    let output = command.arg(&out).args(["--type", "q8_0"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let names: Vec<_> = tiny().into_iter().map(|(name, _)| name).collect();
    let mut fetched = hub.fetched();
    fetched.sort_by_key(|file| names.iter().position(|name| name == file));
    assert_eq!(fetched, names);
    let gguf = gem::models::gemma4::Gguf::open(&out).unwrap();
    gguf.check().unwrap();
}

/// The trained model in two shards, and a third that holds nothing but vision.
fn sharded(vision: &str) -> Vec<(&'static str, Vec<u8>)> {
    let weights = std::fs::read(trained_model().join("model.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&weights).unwrap();
    let mut halves = [vec![], vec![]];
    let mut map = serde_json::Map::new();
    for (i, (name, view)) in tensors.tensors().into_iter().enumerate() {
        map.insert(
            name.clone(),
            format!("model-0000{}-of-00003.safetensors", i % 2 + 1).into(),
        );
        halves[i % 2].push((name, view));
    }
    map.insert("model.vision_tower.patch.weight".to_string(), vision.into());
    let index = serde_json::json!({ "metadata": {}, "weight_map": map });
    let [first, second] = halves.map(|half| safetensors::serialize(half, None).unwrap());
    let mut files = tiny();
    files.retain(|(name, _)| *name != "model.safetensors");
    files.push((
        "model.safetensors.index.json",
        index.to_string().into_bytes(),
    ));
    files.push(("model-00001-of-00003.safetensors", first));
    files.push(("model-00002-of-00003.safetensors", second));
    files.push(("model-00003-of-00003.safetensors", vec![0; 100_000]));
    files
}

#[test]
fn a_shard_of_vision_alone_is_not_fetched() {
    let (home, hub) = (
        home(),
        MockHub::serve(
            sharded("model-00003-of-00003.safetensors"),
            Faults::default(),
        ),
    );
    for args in [&[][..], &["--offline"]] {
        let (success, stdout, stderr) = gemma4(home.path(), &hub.address, args, &[]);
        assert!(success, "{stderr}");
        assert!(stdout.starts_with(" a man"), "{stdout}");
    }
    let about = |name| hub.seen().iter().filter(|s| s.path.ends_with(name)).count();
    assert_eq!(about("model-00003-of-00003.safetensors"), 0);
    assert!(about("model-00002-of-00003.safetensors") > 0);
    std::fs::remove_file(snapshot(home.path()).join("model-00002-of-00003.safetensors")).unwrap();
    let (_, _, stderr) = gemma4(home.path(), &hub.address, &["--offline"], &[]);
    assert!(
        stderr.contains("hub: offline, and model-00002-of-00003.safetensors of"),
        "{stderr}"
    );
}

#[test]
fn names_that_lead_out_of_the_repository_are_refused() {
    for name in [
        "../../escape.safetensors",
        "/etc/escape.safetensors",
        "a/../../escape",
        "a\\escape",
    ] {
        let (home, hub) = (home(), MockHub::serve(sharded(name), Faults::default()));
        let (success, _, stderr) = gemma4(home.path(), &hub.address, &[], &[]);
        assert!(!success);
        assert!(
            stderr.contains("model.vision_tower.patch.weight into"),
            "{stderr}"
        );
        assert!(
            stderr.contains("want a relative path without .."),
            "{stderr}"
        );
        assert!(
            !hub.fetched()
                .iter()
                .any(|name| name.ends_with(".safetensors")),
            "{:?}",
            hub.fetched()
        );
    }
    let home = home();
    let (_, _, stderr) = gemma4(
        home.path(),
        "http://127.0.0.1:9",
        &["--revision", "../../x"],
        &[],
    );
    assert!(stderr.contains("--revision is \"../../x\""), "{stderr}");
}

/// huggingface/candle#3967: variants that the graph does not implement.
#[test]
fn a_variant_that_is_not_implemented_is_refused_before_its_weights_are_fetched() {
    let mut files = tiny();
    let mut config: serde_json::Value = serde_json::from_slice(&files[0].1).unwrap();
    let text = match config.get_mut("text_config") {
        Some(text) => text,
        None => &mut config,
    };
    text["hidden_size_per_layer_input"] = 256.into();
    files[0].1 = config.to_string().into_bytes();
    let (home, hub) = (home(), MockHub::serve(files, Faults::default()));
    let (success, _, stderr) = gemma4(home.path(), &hub.address, &[], &[]);
    assert!(!success);
    assert!(
        stderr.contains("`hidden_size_per_layer_input` is 256"),
        "{stderr}"
    );
    assert_eq!(hub.fetched(), ["config.json"]);
}

#[test]
fn named_weight_files_are_files_of_the_repository() {
    let mut files = tiny();
    files[3].0 = "deep/other.safetensors";
    let (home, hub) = (home(), MockHub::serve(files, Faults::default()));
    let (success, stdout, stderr) = gemma4(
        home.path(),
        &hub.address,
        &["--weight-files", "deep/other.safetensors"],
        &[],
    );
    assert!(success, "{stderr}");
    assert!(stdout.starts_with(" a man"), "{stdout}");
    #[cfg(unix)]
    assert!(
        std::fs::read_link(snapshot(home.path()).join("deep/other.safetensors"))
            .unwrap()
            .starts_with("../../../blobs")
    );
}
