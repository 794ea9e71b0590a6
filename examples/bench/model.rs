//! Tests of a whole model: reading a prompt and generating, after some context.

use crate::args::Args;
use crate::measure::{interleave, Arm, Row};
use anyhow::{bail, Result};
use candle::{DType, Device, Tensor};
use gem::attention::RotaryTables;
use gem::models::gemma4::{AttentionPath, Cache, Config, LayerKind, Model, Rope};
use std::time::Instant;

/// What is read and said does not matter for time, but must lie in the vocabulary.
fn token(config: &Config, i: usize) -> u32 {
    (i * 7919 % config.vocab_size) as u32
}

fn tokens(config: &Config, from: usize, count: usize) -> Vec<u32> {
    (from..from + count).map(|i| token(config, i)).collect()
}

/// Refuses what can't run before a weight is read.
pub fn check(
    args: &Args,
    config: &Config,
    dtype: DType,
    device: &Device,
) -> Result<Vec<AttentionPath>> {
    let most = args.n_prompt.iter().chain(&args.n_gen).max().unwrap_or(&0);
    for depth in &args.n_depth {
        if depth.saturating_add(*most) > config.max_position_embeddings {
            bail!(
                "{most} tokens after {depth}, want at most the context of {} in all",
                config.max_position_embeddings
            );
        }
    }
    let paths = args.attention.iter().map(|name| {
        let path: AttentionPath = name.parse()?;
        path.check(config, dtype, device)?;
        Ok(path)
    });
    paths.collect()
}

/// Bytes of all weights, and of those that a token reads: the embedding counts once, as the head.
pub fn weight_bytes(config: &Config, dtype: DType, held: Option<u64>) -> (u64, u64) {
    let bytes = |shape: &[usize]| (shape.iter().product::<usize>() * dtype.size_in_bytes()) as u64;
    let shapes = config.tensor_shapes();
    let elements: u64 = shapes.iter().map(|(_, shape)| bytes(shape)).sum();
    let all = held.unwrap_or(elements);
    let looked_up = match config.tie_word_embeddings {
        true => 0,
        false => bytes(&[config.vocab_size, config.hidden_size]),
    };
    // Of a quantized embedding, its share of the elements.
    let share = looked_up as f64 / elements as f64;
    (all, all - (share * all as f64) as u64)
}

/// Bytes of the keys and values that a token reads after `tokens` of context, and of the angles of rebuilt keys.
fn read_rows(config: &Config, path: AttentionPath, tokens: usize, dtype: DType) -> u64 {
    let layers = config.layers.iter().map(|layer| {
        let row = layer.num_key_value_heads * layer.head_dim * dtype.size_in_bytes();
        match layer.kind {
            LayerKind::Sliding { window } => 2 * row * tokens.min(window),
            LayerKind::Full if path == AttentionPath::FusedSharedKv => {
                let frequencies = Rope::new(&layer.rope, layer.head_dim);
                (row + RotaryTables::row_bytes(frequencies.inv_freq())) * tokens
            }
            LayerKind::Full => 2 * row * tokens,
        }
    });
    layers.sum::<usize>() as u64
}

pub fn run(
    args: &Args,
    model: &Model,
    weights: (u64, u64),
    paths: &[AttentionPath],
    progress: &dyn Fn(String),
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for &depth in &args.n_depth {
        // The context is read once for each path, every sample starts from a copy.
        let mut contexts = Vec::new();
        for &path in paths {
            let mut cache = model.new_cache(path)?;
            cache.reserve(depth + args.n_prompt.iter().chain(&args.n_gen).max().unwrap_or(&0));
            let step = |at| progress(format!("{path}: context of {at} of {depth} tokens"));
            // The last token is read in any case: what a path makes at its first token, rotary tables for one, is no part of a sample.
            let filled = match args.fill {
                true => depth.saturating_sub(1),
                false => 0,
            };
            cache.fill(model.config(), filled, model.dtype(), model.device())?;
            let ids = tokens(model.config(), filled, depth - filled);
            feed(model, &mut cache, &ids, args.prefill_chunk, step)?;
            contexts.push(cache);
        }
        let tests = args
            .n_prompt
            .iter()
            .map(|&n| ("pp", n))
            .chain(args.n_gen.iter().map(|&n| ("tg", n)));
        for (kind, count) in tests.filter(|(_, n)| *n > 0) {
            let test = format!("{kind}{count}");
            let arms = paths
                .iter()
                .zip(&contexts)
                .map(|(path, context)| arm(args, model, weights, *path, context, kind, count));
            let step = |arm: &str| progress(format!("{test} after {depth} tokens, {arm}"));
            rows.extend(interleave(
                &test,
                depth,
                count,
                arms.collect::<Result<_>>()?,
                args.repetitions,
                step,
            )?);
        }
    }
    Ok(rows)
}

fn arm<'a>(
    args: &'a Args,
    model: &'a Model,
    (all, read): (u64, u64),
    path: AttentionPath,
    context: &'a Cache,
    kind: &str,
    count: usize,
) -> Result<Arm<'a>> {
    let config = model.config();
    let caches = |tokens| {
        let (sliding, full) = Cache::planned_bytes(config, path, tokens, model.dtype());
        (sliding + full + Cache::planned_table_bytes(config, path, tokens)) as u64
    };
    let generates = kind == "tg";
    let ids = tokens(config, context.len(), count);
    Ok(Arm {
        name: path.name().to_string(),
        // A prompt reads the weights once a chunk: no bound for a token.
        bytes: generates
            .then(|| read + read_rows(config, path, context.len() + count / 2, model.dtype())),
        held_bytes: model
            .device()
            .is_cpu()
            .then_some(all + context.table_bytes() as u64),
        planned_bytes: all + caches(context.len() + count),
        run: Box::new(move || {
            let mut cache = context.fork()?;
            model.device().synchronize()?;
            let start = Instant::now();
            match generates {
                true => feed(model, &mut cache, &ids, 1, |_| ())?,
                false => feed(model, &mut cache, &ids, args.prefill_chunk, |_| ())?,
            }
            model.device().synchronize()?;
            Ok(start.elapsed().as_secs_f64())
        }),
    })
}

/// In pieces of `chunk`; the logits of each are read, as generating does.
fn feed(
    model: &Model,
    cache: &mut Cache,
    ids: &[u32],
    chunk: usize,
    step: impl Fn(usize),
) -> Result<()> {
    for ids in ids.chunks(chunk) {
        step(cache.len());
        let input = Tensor::new(ids, model.device())?.unsqueeze(0)?;
        let logits = model
            .forward(&input, cache)?
            .to_device(&candle::Device::Cpu)?;
        std::hint::black_box(logits);
    }
    Ok(())
}
