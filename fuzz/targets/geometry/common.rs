//! What the tests share, under the name that it has there.

#[path = "../../../tests/suite/common/error.rs"]
mod error;
#[path = "../../../tests/suite/common/numeric.rs"]
pub mod numeric;
#[path = "../../../tests/suite/common/oracle.rs"]
pub mod oracle;

pub use error::message;
