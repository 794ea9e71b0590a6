//! Every integration test, in one binary: linking candle once keeps the suite quick to build.

mod common;
mod config;
mod fixtures;
mod kv_cache;
mod rope;
mod weights;
