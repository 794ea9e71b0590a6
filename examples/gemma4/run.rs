//! One prompt on one attention path: prefill, then the answer token by token.

use crate::args::{Args, SamplingArgs};
use crate::stream::AnswerStream;
use anyhow::Result;
use candle::Tensor;
use candle_transformers::generation::{LogitsProcessor, Sampling};
use candle_transformers::utils::apply_repeat_penalty;
use gem::models::gemma4::{generate, AttentionPath, Cache, Finish, Model, StopTokens};
use indicatif::{ProgressBar, ProgressStyle};
use std::cell::RefCell;
use std::io::Write;
use std::time::Instant;
use tokenizers::Tokenizer;

pub struct Run {
    pub path: AttentionPath,
    pub prompt_tokens: usize,
    pub prompt_seconds: f64,
    pub generated: Vec<u32>,
    pub generated_seconds: f64,
    pub text: String,
    pub finish: Finish,
    /// Sliding layers, full layers.
    pub cache_bytes: (usize, usize),
    /// Of rotary tables kept with the cache.
    pub table_bytes: usize,
}

/// A cache with room for the prompt and the answer, or an error before any work.
pub fn new_cache(model: &Model, path: AttentionPath, args: &Args, prompt: &[u32]) -> Result<Cache> {
    let mut cache = model.new_cache(path)?;
    if let Some(max_context) = args.max_context {
        cache = cache.with_max_context(max_context)?;
    }
    cache.check_room(prompt.len())?;
    cache.reserve(planned_context(args, prompt.len()));
    Ok(cache)
}

/// Tokens that caches make room for at once: the prompt and an answer of ordinary length. Longer answers grow them.
pub fn planned_context(args: &Args, prompt_len: usize) -> usize {
    prompt_len + args.sample_len.min(1024)
}

/// Feeds the prompt in chunks; logits `(vocab)` of its last token, `None` if `interrupted` said so between two chunks.
pub fn prefill(
    model: &Model,
    cache: &mut Cache,
    prompt: &[u32],
    args: &Args,
    interrupted: fn() -> bool,
) -> Result<Option<Tensor>> {
    let bar = match args.quiet {
        true => ProgressBar::hidden(),
        false => ProgressBar::new(prompt.len() as u64),
    };
    let style =
        ProgressStyle::with_template("reading the prompt {bar:40} {pos}/{len} tokens, {eta} left")?;
    bar.set_style(style);
    let mut logits = None;
    for chunk in prompt.chunks(args.prefill_chunk) {
        if interrupted() {
            bar.finish_and_clear();
            return Ok(None);
        }
        logits = Some(feed(model, cache, chunk)?);
        bar.inc(chunk.len() as u64);
    }
    bar.finish_and_clear();
    match logits {
        Some(logits) => Ok(Some(logits)),
        None => anyhow::bail!("the prompt has no tokens"),
    }
}

/// Logits `(vocab)` after `tokens`.
pub fn feed(model: &Model, cache: &mut Cache, tokens: &[u32]) -> candle::Result<Tensor> {
    let input = Tensor::new(tokens, model.device())?.unsqueeze(0)?;
    model
        .forward(&input, cache)?
        .squeeze(0)?
        .to_device(&candle::Device::Cpu)
}

pub fn run(
    model: &Model,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    stop: &StopTokens,
    path: AttentionPath,
    args: &Args,
) -> Result<Run> {
    let mut cache = new_cache(model, path, args, prompt)?;
    let start = Instant::now();
    let logits = prefill(model, &mut cache, prompt, args, || false)?
        .ok_or_else(|| anyhow::anyhow!("interrupted"))?;
    let prompt_seconds = start.elapsed().as_secs_f64();
    let mut stream = AnswerStream::new(tokenizer, out(args), args.chat.show_thoughts);
    let mut sampler = sampler(args);
    let mut said = prompt.to_vec();
    let start = Instant::now();
    let finish = answer(
        model,
        &mut cache,
        logits,
        &mut said,
        stop,
        &mut sampler,
        args,
        |id| stream.push(id),
    )?;
    let generated_seconds = start.elapsed().as_secs_f64();
    Ok(Run {
        path,
        prompt_tokens: prompt.len(),
        prompt_seconds,
        generated: said.split_off(prompt.len()),
        generated_seconds,
        text: stream.finish()?,
        finish,
        cache_bytes: cache.bytes(),
        table_bytes: cache.table_bytes(),
    })
}

/// Where the text goes.
pub fn out(args: &Args) -> Box<dyn Write> {
    match args.json_replaces_text() {
        true => Box::new(std::io::sink()),
        false => Box::new(std::io::stdout()),
    }
}

pub fn sampler(args: &Args) -> LogitsProcessor {
    LogitsProcessor::from_sampling(args.sampling.seed, sampling(&args.sampling))
}

/// Continues `said`, whose tokens `cache` holds, token by token; `said` grows by the answer.
#[allow(clippy::too_many_arguments, reason = "what an answer needs")]
pub fn answer(
    model: &Model,
    cache: &mut Cache,
    logits: Tensor,
    said: &mut Vec<u32>,
    stop: &StopTokens,
    sampler: &mut LogitsProcessor,
    args: &Args,
    mut emit: impl FnMut(u32) -> candle::Result<()>,
) -> candle::Result<Finish> {
    let room = cache.max_context() - cache.len();
    let said = RefCell::new(said);
    generate(
        logits,
        args.sample_len,
        room,
        stop,
        |logits| {
            let said = said.borrow();
            let recent = &said[said.len().saturating_sub(args.sampling.repeat_last_n)..];
            match args.sampling.repeat_penalty {
                1.0 => sampler.sample(logits),
                penalty => sampler.sample(&apply_repeat_penalty(logits, penalty as f32, recent)?),
            }
        },
        |id| {
            said.borrow_mut().push(id);
            emit(id)
        },
        |id| feed(model, cache, &[id]),
    )
}

fn sampling(args: &SamplingArgs) -> Sampling {
    match (args.temperature, args.top_k, args.top_p) {
        (None, _, _) => Sampling::ArgMax,
        (Some(temperature), None, None) => Sampling::All { temperature },
        (Some(temperature), Some(k), None) => Sampling::TopK { k, temperature },
        (Some(temperature), None, Some(p)) => Sampling::TopP { p, temperature },
        (Some(temperature), Some(k), Some(p)) => Sampling::TopKThenTopP { k, p, temperature },
    }
}
