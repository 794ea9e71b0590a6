//! What the crate needs from the machine.

use std::process::Command;

/// Runs one test of this program with another PATH.
fn run_with_path(test: &str, path: &str) -> (bool, String) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env("PATH", path)
        .output()
        .unwrap();
    let text = [output.stdout, output.stderr].concat();
    (
        output.status.success(),
        String::from_utf8_lossy(&text).into_owned(),
    )
}

#[test]
fn without_a_compiler_a_test_fails_and_says_what_to_install() {
    let (passed, text) = run_with_path("language::lanes_that_returned_take_no_part", "/nowhere");
    assert!(!passed);
    assert!(
        text.contains("no compiler on PATH: install g++ 12 or newer"),
        "{text}"
    );
}
