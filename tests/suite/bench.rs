//! The `bench` example as its users run it, and the rule by which it admits.

use crate::common::example;
use crate::example_admit::{decide, refusal, Measured};
use std::process::Command;

fn bench(args: &[&str]) -> (bool, String, String) {
    let output = Command::new(example("bench"))
        .args(args)
        .env("RUST_BACKTRACE", "0")
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (
        output.status.success(),
        text(output.stdout),
        text(output.stderr),
    )
}

/// Tests, contexts and arms of rows in JSON.
fn labels<'a>(rows: impl Iterator<Item = &'a serde_json::Value>) -> Vec<(String, u64, String)> {
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_string();
    rows.map(|row| {
        let context = row["context"].as_u64().unwrap();
        (text(&row["test"]), context, text(&row["arm"]))
    })
    .collect()
}

#[test]
fn every_format_has_every_test_of_every_arm() {
    let args = |format| {
        [
            "--cpu", "-p", "8", "-n", "2", "-d", "0,40", "-r", "2", "-o", format,
        ]
    };
    let want: Vec<(String, u64, String)> = [("pp8", 0), ("tg2", 0), ("pp8", 40), ("tg2", 40)]
        .into_iter()
        .flat_map(|(test, context)| {
            ["reference", "fused"].map(|arm| (test.to_string(), context, arm.to_string()))
        })
        .collect();

    let (success, stdout, stderr) = bench(&args("json"));
    assert!(success, "{stderr}");
    let all: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    let rows = all["rows"].as_array().unwrap();
    assert_eq!(labels(rows.iter()), want);
    for row in rows {
        assert_eq!(row["seconds"].as_array().unwrap().len(), 2);
        assert!(row["per_second"].as_f64().unwrap() > 0.0);
        if cfg!(target_os = "linux") {
            // Weights and caches are there, and what a sample needs besides is not a multiple of them; planned caches have room to spare.
            let bytes = |name: &str| row[name].as_f64().unwrap();
            let more = bytes("peak_bytes") / bytes("planned_bytes");
            assert!((0.9..2.0).contains(&more), "{row}");
        }
        let first = row["arm"] == "reference";
        assert_eq!(first, row["ratio"] == 1.0 && row["ratio_spread"] == 0.0);
    }

    let (_, stdout, _) = bench(&args("jsonl"));
    let lines: Vec<serde_json::Value> = stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(labels(lines.iter()), want);

    for (format, separator) in [("md", " | "), ("csv", ",")] {
        let (_, stdout, _) = bench(&args(format));
        for (test, context, arm) in &want {
            let label = format!("{test}{separator}{context}{separator}{arm}{separator}");
            let lines = stdout.lines().filter(|line| line.contains(&label));
            assert_eq!(lines.count(), 1, "{format}: {label}: {stdout}");
        }
    }
}

#[test]
fn the_operator_is_measured_and_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("plot.svg");
    let (success, stdout, stderr) = bench(&[
        "--cpu",
        "--op",
        "attention",
        "--len",
        "16,64",
        "-r",
        "2",
        "--attention",
        "reference,fused,fused-p3",
        "--plot",
        plot.to_str().unwrap(),
    ]);
    assert!(success, "{stderr}");
    for label in ["16 | reference", "16 | fused-p3", "64 | fused |"] {
        assert!(
            stdout.contains(&format!("| attention | {label}")),
            "{stdout}"
        );
    }
    let svg = std::fs::read_to_string(plot).unwrap();
    for text in [
        "fused-p3",
        "reference",
        "tokens of context",
        "milliseconds, median",
    ] {
        assert!(svg.contains(text), "{text}");
    }
}

