//! What several test modules need.

mod error;

pub use error::message;
