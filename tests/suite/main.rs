//! Every integration test, in one binary: linking candle once keeps the suite quick to build.

mod common;
mod config;
mod kv_cache;
mod rope;
