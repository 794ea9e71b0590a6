//! Every integration test, in one binary: linking candle once keeps the suite quick to build.

mod attention_faults;
mod attention_merge;
mod attention_oracle;
mod attention_refusals;
mod attention_support;
mod attention_views;
mod common;
mod config;
mod fixtures;
mod kv_cache;
mod rope;
mod weights;
