//! What a run says about itself: two rates and the path on stderr, the same as JSON on request.

use crate::ab::Comparison;
use crate::memory::{human, peak};
use crate::run::Run;
use anyhow::{Context, Result};
use gem::models::gemma4::{AttentionPath, Model};
use serde_json::{json, Value};
use std::io::Write;
use std::path::Path;

pub fn rate(tokens: usize, seconds: f64) -> f64 {
    tokens as f64 / seconds.max(f64::MIN_POSITIVE)
}

/// What a path runs on, in words.
pub fn described(path: AttentionPath) -> &'static str {
    match path {
        AttentionPath::Reference => "reference: plain candle ops in every layer",
        AttentionPath::Sdpa => {
            "sdpa: candle's fused kernel for single tokens in full-attention layers, plain candle ops elsewhere"
        }
        AttentionPath::Fused => {
            "fused: attention_d512 in full-attention layers, plain candle ops elsewhere"
        }
        AttentionPath::FusedSharedKv => {
            "fused-kv: attention_d512_shared_kv over cached values alone in full-attention layers, plain candle ops elsewhere"
        }
    }
}

pub fn print(run: &Run) {
    eprintln!(
        "{} prompt tokens processed: {:.2} token/s",
        run.prompt_tokens,
        rate(run.prompt_tokens, run.prompt_seconds)
    );
    eprintln!(
        "{} tokens generated: {:.2} token/s, finish: {}",
        run.generated.len(),
        rate(run.generated.len(), run.generated_seconds),
        run.finish
    );
    eprintln!("attention {}", described(run.path));
    let (sliding, full) = run.cache_bytes;
    let tables = match run.table_bytes {
        0 => String::new(),
        bytes => format!(", {} of rotary tables", human(bytes as u64)),
    };
    eprintln!(
        "caches: {} in sliding layers, {} in full layers{tables}",
        human(sliding as u64),
        human(full as u64)
    );
    if let Some(bytes) = peak() {
        eprintln!("peak memory: {}", human(bytes));
    }
}

fn common(model: &Model) -> Value {
    json!({
        "gem": env!("CARGO_PKG_VERSION"),
        "device": format!("{:?}", model.device().location()),
        "dtype": model.dtype().as_str(),
        "peak_memory_bytes": peak(),
    })
}

pub fn run_json(model: &Model, run: &Run) -> Value {
    let mut report = common(model);
    report["attention"] = run.path.name().into();
    report["prompt_tokens"] = run.prompt_tokens.into();
    report["prompt_tokens_per_second"] = rate(run.prompt_tokens, run.prompt_seconds).into();
    report["generated_tokens"] = run.generated.len().into();
    report["generated_tokens_per_second"] = rate(run.generated.len(), run.generated_seconds).into();
    report["generated_ids"] = run.generated.clone().into();
    report["text"] = run.text.clone().into();
    report["finish"] = run.finish.to_string().into();
    report["sliding_cache_bytes"] = run.cache_bytes.0.into();
    report["full_cache_bytes"] = run.cache_bytes.1.into();
    report["rotary_table_bytes"] = run.table_bytes.into();
    report
}

pub fn comparison_json(model: &Model, comparison: &Comparison) -> Value {
    let mut report = common(model);
    report["prompt_tokens"] = comparison.prompt_tokens.into();
    report["generated_ids"] = comparison.generated.clone().into();
    report["arms"] = json!(comparison.arms);
    report
}

/// Where a report goes: opened before the work, so that a path that can't be written costs no run.
pub enum Destination {
    Stdout,
    File(std::fs::File),
}

impl Destination {
    /// `-` is stdout.
    pub fn open(path: &Path) -> Result<Self> {
        match path == Path::new("-") {
            true => Ok(Self::Stdout),
            false => Ok(Self::File(
                std::fs::File::create(path).with_context(|| path.display().to_string())?,
            )),
        }
    }

    pub fn write(self, report: &Value) -> Result<()> {
        match self {
            Self::Stdout => writeln!(std::io::stdout(), "{report:#}")?,
            Self::File(mut file) => writeln!(file, "{report:#}")?,
        }
        Ok(())
    }
}
