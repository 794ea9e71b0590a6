//! The command line: candle's own flag names where candle has one.

use crate::checkpoint::ModelFiles;
use crate::plan::PlanArgs;
use clap::{Parser, ValueEnum};
use gem::models::gemma4::AttentionPath;
use std::path::PathBuf;

/// Gemma 4 on candle's plain ops or on the fused ops of candle-gem.
///
/// Without arguments: the small trained model of this repository reads a text of about 6,000 tokens, is asked for the three
/// secret words hidden in it, and answers. No network is used. The generated text goes to stdout, everything else to stderr.
#[derive(Debug, Parser)]
#[command(name = "gemma4", version)]
pub struct Args {
    /// Text to continue; control tokens such as <bos> in it are recognised.
    #[arg(long, conflicts_with = "prompt_file")]
    pub prompt: Option<String>,

    /// File with the text to continue, - for stdin.
    #[arg(long, value_name = "FILE")]
    pub prompt_file: Option<PathBuf>,

    #[command(flatten)]
    pub chat: ChatArgs,

    /// Attention path [default: fused, or reference in a build with --no-default-features].
    #[arg(long, value_name = "PATH", value_parser = parse_path)]
    pub attention: Option<AttentionPath>,

    /// Run every attention path on the same prompt, token by token in turn, and print a table. Greedy.
    #[arg(long, conflicts_with_all = ["attention", "temperature", "top_p", "top_k", "repeat_penalty"])]
    pub ab: bool,

    /// Most tokens to generate.
    #[arg(short = 'n', long, default_value_t = 512, value_parser = at_least_one)]
    pub sample_len: usize,

    #[command(flatten)]
    pub sampling: SamplingArgs,

    #[command(flatten)]
    pub model: ModelFiles,

    /// Type of matrix products and caches [default: f32 on the CPU, else bf16].
    #[arg(long, value_enum)]
    pub dtype: Option<WeightType>,

    /// Most tokens of prompt and answer together [default: what the model was made for].
    #[arg(long, value_parser = at_least_one)]
    pub max_context: Option<usize>,

    #[command(flatten)]
    pub plan: PlanArgs,

    /// Feed the prompt in chunks of so many tokens; bounds the memory for activations.
    #[arg(long, default_value_t = 512, value_parser = at_least_one)]
    pub prefill_chunk: usize,

    /// Run on the CPU even if a GPU is there.
    #[arg(long)]
    pub cpu: bool,

    /// Write a report as JSON to FILE; without FILE, to stdout in place of the text.
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-")]
    pub json: Option<PathBuf>,

    /// Write a trace for chrome://tracing to the current folder.
    #[arg(long)]
    pub tracing: bool,

    /// Only the text, no rates.
    #[arg(short, long)]
    pub quiet: bool,

    /// List the devices that this build can use.
    #[arg(long)]
    pub list_devices: bool,
}

/// How a conversation is written and shown.
#[derive(Debug, clap::Args)]
pub struct ChatArgs {
    /// Make the prompt a user turn, in which control tokens stay plain text; without a prompt, converse: a line is a turn,
    /// /help lists the commands.
    #[arg(long)]
    pub chat: bool,

    /// What the model is told before the conversation; @FILE reads it from a file.
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system: Option<String>,

    /// Let the model think before it answers.
    #[arg(long, requires = "chat", overrides_with = "no_think")]
    pub think: bool,

    /// Don't [the default].
    #[arg(long, requires = "chat", overrides_with = "think")]
    pub no_think: bool,

    /// Show the model's thoughts, on stderr.
    #[arg(long)]
    pub show_thoughts: bool,

    /// Chat template in Jinja [default: the checkpoint's own, else the built-in form of Gemma 4].
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<PathBuf>,
}

/// How a token is chosen.
#[derive(Debug, clap::Args)]
pub struct SamplingArgs {
    /// Sampling temperature; greedy if left out.
    #[arg(long, value_parser = factor, allow_negative_numbers = true)]
    pub temperature: Option<f64>,

    /// Sample from the likeliest tokens that make up this probability.
    #[arg(long, requires = "temperature", value_parser = probability)]
    pub top_p: Option<f64>,

    /// Sample from this many of the likeliest tokens.
    #[arg(long, requires = "temperature", value_parser = at_least_one)]
    pub top_k: Option<usize>,

    #[arg(long, default_value_t = 299792458)]
    pub seed: u64,

    /// Penalty on tokens that were said before, 1 for none.
    #[arg(long, default_value_t = 1.0, value_parser = factor, allow_negative_numbers = true)]
    pub repeat_penalty: f64,

    /// How many of the last tokens the penalty looks at.
    #[arg(long, default_value_t = 64)]
    pub repeat_last_n: usize,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum WeightType {
    F32,
    Bf16,
    F16,
}

impl From<WeightType> for candle::DType {
    fn from(dtype: WeightType) -> Self {
        match dtype {
            WeightType::F32 => Self::F32,
            WeightType::Bf16 => Self::BF16,
            WeightType::F16 => Self::F16,
        }
    }
}

impl Args {
    /// Whether turns come from a person as the program runs.
    pub fn converses(&self) -> bool {
        self.chat.chat && self.prompt.is_none() && self.prompt_file.is_none() && !self.ab
    }

    /// Whether stdout is for the report alone.
    pub fn json_replaces_text(&self) -> bool {
        self.json.as_deref() == Some("-".as_ref())
    }
}

fn parse_path(name: &str) -> Result<AttentionPath, String> {
    let names = AttentionPath::ALL.map(AttentionPath::name);
    name.parse().map_err(|_| format!("want one of {names:?}"))
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("want at least 1".into()),
        Ok(n) => Ok(n),
        Err(e) => Err(e.to_string()),
    }
}

/// What f32 holds as a number other than 0: the sampler compares sums in f32 with it.
fn probability(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(p) if p > 1.0 => Err("want at most 1".into()),
        Ok(p) if p > 0.0 && (p as f32).is_normal() => Ok(p),
        Ok(_) => Err("want a positive number, 1.2e-38 or more".into()),
        Err(e) => Err(e.to_string()),
    }
}

/// What logits are divided or multiplied by in f32, so neither it nor its reciprocal may take them out of it. candle's sampler
/// draws the same line below, where it is greedy.
fn factor(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if (1e-7..=1e7).contains(&x) => Ok(x),
        Ok(_) => Err("want a positive number, from 1e-7 to 1e7".into()),
        Err(e) => Err(e.to_string()),
    }
}
