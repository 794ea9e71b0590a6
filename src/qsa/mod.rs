//! Qwen Sparse Attention: what its layers do before attention itself.
//!
//! [`QsaProjection`] makes keys, values and what the indexer reads in one product; [`qsa_prep`] norms, rotates, quantizes and
//! pools them for a chunk of tokens.

pub mod prep;
mod projection;

pub use prep::{
    qsa_prep, QsaChunk, QsaCodes, QsaInputs, QsaNorms, QsaPrepared, QsaState, ROPE_THETA,
};
pub use projection::QsaProjection;
