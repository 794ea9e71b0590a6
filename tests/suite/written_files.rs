//! What the programs write: whole or not at all, and in place of their own kind alone.
#![cfg(target_os = "linux")]

use crate::common::{example, start, trained_model};
use crate::example_replace::Replacement;
use crate::gguf_support::trained_model_with;
use std::fs::{self, File, Permissions};
use std::io::Write;
use std::os::unix::fs::{symlink, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

const REPORT: &str = r#"{"gem": "of an earlier run"}"#;

/// Success, and what is on stderr.
fn told(args: &[&str]) -> (bool, String) {
    let out = start("gemma4", &[&["--cpu", "-q", "-n", "2"], args].concat());
    let out = out.wait_with_output().unwrap();
    (out.status.success(), String::from_utf8(out.stderr).unwrap())
}

fn parts(folder: &Path) -> Vec<fs::DirEntry> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let is_part = |entry: &fs::DirEntry| entry.path().extension().is_some_and(|e| e == "part");
    entries.filter(is_part).collect()
}

#[test]
fn a_report_takes_the_place_of_no_file_of_the_model() {
    let model = trained_model_with(&[]);
    let folder = model.path();
    let elsewhere = tempfile::tempdir().unwrap();
    let link = elsewhere.path().join("link.json");
    symlink(folder.join("model.safetensors"), &link).unwrap();
    let nowhere = elsewhere.path().join("nowhere.json");
    symlink(elsewhere.path().join("none"), &nowhere).unwrap();
    for (to, why) in [
        (folder.join("model.safetensors"), "is there and no report"),
        (folder.join("config.json"), "is there and no report"),
        (link, "is there and no report"),
        (nowhere, "is a link to what is not there"),
    ] {
        let before = fs::read(&to).ok();
        let [folder, to_text] = [folder, &to].map(|path| path.to_str().unwrap());
        let (success, log) = told(&[
            "--weight-files",
            folder,
            "--prompt",
            "Once",
            "--json",
            to_text,
        ]);
        assert!(!success && log.contains(why), "{to:?}: {log}");
        assert_eq!(fs::read(&to).ok(), before, "{to:?}");
    }
    assert!(parts(folder).is_empty() && parts(elsewhere.path()).is_empty());
}

#[test]
fn a_report_stays_until_the_next_one_is_whole() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("report.json");
    fs::write(&file, REPORT).unwrap();
    let json = ["--json", file.to_str().unwrap()];
    let long = ["--cpu", "--prompt", "Once", "-n", "100000"];
    let mut child = start("gemma4", &[&long[..], &json].concat());
    while parts(folder.path()).is_empty() && child.try_wait().unwrap().is_none() {
        std::thread::sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), REPORT);
    // Of a run that fails, too.
    let missing = ["--weight-files", "no/such/folder", "--prompt", "Once"];
    assert!(!told(&[&missing[..], &json].concat()).0);
    assert_eq!(fs::read_to_string(&file).unwrap(), REPORT);
    let (success, log) = told(&[&["--prompt", "Once"], &json[..]].concat());
    assert!(success, "{log}");
    assert!(fs::read_to_string(&file).unwrap().contains("generated_ids"));
}

#[test]
fn a_save_takes_the_place_of_another_conversation_alone() {
    let folder = tempfile::tempdir().unwrap();
    let letter = folder.path().join("letter.json");
    fs::write(&letter, "Dear all").unwrap();
    let mut child = start("gemma4", &["--cpu", "--chat", "-q"]);
    let save = format!("/save {}\n", letter.display());
    child
        .stdin
        .take()
        .unwrap()
        .write_all(save.as_bytes())
        .unwrap();
    let out = child.wait_with_output().unwrap();
    let log = String::from_utf8(out.stderr).unwrap();
    assert!(log.contains("is there and no saved conversation"), "{log}");
    assert_eq!(fs::read(&letter).unwrap(), b"Dear all");
}

#[test]
fn what_is_half_written_is_open_to_nobody_that_the_file_is_closed_to() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("private");
    fs::write(&file, "old").unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o600)).unwrap();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let mut new = Replacement::of(&file, "file", |_| true).unwrap();
    new.write_all(b"new").unwrap();
    let [part] = &parts(folder.path())[..] else {
        panic!("want one part");
    };
    assert_eq!(
        (mode(&part.path()), fs::read(&file).unwrap()),
        (0o600, b"old".to_vec())
    );
    new.put().unwrap();
    assert_eq!(
        (mode(&file), fs::read(&file).unwrap()),
        (0o600, b"new".to_vec())
    );
    assert!(parts(folder.path()).is_empty());
    // A new file is as open as any other.
    let [new, plain] = ["new", "plain"].map(|name| folder.path().join(name));
    Replacement::of(&new, "file", |_| true)
        .unwrap()
        .put()
        .unwrap();
    fs::write(&plain, "").unwrap();
    assert_eq!(mode(&new), mode(&plain));
}

#[test]
fn a_stderr_that_takes_nothing_ends_no_answer() {
    let run = |stderr: Stdio| {
        let mut command = Command::new(example("gemma4"));
        command.args(["--cpu", "-n", "5", "--prompt", "Once upon a time"]);
        command.arg("--weight-files").arg(trained_model());
        command.stderr(stderr).output().unwrap()
    };
    let (whole, full) = (
        run(Stdio::null()),
        run(File::create("/dev/full").unwrap().into()),
    );
    assert!(whole.status.success() && !whole.stdout.is_empty());
    assert!(full.status.success(), "{full:?}");
    assert_eq!(full.stdout, whole.stdout);
}
