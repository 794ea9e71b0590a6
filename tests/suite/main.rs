//! Every integration test, in one binary: linking candle once keeps the suite quick to build.

mod absurd_views;
mod any_request;
mod attention_edges;
mod attention_faults;
mod attention_memory;
mod attention_merge;
mod attention_oracle;
mod attention_properties;
mod attention_refusals;
mod attention_support;
mod attention_views;
mod bench;
mod chat_session;
mod chat_template;
mod cli;
mod common;
mod concurrency;
mod config;
#[cfg(feature = "cuda")]
mod cuda_device;
mod cuda_plans;
mod device_faults;
#[path = "../../examples/bench/admit.rs"]
mod example_admit;
#[path = "../../examples/gemma4/bounded_file.rs"]
mod example_bounded_file;
#[allow(dead_code, reason = "the program uses all of it")]
#[path = "../../examples/gemma4/chat/mod.rs"]
mod example_chat;
#[path = "../../examples/gemma4/guard.rs"]
mod example_guard;
#[path = "../../examples/quantize/convert.rs"]
mod example_quantize_convert;
#[path = "../../examples/quantize/metadata.rs"]
mod example_quantize_metadata;
#[path = "../../examples/quantize/vocabulary.rs"]
mod example_quantize_vocabulary;
#[path = "../../examples/quantize/write.rs"]
mod example_quantize_write;
#[path = "../../examples/gemma4/replace.rs"]
mod example_replace;
#[path = "../../examples/gemma4/stream.rs"]
mod example_stream;
#[path = "../../examples/gemma4/tokenizer.rs"]
mod example_tokenizer;
mod fixture_model;
mod fixtures;
mod generation;
mod gguf;
mod gguf_header;
mod gguf_support;
mod hub;
mod kills;
mod kv_cache;
mod long_run;
mod memory_plan;
mod metal_plan;
mod mock_hub;
mod model;
mod model_faults;
mod projection;
mod projection_faults;
mod projection_refusals;
mod projection_support;
mod prompt;
mod qsa_definition;
mod qsa_prep;
mod qsa_projection;
mod qsa_refusals;
mod qsa_support;
mod quantize_cli;
mod real_tokenizer;
mod reference_attention;
mod resource_limits;
mod rope;
mod shared_kv;
mod shared_kv_model;
mod shared_kv_support;
mod stream;
mod tokenizer;
mod trained_model;
mod verify;
mod weights;
mod written_files;

// As the program names them to each other.
use {
    example_bounded_file as bounded_file, example_chat::template_file, example_guard as guard,
    example_quantize_metadata as metadata, example_quantize_vocabulary as vocabulary,
    example_quantize_write as write, example_replace as replace, example_tokenizer::read_tokenizer,
};

// The harness that runs kernels from their text is for this one system.
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[path = "../msl/tests/suite/decode.rs"]
mod candle_decode;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod gpu_plans;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod metal_attention;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod metal_controls;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod metal_projection;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod metal_projection_controls;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod metal_projection_plan;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod metal_projection_traffic;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod metal_qsa_prep;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod metal_shared_kv;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod metal_states;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod metal_support;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
mod metal_traffic;
