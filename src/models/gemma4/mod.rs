//! The Gemma 4 text decoder, on candle's plain ops or on the fused ops of this crate.

mod attention;
mod cache;
mod config;
mod dialect;
mod file;
mod generation;
mod gguf;
mod json;
mod layer;
mod layer_cache;
mod matrix;
mod memory;
mod model;
mod norm;
mod path;
mod rope;
mod source;
mod strict;
mod weights;

pub use cache::Cache;
pub use config::{Config, LayerConfig, LayerKind, RopeConfig};
pub use generation::{generate, with_one_bos, Finish, StopTokens};
pub use gguf::{Gguf, Value as GgufValue};
pub use layer_cache::{KvView, LayerCache};
pub use memory::{MemoryDemand, MemoryPlan};
pub use model::{soft_cap, Model};
pub use path::AttentionPath;
pub use rope::Rope;
pub use weights::Weights;
