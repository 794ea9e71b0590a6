//! The `verify` example as its users run it: five gates, receipts, and no edited receipt passes.

use crate::common::example;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::process::Command;

struct Output {
    success: bool,
    stdout: String,
    stderr: String,
}

fn verify(args: &[&str]) -> Output {
    let output = Command::new(example("verify"))
        .args(args)
        .env("RUST_BACKTRACE", "0")
        .output()
        .unwrap();
    Output {
        success: output.status.success(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

fn check(folder: &Path) -> Output {
    verify(&["--check", folder.to_str().unwrap()])
}

const FILES: [&str; 5] = [
    "1-algebra.json",
    "2-resources.json",
    "3-operators.json",
    "4-model.json",
    "5-ceiling.json",
];

/// A copy of receipts that a test may change.
struct Copied(tempfile::TempDir);

impl Copied {
    fn new(from: &Path) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for file in FILES {
            std::fs::copy(from.join(file), folder.path().join(file)).unwrap();
        }
        Self(folder)
    }

    fn path(&self, file: &str) -> PathBuf {
        self.0.path().join(file)
    }

    /// Changes a receipt and makes all digests right again, as a forger would.
    fn forge(&self, file: &str, change: impl Fn(&mut serde_json::Value)) {
        let mut previous = String::new();
        for name in FILES {
            let text = std::fs::read_to_string(self.path(name)).unwrap();
            let mut receipt: serde_json::Value = serde_json::from_str(&text).unwrap();
            if name == file {
                change(&mut receipt["report"]);
            }
            // The order of the keys is that of the program's, so the file is edited as text.
            let old = |key: &str| {
                let receipt: serde_json::Value = serde_json::from_str(&text).unwrap();
                receipt[key].as_str().unwrap().to_string()
            };
            let report_at = text.find("  \"report\": ").unwrap();
            let head = text[..report_at].replace(
                &format!("\"previous\": \"{}\"", old("previous")),
                &format!("\"previous\": \"{previous}\""),
            );
            let report = serde_json::to_string(&receipt["report"]).unwrap();
            let body = |digest: &str| {
                format!("{head}  \"report\": {report},\n  \"sha256\": \"{digest}\"\n}}\n")
            };
            let digest: String = Sha256::digest(body(&"0".repeat(64)))
                .iter()
                .map(|byte| format!("{byte:02x}"))
                .collect();
            std::fs::write(self.path(name), body(&digest)).unwrap();
            previous = digest;
        }
    }
}

#[test]
fn a_quick_run_passes_every_gate_and_no_changed_receipt_is_believed() {
    let made = tempfile::tempdir().unwrap();
    let out = verify(&[
        "--cpu",
        "--quick",
        "--receipts",
        made.path().to_str().unwrap(),
    ]);
    assert!(out.success, "{}{}", out.stdout, out.stderr);
    for gate in ["algebra", "resources", "operators", "model", "ceiling"] {
        let passed = format!("| {gate} | passed | ");
        assert!(out.stdout.contains(&passed), "{}", out.stdout);
    }
    let again = check(made.path());
    assert!(again.success, "{}{}", again.stdout, again.stderr);
    assert_eq!(again.stdout, out.stdout);

    // One character.
    for file in FILES {
        let copied = Copied::new(made.path());
        let text = std::fs::read_to_string(copied.path(file)).unwrap();
        let at = text.find("\"report\"").unwrap();
        let value = |(i, _): &(usize, &str)| text.as_bytes()[i + 2].is_ascii_digit();
        let found = text[at..].match_indices(": ").map(|(i, m)| (at + i, m));
        let digit = found
            .filter(|m| value(m))
            .map(|(i, _)| i + 2)
            .next()
            .unwrap();
        let other = if &text[digit..=digit] == "1" {
            "2"
        } else {
            "1"
        };
        let edited = format!("{}{other}{}", &text[..digit], &text[digit + 1..]);
        std::fs::write(copied.path(file), edited).unwrap();
        let out = check(copied.0.path());
        assert!(!out.success, "{file}");
        assert!(out.stderr.contains("was edited"), "{file}: {}", out.stderr);
    }

    // A file that is not there, and one of another run.
    for file in FILES {
        let copied = Copied::new(made.path());
        std::fs::remove_file(copied.path(file)).unwrap();
        let out = check(copied.0.path());
        assert!(!out.success && out.stderr.contains(file), "{}", out.stderr);
    }

    // The digests right, the contents not: nothing is taken on trust.
    type Change = fn(&mut serde_json::Value);
    let forged: [(&str, &str, Change); 15] = [
        ("1-algebra.json", "NMSE", |r| {
            r["cases"][1]["agreement"]["nmse"] = 1.0.into()
        }),
        ("1-algebra.json", "correlates", |r| {
            r["cases"][1]["agreement"]["correlation"] = 0.9999.into()
        }),
        ("1-algebra.json", "repeat", |r| {
            r["cases"][0]["agreement"]["repeats"] = false.into()
        }),
        ("1-algebra.json", "not measured at", |r| {
            drop(r["cases"].as_array_mut().unwrap().pop())
        }),
        ("1-algebra.json", "measured (", |r| {
            r["bounds"]["most_nmse"] = 1.0.into()
        }),
        ("1-algebra.json", "13 tokens", |r| {
            r["cuts"][2]["max_abs_error"] = (-1.0).into()
        }),
        ("2-resources.json", "was not planned", |r| {
            drop(r["plans"].as_array_mut().unwrap().remove(3))
        }),
        ("2-resources.json", "launched otherwise", |r| {
            r["plans"][2]["passes"][0]["threads"] = 512.into()
        }),
        ("2-resources.json", "another plan", |r| {
            r["plans"][2]["digest"] = "0".repeat(64).into()
        }),
        ("3-operators.json", "not finite", |r| {
            r["cases"][7]["to_oracle"]["finite"] = false.into()
        }),
        ("3-operators.json", "not measured", |r| {
            drop(r["cases"].as_array_mut().unwrap().remove(9))
        }),
        ("4-model.json", "another token", |r| {
            r["paths"][1]["top"][3][0] = 1.into()
        }),
        ("4-model.json", "ten likeliest", |r| {
            r["paths"][1]["top"][3][9] = 1.into()
        }),
        ("5-ceiling.json", "do not fit", |r| {
            r["contexts"][0]["share"] = 0.5.into()
        }),
        ("5-ceiling.json", "not measured at", |r| {
            drop(r["contexts"].as_array_mut().unwrap().pop())
        }),
    ];
    for (file, why, change) in forged {
        let copied = Copied::new(made.path());
        copied.forge(file, change);
        let out = check(copied.0.path());
        assert!(!out.success, "{file}: {why}");
        let refused = out
            .stdout
            .lines()
            .any(|line| line.contains("REFUSED") && line.contains(why));
        assert!(refused, "{file}, want {why}: {}{}", out.stdout, out.stderr);
    }
    // A forger who changes nothing is found out by nobody.
    let copied = Copied::new(made.path());
    copied.forge("1-algebra.json", |_| ());
    assert!(check(copied.0.path()).success);

    // A missing or an unknown field.
    for change in [
        (|r| drop(r.as_object_mut().unwrap().remove("partitions"))) as Change,
        |r| r["note"] = "".into(),
    ] {
        let copied = Copied::new(made.path());
        copied.forge("1-algebra.json", change);
        assert!(!check(copied.0.path()).success);
    }
}

#[test]
fn a_folder_with_receipts_is_not_written_to() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("1-algebra.json"), "kept").unwrap();
    let out = verify(&[
        "--cpu",
        "--quick",
        "--receipts",
        folder.path().to_str().unwrap(),
    ]);
    assert!(!out.success);
    assert!(
        out.stderr.contains("want a folder without receipts"),
        "{}",
        out.stderr
    );
    let kept = std::fs::read_to_string(folder.path().join("1-algebra.json")).unwrap();
    assert_eq!(kept, "kept");
}

#[test]
fn a_model_that_cannot_be_opened_is_said_before_the_first_gate() {
    let folder = tempfile::tempdir().unwrap();
    let receipts = folder.path().join("receipts");
    let out = verify(&[
        "--cpu",
        "--quick",
        "--weight-files",
        folder.path().to_str().unwrap(),
        "--receipts",
        receipts.to_str().unwrap(),
    ]);
    assert!(!out.success && out.stdout.is_empty());
    assert!(!receipts.exists());
}
