//! What a GPU is asked to do, as data, and what does it.

pub(crate) mod limits;
#[cfg(feature = "metal")]
pub mod metal;
pub mod params;
pub mod plan;
pub mod receipt;
