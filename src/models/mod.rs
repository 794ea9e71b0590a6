//! Models that run on the ops of this crate or on candle's plain ops.

pub mod gemma4;
