//! A border between this program and crates that read what a checkpoint brings along.

use anyhow::{anyhow, Result};
use std::any::Any;
use std::panic::{catch_unwind, AssertUnwindSafe};

/// What `read` makes. A panic in it is an error like any other: files made to cause one must not end the program. `read` owns or
/// only reads what it uses, so that nothing half-changed is left.
pub fn guarded<T>(read: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(read))
        .unwrap_or_else(|panic| Err(anyhow!("it panicked: {}", words(panic.as_ref()))))
}

/// What a panic says.
pub fn words(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or(panic.downcast_ref::<&str>().copied());
    text.unwrap_or("without a word")
}
