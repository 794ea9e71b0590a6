//! A process that is killed at any moment leaves nothing damaged under a final name.
#![cfg(unix)]

use crate::common::{self, trained_model};
use crate::hub::story;
use crate::mock_hub::{sha256, Faults, MockHub, COMMIT};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::io::Write;
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// SIGKILL.
fn kill_after(child: &mut Child, pause: Duration) {
    std::thread::sleep(pause);
    child.kill().unwrap();
    child.wait().unwrap();
}

/// A conversation of some megabytes with this system text, as `/save` writes it.
fn talk(system: &str) -> serde_json::Value {
    let content = "Once upon a time there was a man. ".repeat(40_000);
    serde_json::json!({"system": system, "think": false, "turns": [
        {"role": "user", "content": content.trim()},
        {"role": "model", "content": content.trim()},
    ]})
}

/// Saves over one file again and again; each time what is there is whole, and one of the two that were saved.
fn assert_saves_are_whole(kills: usize, seed: u64) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("talk.json");
    let wholes = ["a", "b"].map(talk);
    std::fs::write(&file, wholes[0].to_string()).unwrap();
    let load = format!("/load {}\n", file.display());
    let save = ["a", "b"].map(|system| format!("/system {system}\n/save {}\n", file.display()));
    let lines = load + &save.concat().repeat(1000);
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (mut interrupted, mut differing) = (0, 0);
    for _ in 0..kills {
        let mut child = common::start("gemma4", &["--chat", "--cpu", "-q"]);
        let mut stdin = child.stdin.take().unwrap();
        let lines = lines.clone();
        // A pipe whose reader was killed is no fault.
        let writer = std::thread::spawn(move || stdin.write_all(lines.as_bytes()).ok());
        let before = std::fs::metadata(&file).unwrap().modified().unwrap();
        let start = Instant::now();
        while std::fs::metadata(&file).unwrap().modified().unwrap() == before {
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "nothing is saved"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
        kill_after(
            &mut child,
            Duration::from_micros(rng.random_range(0..60_000)),
        );
        writer.join().unwrap();
        let saved: serde_json::Value =
            serde_json::from_slice(&std::fs::read(&file).unwrap()).expect("whole JSON");
        assert!(wholes.contains(&saved), "neither of the two");
        differing += usize::from(saved == wholes[1]);
        for left in std::fs::read_dir(folder.path()).unwrap() {
            let left = left.unwrap().path();
            if left != file {
                interrupted += 1;
                std::fs::remove_file(left).unwrap();
            }
        }
    }
    println!("{kills} kills while saving: {interrupted} in the middle of a file, {differing} after the second text");
}

#[test]
fn a_save_that_is_killed_leaves_a_whole_conversation() {
    assert_saves_are_whole(6, 1);
}

/// `cargo test --release --test suite -- --ignored --nocapture kills::`
#[test]
#[ignore = "takes a minute"]
fn many_saves_that_are_killed_leave_whole_conversations() {
    assert_saves_are_whole(60, 2);
}

const FILES: [&str; 4] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "model.safetensors",
];

fn download(home: &Path, endpoint: &str) -> Child {
    story(home, endpoint)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Every file under a final name is the hub's, byte for byte. Whether the weights have begun to come and are not there yet.
fn assert_nothing_is_damaged(home: &Path) -> bool {
    let folder = home.join("hub/models--tests--tiny");
    if let Ok(commit) = std::fs::read_to_string(folder.join("refs/main")) {
        assert_eq!(commit, COMMIT);
    }
    for name in FILES {
        if let Ok(bytes) = std::fs::read(folder.join("snapshots").join(COMMIT).join(name)) {
            assert!(
                bytes == std::fs::read(trained_model().join(name)).unwrap(),
                "{name}"
            );
        }
    }
    let mut begun = false;
    for blob in std::fs::read_dir(folder.join("blobs"))
        .into_iter()
        .flatten()
    {
        let blob = blob.unwrap();
        let name = blob.file_name().into_string().unwrap();
        begun |= name.ends_with(".incomplete");
        if name.len() == 64 {
            assert_eq!(sha256(&std::fs::read(blob.path()).unwrap()), name);
        }
    }
    begun
}

/// One cache through all of the kills, emptied whenever it is full.
fn assert_downloads_are_whole(kills: usize, seed: u64) {
    let files = FILES.map(|name| (name, std::fs::read(trained_model().join(name)).unwrap()));
    let hub = MockHub::serve(files, Faults::default());
    let timed = tempfile::tempdir().unwrap();
    let start = Instant::now();
    let whole = download(timed.path(), &hub.address)
        .wait_with_output()
        .unwrap();
    let (text, took) = (whole.stdout, start.elapsed());
    assert!(String::from_utf8_lossy(&text).starts_with(" a man"));
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (mut home, mut begun) = (tempfile::tempdir().unwrap(), 0);
    for _ in 0..kills {
        let mut child = download(home.path(), &hub.address);
        kill_after(&mut child, took.mul_f64(rng.random_range(0.0..0.8)));
        begun += usize::from(assert_nothing_is_damaged(home.path()));
        let snapshot = home.path().join("hub/models--tests--tiny/snapshots");
        if snapshot.join(COMMIT).join("model.safetensors").exists() {
            // What was killed after its last file runs from the cache, or goes on: both end in the same text.
            let out = download(home.path(), &hub.address)
                .wait_with_output()
                .unwrap();
            assert_eq!(out.stdout, text);
            home = tempfile::tempdir().unwrap();
        }
    }
    let out = download(home.path(), &hub.address)
        .wait_with_output()
        .unwrap();
    assert_eq!(out.stdout, text);
    assert!(!assert_nothing_is_damaged(home.path()));
    println!("{kills} kills while downloading: {begun} in the middle of a file");
}

#[test]
fn a_download_that_is_killed_leaves_whole_files_and_goes_on() {
    assert_downloads_are_whole(8, 1);
}

/// `cargo test --release --test suite -- --ignored --nocapture kills::`
#[test]
#[ignore = "takes a minute"]
fn many_downloads_that_are_killed_leave_whole_files_and_go_on() {
    assert_downloads_are_whole(80, 2);
}
