//! Every attention path on the same prompt, token by token in turn, so that both see the same machine.

use crate::args::Args;
use crate::report::rate;
use crate::run::{feed, new_cache};
use anyhow::Result;
use candle::{DType, Device, Tensor};
use gem::models::gemma4::{AttentionPath, Cache, Config, Model, StopTokens};
use serde::Serialize;
use std::time::Instant;

/// One path of the comparison; the first one chooses the tokens that all are fed.
#[derive(Serialize)]
pub struct Arm {
    pub attention: &'static str,
    pub prompt_tokens_per_second: f64,
    pub generated_tokens_per_second: f64,
    /// Against the first arm, over the prompt's last token and every generated one.
    pub max_logit_difference: f32,
    /// The first generated token on which this arm would have differed, counted from 0.
    pub first_difference: Option<usize>,
    pub sliding_cache_bytes: usize,
    pub full_cache_bytes: usize,
}

pub struct Comparison {
    pub arms: Vec<Arm>,
    pub prompt_tokens: usize,
    pub generated: Vec<u32>,
}

/// A path on its way through the prompt and the answer.
struct Side {
    cache: Cache,
    logits: Tensor,
    prompt_seconds: f64,
    generated_seconds: f64,
}

/// Feeds `tokens` to every side, in turn and the other way round every other time, so that no side always goes first.
fn feed_all(
    model: &Model,
    sides: &mut [Side],
    tokens: &[u32],
    turn: usize,
    seconds: fn(&mut Side) -> &mut f64,
) -> Result<()> {
    let mut order: Vec<usize> = (0..sides.len()).collect();
    if turn % 2 == 1 {
        order.reverse();
    }
    for i in order {
        let side = &mut sides[i];
        let start = Instant::now();
        side.logits = feed(model, &mut side.cache, tokens)?;
        *seconds(side) += start.elapsed().as_secs_f64();
    }
    Ok(())
}

/// Names each path that [`compare`] can't run, with the reason.
pub fn say_what_is_left_out(config: &Config, dtype: DType, device: &Device) {
    for path in AttentionPath::ALL {
        if let Err(reason) = path.check(config, dtype, device) {
            say!("not compared: {reason}");
        }
    }
}

pub fn compare(
    model: &Model,
    prompt: &[u32],
    stop: &StopTokens,
    args: &Args,
) -> Result<Comparison> {
    // The first pass of a process pays for cold memory.
    let paths = AttentionPath::available(model.config(), model.dtype(), model.device());
    for &path in &paths {
        feed(
            model,
            &mut model.new_cache(path)?,
            &prompt[..prompt.len().min(args.prefill_chunk)],
        )?;
    }
    let mut arms = Vec::new();
    let mut sides = Vec::new();
    for path in paths {
        arms.push(Arm {
            attention: path.name(),
            prompt_tokens_per_second: 0.0,
            generated_tokens_per_second: 0.0,
            max_logit_difference: 0.0,
            first_difference: None,
            sliding_cache_bytes: 0,
            full_cache_bytes: 0,
        });
        let logits = Tensor::zeros(model.config().vocab_size, DType::F32, &Device::Cpu)?;
        let cache = new_cache(model, path, args, prompt)?;
        sides.push(Side {
            cache,
            logits,
            prompt_seconds: 0.0,
            generated_seconds: 0.0,
        });
    }
    for (turn, chunk) in prompt.chunks(args.prefill_chunk).enumerate() {
        feed_all(model, &mut sides, chunk, turn, |side| {
            &mut side.prompt_seconds
        })?;
    }
    let mut generated = Vec::new();
    let mut fed = 0;
    loop {
        let first = sides[0].logits.to_vec1::<f32>()?;
        let token = argmax(&first)?;
        for (arm, side) in arms.iter_mut().zip(&sides) {
            let logits = side.logits.to_vec1::<f32>()?;
            let difference = first
                .iter()
                .zip(&logits)
                .map(|(a, b)| (a - b).abs())
                .fold(0.0, f32::max);
            arm.max_logit_difference = arm.max_logit_difference.max(difference);
            if argmax(&logits)? != token && arm.first_difference.is_none() {
                arm.first_difference = Some(generated.len());
            }
        }
        if stop.contains(token) {
            break;
        }
        generated.push(token);
        let full = sides[0].cache.len() == sides[0].cache.max_context();
        if full || generated.len() == args.sample_len {
            break;
        }
        feed_all(model, &mut sides, &[token], fed, |side| {
            &mut side.generated_seconds
        })?;
        fed += 1;
    }
    for (arm, side) in arms.iter_mut().zip(&sides) {
        arm.prompt_tokens_per_second = rate(prompt.len(), side.prompt_seconds);
        arm.generated_tokens_per_second = rate(fed, side.generated_seconds);
        (arm.sliding_cache_bytes, arm.full_cache_bytes) = side.cache.bytes();
    }
    Ok(Comparison {
        arms,
        prompt_tokens: prompt.len(),
        generated,
    })
}

fn argmax(logits: &[f32]) -> Result<u32> {
    match logits.iter().position(|x| !x.is_finite()) {
        Some(id) => anyhow::bail!(
            "the logit of token {id} is {}, want finite logits",
            logits[id]
        ),
        None => Ok((0..logits.len())
            .rev()
            .max_by(|&a, &b| logits[a].total_cmp(&logits[b]))
            .unwrap_or(0) as u32),
    }
}

impl Comparison {
    pub fn table(&self) -> String {
        let mut table = String::from(
            "| attention | prompt tokens/s | generated tokens/s | same tokens | max logit difference | sliding cache MiB | full cache MiB |\n\
             |---|---:|---:|---|---:|---:|---:|\n",
        );
        for arm in &self.arms {
            let same = match arm.first_difference {
                None => format!("all {}", self.generated.len()),
                Some(at) => format!("differs at {at}"),
            };
            let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
            table += &format!(
                "| {} | {:.1} | {:.1} | {same} | {:.2e} | {:.2} | {:.2} |\n",
                arm.attention,
                arm.prompt_tokens_per_second,
                arm.generated_tokens_per_second,
                arm.max_logit_difference,
                mib(arm.sliding_cache_bytes),
                mib(arm.full_cache_bytes),
            );
        }
        table
    }
}
