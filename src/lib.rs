//! Fused attention for candle at head_dim 512, and a Gemma 4 that runs on it or on candle's plain ops.
//!
//! [`attention_d512`] is exact softmax attention that reads each key and value row once for all query heads of its KV head.
//! [`attention_d512_shared_kv`] does so from half the cache, where keys follow from values. [`FusedProjection`] is several
//! projections of one input as one product. [`models::gemma4`] is a Gemma 4 text decoder whose
//! [cache](models::gemma4::Cache) chooses between these ops and [plain ones](attention::reference), so that both can run in
//! one process on the same weights. [`qsa_prep`] prepares a chunk for another attention, the sparse one with an indexer.
//!
//! ```
//! use candle::{Device, Tensor};
//! use gem::models::gemma4::{AttentionPath, Config, Model, Weights};
//!
//! # fn main() -> candle::Result<()> {
//! let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/tiny-gemma4");
//! let config = Config::from_file(format!("{folder}/config.json"))?;
//! let weights = Weights::open_dir(folder)?;
//! weights.check(&config.tensor_shapes())?;
//! let model = Model::new(&config, weights.var_builder(candle::DType::F32, &Device::Cpu))?;
//!
//! let prompt = Tensor::new(&[[2u32, 3007, 755, 347, 644, 542, 396]], &Device::Cpu)?; // <bos>Once upon a time there was
//! let mut next = vec![];
//! for path in [AttentionPath::Reference, AttentionPath::Fused] {
//!     let mut cache = model.new_cache(path)?;
//!     let logits = model.forward(&prompt, &mut cache)?; // (batch, vocab)
//!     next.push(logits.argmax(1)?.to_vec1::<u32>()?);
//! }
//! assert_eq!(next, [[347], [347]]); // " a"
//! # Ok(())
//! # }
//! ```
//!
//! # Features
//!
//! | feature | default | effect |
//! |---|---|---|
//! | `fused` | yes | [`AttentionPath::default()`](models::gemma4::AttentionPath) is the fused path; both are always compiled |
//! | `metal` | no | [`attention_d512`], [`FusedProjection`] and [`qsa_prep`] on Apple GPUs; forwarded to every candle crate |
//! | `cuda` | no | the same on NVIDIA GPUs, compute capability 8.0 or more; forwarded to every candle crate; needs nvcc |
//! | `metal-debug-labels` | no | `metal`, with launches and buffers named in frame captures |

#![warn(missing_docs)]

pub mod attention;
pub mod backend;
mod cpu;
pub mod device;
mod memory;
pub mod models;
pub mod projection;
pub mod qsa;

pub use attention::{
    attention_d512, attention_d512_shared_kv, AttentionD512, AttentionPartials, RotaryKeys,
};
pub use projection::FusedProjection;
pub use qsa::qsa_prep;
