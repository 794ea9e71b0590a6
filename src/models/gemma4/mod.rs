//! The Gemma 4 text decoder, on candle's plain ops or on the fused ops of this crate.

mod config;
mod dialect;
mod json;
mod layer_cache;
mod rope;
mod weights;

pub use config::{Config, LayerConfig, LayerKind, RopeConfig};
pub use layer_cache::{KvView, LayerCache};
pub use rope::Rope;
pub use weights::Weights;
