//! Fused attention for candle at head_dim 512, and a Gemma 4 that runs on it or on plain ops.

pub mod attention;
pub mod models;

pub use attention::{attention_d512, AttentionD512, AttentionPartials};
