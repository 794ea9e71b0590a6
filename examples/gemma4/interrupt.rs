//! Ctrl-C: stops an answer; where there is none to stop, the second one ends the program.

use anyhow::{Context, Result};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Mutex;

static ANSWERING: AtomicBool = AtomicBool::new(false);
static WANTED: AtomicBool = AtomicBool::new(false);
/// What stands at the beginning of the line that a person writes.
static PROMPT: Mutex<&str> = Mutex::new("");
/// What a shell says of a program that SIGINT ended.
const STATUS: i32 = 130;

/// Takes Ctrl-C from the system.
pub fn handle() -> Result<()> {
    ctrlc::set_handler(|| {
        let again = WANTED.swap(true, Ordering::SeqCst);
        if again {
            std::process::exit(STATUS);
        }
        if !ANSWERING.load(Ordering::SeqCst) {
            let prompt = PROMPT.lock().map_or("", |prompt| *prompt);
            show(&format!("\nCtrl-C again or /quit ends the chat\n{prompt}"));
        }
    })
    .context("Ctrl-C")
}

/// Whether Ctrl-C was pressed since the answer began.
pub fn wanted() -> bool {
    WANTED.load(Ordering::SeqCst)
}

/// An answer begins, or a person is asked again.
pub fn answering(now: bool) {
    WANTED.store(false, Ordering::SeqCst);
    ANSWERING.store(now, Ordering::SeqCst);
}

/// Shows `prompt`, now and again after Ctrl-C; a line after that makes the next one the first again.
pub fn ask(prompt: &'static str) {
    WANTED.store(false, Ordering::SeqCst);
    show(prompt);
    if let Ok(mut shown) = PROMPT.lock() {
        *shown = prompt;
    }
}

/// A stderr that is closed does not end the conversation.
fn show(text: &str) {
    std::io::stderr().write_all(text.as_bytes()).ok();
}
