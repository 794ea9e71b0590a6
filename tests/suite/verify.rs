//! The `verify` example as its users run it: five gates, receipts, and no edited receipt passes.

use crate::common::{example, repository};
use gem::attention::CpuKernel;
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
                change(&mut receipt);
            }
            // The order of the keys is that of the program's, so the file is edited as text.
            let old = |key: &str| {
                let receipt: serde_json::Value = serde_json::from_str(&text).unwrap();
                receipt[key].as_str().unwrap().to_string()
            };
            let report_at = text.find("  \"report\": ").unwrap();
            let changed = |head: String, key: &str| match receipt[key].as_str() {
                Some(new) => head.replace(
                    &format!("\"{key}\": \"{}\"", old(key)),
                    &format!("\"{key}\": \"{new}\""),
                ),
                None => head,
            };
            let head = changed(text[..report_at].to_string(), "gate");
            let old_previous = old("previous");
            let unchanged = receipt["previous"] == old_previous.as_str();
            let follows = match unchanged {
                true => previous.clone(),
                false => receipt["previous"].as_str().unwrap().to_string(),
            };
            let seed = |seed: &serde_json::Value| format!("\"seed\": {seed}");
            let settings: serde_json::Value =
                serde_json::from_str::<serde_json::Value>(&text).unwrap()["settings"].clone();
            let head = head.replace(
                &seed(&settings["seed"]),
                &seed(&receipt["settings"]["seed"]),
            );
            let head = head.replace(
                &format!("\"previous\": \"{}\"", old("previous")),
                &format!("\"previous\": \"{follows}\""),
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
    check_contents(made.path());
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

    // A file that is not there.
    for file in FILES {
        let copied = Copied::new(made.path());
        std::fs::remove_file(copied.path(file)).unwrap();
        let out = check(copied.0.path());
        assert!(!out.success && out.stderr.contains(file), "{}", out.stderr);
    }

    // The digests right, the contents not: nothing is taken on trust.
    type Change = fn(&mut serde_json::Value);
    let forged: [(&str, &str, Change); 17] = [
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
        ("3-operators.json", "has an NMSE", |r| {
            r["cases"][1]["to_baseline"]["nmse"] = 1e-9.into()
        }),
        ("3-operators.json", "is off by", |r| {
            r["cases"][1]["to_oracle"]["max_abs_error"] = 1e-3.into()
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
        copied.forge(file, |receipt| change(&mut receipt["report"]));
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

    // Of another run, another gate, other settings.
    for (change, why) in [
        (
            (|r| r["previous"] = "0".repeat(64).into()) as Change,
            "does not follow",
        ),
        (|r| r["gate"] = "model".into(), "is a receipt of model"),
        (|r| r["settings"]["seed"] = 7.into(), "other settings"),
    ] {
        let copied = Copied::new(made.path());
        copied.forge("3-operators.json", change);
        let out = check(copied.0.path());
        assert!(
            !out.success && out.stderr.contains(why),
            "{why}: {}",
            out.stderr
        );
        // What came before is told.
        assert!(
            out.stdout.contains("| resources | passed |"),
            "{}",
            out.stdout
        );
    }
    let copied = Copied::new(made.path());
    std::fs::write(copied.path("6-extra.json"), "{}").unwrap();
    let out = check(copied.0.path());
    assert!(
        !out.success && out.stderr.contains("6-extra.json is no receipt"),
        "{}",
        out.stderr
    );

    // A missing or an unknown field.
    for change in [
        (|r| drop(r.as_object_mut().unwrap().remove("partitions"))) as Change,
        |r| r["note"] = "".into(),
    ] {
        let copied = Copied::new(made.path());
        copied.forge("1-algebra.json", |receipt| change(&mut receipt["report"]));
        assert!(!check(copied.0.path()).success);
    }
}

/// The receipts are of every kernel that this machine has, and of comparisons that were really made.
fn check_contents(folder: &Path) {
    let read = |file: &str| -> serde_json::Value {
        serde_json::from_str(&std::fs::read_to_string(folder.join(file)).unwrap()).unwrap()
    };
    let operators = read("3-operators.json");
    let report = &operators["report"];
    let kernels = CpuKernel::ALL.into_iter().filter(|k| k.is_available());
    let names = |kind: &str| {
        let name = |k: CpuKernel| format!("{kind}-{k:?}").to_lowercase();
        kernels.clone().map(name).collect::<Vec<_>>()
    };
    let want = [
        vec!["reference".to_string()],
        names("fused"),
        names("shared-kv"),
    ]
    .concat();
    assert_eq!(report["arms"], serde_json::json!(want));
    let algebra = read("1-algebra.json");
    let measured = algebra["report"]["cases"].as_array().unwrap();
    for kernel in kernels.clone() {
        assert!(measured
            .iter()
            .any(|case| case["kernel"] == format!("{kernel:?}")));
    }
    // Plain ops and the op err each in their own way, keys that are rebuilt and stored ones too.
    let nmse = |arm: &str, to: &str| {
        let cases = report["cases"].as_array().unwrap();
        let found = cases
            .iter()
            .find(|case| case["arm"] == arm && case["dtype"] == "f32" && case["kv_len"] == 8192);
        found.unwrap()[to]["nmse"].as_f64().unwrap()
    };
    assert_eq!(nmse("reference", "to_baseline"), 0.0);
    let (plain, fused) = (
        nmse("reference", "to_oracle"),
        nmse("fused-portable", "to_oracle"),
    );
    assert!(plain > 0.0 && fused > 0.0 && plain != fused);
    assert!(nmse("fused-portable", "to_baseline") != fused);
    assert!(nmse("shared-kv-portable", "to_oracle") != fused);
    // Every file that a CPU runs is bound.
    let bound = &operators["settings"]["kernels"];
    for folder in [
        "src/attention/cpu",
        "src/attention/partial",
        "src/cpu",
        "src/projection/cpu",
    ] {
        for file in std::fs::read_dir(repository().join(folder)).unwrap() {
            let name = file.unwrap().file_name().into_string().unwrap();
            assert!(
                bound[format!("{folder}/{name}")].is_string(),
                "{folder}/{name}"
            );
        }
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