#[test]
fn what_cannot_be_measured_is_said_before_anything_is() {
    for (args, want) in [
        (
            &["--attention", "reference,flash"][..],
            "attention path is \"flash\"",
        ),
        (&["-d", "131072"], "512 tokens after 131072"),
        (
            &["--op", "attention", "--attention", "fused-p0"],
            "got 0 partitions",
        ),
        (
            &["--op", "attention", "--attention", "flash"],
            "no arm of the operator",
        ),
        (
            &["--op", "attention", "--attention", "fused-matrix"],
            "not on this device",
        ),
        (
            &["--op", "attention", "--attention", "sdpa"],
            "not on this device",
        ),
        (
            &["--op", "attention", "--len", "0"],
            "want at least one key",
        ),
        (&["--layers", "2"], "--shape"),
        (&["--len", "64"], "--op"),
        (&["-r", "0"], "want at least 1"),
    ] {
        let (success, stdout, stderr) = bench(&[&["--cpu"], args].concat());
        assert!(!success && stdout.is_empty(), "{args:?}");
        assert!(stderr.contains(want), "{args:?}: {stderr}");
    }
}

fn measured(test: &str, context: usize, ratio: f64, ratio_spread: f64) -> Vec<Measured> {
    let row = |arm: &str, ratio, ratio_spread| Measured {
        test: test.to_string(),
        context,
        arm: arm.to_string(),
        rounds: 5,
        ratio,
        ratio_spread,
    };
    vec![row("old", 1.0, 0.0), row("new", ratio, ratio_spread)]
}

/// Faster at both long contexts; what each test changes is one row.
fn admitted(change: impl Fn(&mut Vec<Measured>)) -> Vec<String> {
    let mut rows = [
        measured("tg64", 512, 1.0, 0.02),
        measured("pp64", 65_536, 1.01, 0.02),
        measured("tg64", 65_536, 0.9, 0.02),
        measured("tg64", 131_072, 0.85, 0.02),
    ]
    .concat();
    change(&mut rows);
    let mut decisions = decide(&rows);
    assert_eq!(decisions.len(), 1);
    assert_eq!(decisions[0].arm, "new");
    decisions.remove(0).reasons
}

#[test]
fn an_arm_is_admitted_if_it_is_faster_at_both_long_contexts_and_slower_nowhere() {
    assert_eq!(admitted(|_| ()), [""; 0]);
    type Change = fn(&mut Vec<Measured>);
    let refused: [(Change, &str); 7] = [
        (
            |rows| rows[5].ratio = 0.975,
            "tg64 at 65536 tokens: 2.5 % faster",
        ),
        (
            |rows| rows[7].ratio_spread = 0.2,
            "more than the spread of 20.0 %",
        ),
        (|rows| drop(rows.split_off(6)), "not measured at 131072"),
        (
            |rows| rows[1].ratio = 1.05,
            "tg64 at 512 tokens: 5.0 % slower",
        ),
        (
            |rows| rows[3].ratio = 1.5,
            "pp64 at 65536 tokens: 50.0 % slower",
        ),
        (
            |rows| rows[5].ratio = f64::NAN,
            "tg64 at 65536 tokens: 5 rounds",
        ),
        (|rows| rows[5].rounds = 1, "1 rounds, want at least 3"),
    ];
    for (change, want) in refused {
        let reasons = admitted(change);
        assert_eq!(reasons.len(), 1, "{reasons:?}");
        assert!(reasons[0].contains(want), "{reasons:?}, want {want}");
    }
}

#[test]
fn a_slower_short_context_within_its_spread_is_no_reason() {
    assert_eq!(admitted(|rows| rows[1].ratio = 1.015), [""; 0]);
}

#[test]
fn what_cannot_be_decided_on_is_refused_before_it_is_measured() {
    let arms = |names: &[&str]| {
        names
            .iter()
            .map(|name| name.to_string())
            .collect::<Vec<_>>()
    };
    let two = arms(&["reference", "fused"]);
    assert_eq!(refusal(&two, &[65_536, 8192, 131_072]), None);
    assert_eq!(
        refusal(&two, &[8192, 65_536]).as_deref(),
        Some("--admit decides at 65536 and 131072 tokens, got no 131072")
    );
    let one = refusal(&arms(&["fused", "fused"]), &[65_536, 131_072]);
    assert!(one.unwrap().contains("want two in --attention"));
}
