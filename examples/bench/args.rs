//! The command line: llama-bench's shape, candle's flag names.

use crate::checkpoint::ModelFiles;
use anyhow::{bail, Result};
use clap::{Parser, ValueEnum};
use std::path::PathBuf;

/// Measures Gemma 4, or its attention alone, on several attention paths in turn.
///
/// Each test runs every arm once a round, in the opposite order every other round, after one round that warms up. Tests of a model:
/// reading `-p` tokens (pp) and generating `-n` (tg), each after `-d` tokens of context. Decides nothing, unless asked to `--admit`.
#[derive(Debug, Parser)]
#[command(name = "bench", version)]
pub struct Args {
    /// Prompt tokens to read, 0 for none.
    #[arg(short = 'p', long, value_delimiter = ',', default_value = "512")]
    pub n_prompt: Vec<usize>,

    /// Tokens to generate, 0 for none.
    #[arg(short = 'n', long, value_delimiter = ',', default_value = "128")]
    pub n_gen: Vec<usize>,

    /// Tokens of context that are there before.
    #[arg(short = 'd', long, value_delimiter = ',', default_value = "0")]
    pub n_depth: Vec<usize>,

    /// Fill caches with random rows instead of reading the tokens of context, all but the last.
    #[arg(long)]
    pub fill: bool,

    /// Rounds.
    #[arg(short = 'r', long, default_value_t = 5, value_parser = rounds)]
    pub repetitions: usize,

    /// Arms, the first of which the others are compared with; reference, sdpa (Metal), fused and fused-kv; fused-pN (N partitions), fused-tile8, fused-heads2,
    /// fused-direct and fused-matrix (GPU kernels) with --op.
    #[arg(long, value_delimiter = ',', default_value = "reference,fused")]
    pub attention: Vec<String>,

    /// Measure this operator alone, with the shape of a full-attention layer of the model.
    #[arg(long, value_enum)]
    pub op: Option<Op>,

    /// Keys of the operator.
    #[arg(long, value_delimiter = ',', default_value = "8192", requires = "op")]
    pub len: Vec<usize>,

    #[command(flatten)]
    pub model: ModelFiles,

    /// Random weights of this shape instead of a checkpoint's.
    #[arg(long, value_enum, conflicts_with_all = ["weight_files", "config_file", "model_id"])]
    pub shape: Option<Shape>,

    /// Only so many layers of that shape.
    #[arg(long, requires = "shape", value_parser = at_least_one)]
    pub layers: Option<usize>,

    /// Only so many tokens in the vocabulary of that shape.
    #[arg(long, requires = "shape", value_parser = at_least_one)]
    pub vocab: Option<usize>,

    /// Type of matrix products and caches [default: f32 on the CPU, else bf16].
    #[arg(long, value_enum)]
    pub dtype: Option<Type>,

    /// Tokens that are read at a time.
    #[arg(long, default_value_t = 512, value_parser = at_least_one)]
    pub prefill_chunk: usize,

    /// Format of stdout.
    #[arg(short = 'o', long, value_enum, default_value = "md")]
    pub output: Output,

    /// Draw medians over context, or over keys, as SVG.
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,

    /// Say whether each arm may take the place of the first: faster by more than 3 % and more than the spread at 65,536 and at
    /// 131,072 tokens, slower nowhere. The exit status is 1 if one may not.
    #[arg(long)]
    pub admit: bool,

    /// Run on the CPU even if a GPU is there.
    #[arg(long)]
    pub cpu: bool,
}

impl Args {
    /// What clap can't say.
    pub fn check(&self) -> Result<()> {
        if self.op.is_none() && self.n_prompt.iter().chain(&self.n_gen).all(|&n| n == 0) {
            bail!("-p and -n are 0, want something to measure");
        }
        let twice = |name: &str, values: &[String]| match values
            .iter()
            .enumerate()
            .find(|(i, value)| values[..*i].contains(value))
        {
            Some((_, value)) => bail!("{name} names {value} twice"),
            None => Ok(()),
        };
        let text = |values: &[usize]| values.iter().map(usize::to_string).collect::<Vec<_>>();
        twice("--attention", &self.attention)?;
        twice("-p", &text(&self.n_prompt))?;
        twice("-n", &text(&self.n_gen))?;
        twice("-d", &text(&self.n_depth))?;
        twice("--len", &text(&self.len))?;
        let contexts = match self.op {
            Some(_) => &self.len,
            None => &self.n_depth,
        };
        if let Some(why) = crate::admit::refusal(&self.attention, contexts).filter(|_| self.admit) {
            bail!("{why}");
        }
        // 32 GiB of keys a head in f32: more is a slip, and would end in an allocation that aborts.
        match self.len.iter().find(|&&len| len > MOST_KEYS) {
            Some(len) => bail!("--len is {len}, want at most {MOST_KEYS}"),
            None => Ok(()),
        }
    }
}

const MOST_KEYS: usize = 1 << 24;

#[derive(Debug, Clone, Copy, PartialEq, ValueEnum)]
pub enum Op {
    Attention,
}

#[derive(Debug, Clone, Copy, PartialEq, ValueEnum)]
pub enum Shape {
    /// Gemma 4 31B: 60 layers.
    #[value(name = "31b")]
    Gemma31B,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Type {
    F32,
    Bf16,
    F16,
}

impl From<Type> for candle::DType {
    fn from(dtype: Type) -> Self {
        match dtype {
            Type::F32 => Self::F32,
            Type::Bf16 => Self::BF16,
            Type::F16 => Self::F16,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, ValueEnum)]
pub enum Output {
    Md,
    Csv,
    Json,
    Jsonl,
}

fn at_least_one(text: &str) -> std::result::Result<usize, String> {
    match text.parse() {
        Ok(0) => Err("want at least 1".into()),
        Ok(n) => Ok(n),
        Err(e) => Err(e.to_string()),
    }
}

fn rounds(text: &str) -> std::result::Result<usize, String> {
    match at_least_one(text)? {
        n if n > 10_000 => Err("want at most 10000".into()),
        n => Ok(n),
    }
}
