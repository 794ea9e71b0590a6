//! What the tests share: generated models, golden outputs, numbers and error texts.

mod error;
pub mod fixture;
pub mod golden;
pub mod model;
pub mod numeric;
pub mod oracle;

pub use error::{message, message_in};

use std::path::{Path, PathBuf};

/// The folder of the trained model that the repository ships.
pub fn trained_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-gemma4")
}
