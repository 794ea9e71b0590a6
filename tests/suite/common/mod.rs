//! What the tests share: generated models, golden outputs, numbers and error texts.

mod error;
pub mod fixture;
pub mod golden;
pub mod live;
pub mod model;
pub mod numeric;
pub mod oracle;

pub use error::{message, message_in};

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

/// The repository, in which cargo runs the tests; where they were built, it may no longer be.
pub fn repository() -> PathBuf {
    std::env::current_dir().unwrap()
}

/// The folder of the trained model that the repository ships.
pub fn trained_model() -> PathBuf {
    repository().join("assets/tiny-gemma4")
}

/// An example on its way, with pipes to all three of its streams.
pub fn start(name: &str, args: &[&str]) -> Child {
    Command::new(example(name))
        .args(args)
        .env("RUST_BACKTRACE", "0")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// An example as a program: cargo builds them beside the tests.
pub fn example(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let program = tests
        .ancestors()
        .nth(2)
        .unwrap()
        .join("examples")
        .join(name);
    assert!(
        program.exists(),
        "{} is missing: cargo build --release --examples makes it",
        program.display()
    );
    program
}
