//! Every attention path on the same prompt, token by token in turn, so that both see the same machine.

use crate::args::Args;
use crate::run::{feed, new_cache, prefill};
use anyhow::Result;
use candle::Tensor;
use gem::models::gemma4::{AttentionPath, Cache, Model, StopTokens};
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

pub fn compare(
    model: &Model,
    prompt: &[u32],
    stop: &StopTokens,
    args: &Args,
) -> Result<Comparison> {
    let mut arms = Vec::new();
    let mut state: Vec<(Cache, Tensor, f64)> = Vec::new();
    for path in AttentionPath::ALL {
        let mut cache = new_cache(model, path, args, prompt)?;
        let (logits, seconds) = prefill(model, &mut cache, prompt, args)?;
        arms.push(Arm {
            attention: path.name(),
            prompt_tokens_per_second: prompt.len() as f64 / seconds,
            generated_tokens_per_second: 0.0,
            max_logit_difference: 0.0,
            first_difference: None,
            sliding_cache_bytes: 0,
            full_cache_bytes: 0,
        });
        state.push((cache, logits, 0.0));
    }
    let mut generated = Vec::new();
    let mut fed = 0;
    loop {
        let first = state[0].1.to_vec1::<f32>()?;
        let token = argmax(&first)?;
        for (arm, (_, logits, _)) in arms.iter_mut().zip(&state) {
            let logits = logits.to_vec1::<f32>()?;
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
        let full = state[0].0.len() == state[0].0.max_context();
        if stop.contains(token) || generated.len() == args.sample_len {
            break;
        }
        generated.push(token);
        if full || generated.len() == args.sample_len {
            break;
        }
        // ABBA: neither arm always goes first.
        let mut order: Vec<usize> = (0..state.len()).collect();
        if fed % 2 == 1 {
            order.reverse();
        }
        for i in order {
            let (cache, logits, seconds) = &mut state[i];
            let start = Instant::now();
            *logits = feed(model, cache, &[token])?;
            *seconds += start.elapsed().as_secs_f64();
        }
        fed += 1;
    }
    for (arm, (cache, _, seconds)) in arms.iter_mut().zip(&state) {
        arm.generated_tokens_per_second = fed as f64 / seconds.max(f64::MIN_POSITIVE);
        (arm.sliding_cache_bytes, arm.full_cache_bytes) = cache.bytes();
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
