//! Qwen Sparse Attention: what its layers do before attention itself.

mod projection;

pub use projection::QsaProjection;
