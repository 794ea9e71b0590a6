//! What a run says about itself: two rates and the path on stderr, the same as JSON on request.

use crate::ab::Comparison;
use crate::bounded_file;
use crate::memory::{human, peak};
use crate::replace::Replacement;
use crate::run::Run;
use anyhow::Result;
use gem::models::gemma4::{AttentionPath, Model};
use serde_json::{json, Value};
use std::io::Write;
use std::path::Path;

/// Bytes of an earlier report that is looked at.
const LARGEST: u64 = 64 << 20;

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
    say!(
        "{} prompt tokens processed: {:.2} token/s",
        run.prompt_tokens,
        rate(run.prompt_tokens, run.prompt_seconds)
    );
    say!(
        "{} tokens generated: {:.2} token/s, finish: {}",
        run.generated.len(),
        rate(run.generated.len(), run.generated_seconds),
        run.finish
    );
    say!("attention {}", described(run.path));
    let (sliding, full) = run.cache_bytes;
    let tables = match run.table_bytes {
        0 => String::new(),
        bytes => format!(", {} of rotary tables", human(bytes as u64)),
    };
    say!(
        "caches: {} in sliding layers, {} in full layers{tables}",
        human(sliding as u64),
        human(full as u64)
    );
    if let Some(bytes) = peak() {
        say!("peak memory: {}", human(bytes));
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
    File(Replacement),
}

impl Destination {
    /// `-` is stdout.
    pub fn open(path: &Path) -> Result<Self> {
        match path == Path::new("-") {
            true => Ok(Self::Stdout),
            false => Ok(Self::File(Replacement::of(path, "report", is_report)?)),
        }
    }

    pub fn write(self, report: &Value) -> Result<()> {
        match self {
            Self::Stdout => writeln!(std::io::stdout(), "{report:#}")?,
            Self::File(mut file) => {
                writeln!(file, "{report:#}")?;
                file.put()?;
            }
        }
        Ok(())
    }
}

/// Whether a file is a report of an earlier run.
fn is_report(file: &Path) -> bool {
    let text = bounded_file::read(file, LARGEST).ok().flatten();
    let report = text.and_then(|text| serde_json::from_str::<Value>(&text).ok());
    report.is_some_and(|report| report["gem"].is_string())
}
