//! Every integration test, in one binary: linking candle once keeps the suite quick to build.

mod attention_faults;
mod attention_merge;
mod attention_oracle;
mod attention_refusals;
mod attention_support;
mod attention_views;
mod common;
mod config;
mod fixture_model;
mod fixtures;
mod generation;
mod kv_cache;
mod reference_attention;
mod rope;
mod trained_model;
mod weights;
