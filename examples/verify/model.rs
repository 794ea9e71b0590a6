//! Gate 4: a model on every attention path, token by token across the length at which the kernels are cut anew.

use crate::receipt::{sha256, Report, Settings};
use crate::Progress;
use anyhow::{Context, Result};
use candle::Tensor;
use gem::models::gemma4::{with_one_bos, AttentionPath, Config, LayerKind, Model};
use serde::{Deserialize, Serialize};
use std::time::Instant;
use tokenizers::Tokenizer;

const TEXT: &str = include_str!("../../assets/tiny-gemma4/demo.txt");
const CHUNK: usize = 512;
/// Greedy tokens; the first ones come before the boundary, the last ones after it.
const STEPS: usize = 12;
const BEFORE: usize = 4;
const TOP: usize = 10;
const LEAST_TOKENS: usize = 8;

fn boundary(quick: bool) -> usize {
    match quick {
        true => 1024,
        false => 8192,
    }
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Models {
    sha256_config: String,
    dtype: String,
    pub boundary: usize,
    prompt_tokens: usize,
    sha256_prompt: String,
    /// The reference path first; it chooses the tokens that all are fed.
    paths: Vec<Path>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Path {
    attention: String,
    /// Of each step, the ten likeliest tokens in order.
    top: Vec<Vec<u32>>,
    /// Against the reference path, over all steps.
    max_logit_difference: f32,
    /// Of each step but the first.
    token_seconds: Vec<f64>,
}

/// Those of this crate: candle's own kernel is not on trial.
const PATHS: [AttentionPath; 3] = [
    AttentionPath::Reference,
    AttentionPath::Fused,
    AttentionPath::FusedSharedKv,
];

pub fn steps(quick: bool) -> u64 {
    let chunks = (boundary(quick) - BEFORE).div_ceil(CHUNK) + STEPS;
    (chunks * PATHS.len()) as u64
}

/// Refuses a model that the gates can't run on, before the first of them.
pub fn check(config: &Config, quick: bool) -> Result<()> {
    let needed = boundary(quick) - BEFORE + STEPS;
    if config.max_position_embeddings < needed {
        anyhow::bail!(
            "the model has a context of {} tokens, want at least {needed}",
            config.max_position_embeddings
        );
    }
    if !config
        .layers
        .iter()
        .any(|layer| layer.kind == LayerKind::Full)
    {
        anyhow::bail!("the model has no full-attention layer");
    }
    Ok(())
}

pub fn run(
    settings: &Settings,
    config: &Config,
    model: &Model,
    tokenizer: &Tokenizer,
    progress: &Progress,
) -> Result<Models> {
    let boundary = boundary(settings.quick);
    let prompt = prompt(config, tokenizer, boundary - BEFORE)?;
    let mut paths: Vec<Path> = Vec::new();
    let mut reference: Vec<Vec<f32>> = Vec::new();
    let can_run = |path: &AttentionPath| path.check(config, model.dtype(), model.device()).is_ok();
    for attention in PATHS.into_iter().filter(can_run) {
        let mut cache = model.new_cache(attention)?;
        cache.check_room(prompt.len() + STEPS)?;
        cache.reserve(prompt.len() + STEPS);
        let mut feed = |tokens: &[u32]| -> Result<Vec<f32>> {
            progress.step(format!("{attention} path at {} tokens", cache.len()));
            let input = Tensor::new(tokens, model.device())?.unsqueeze(0)?;
            Ok(model
                .forward(&input, &mut cache)?
                .squeeze(0)?
                .to_vec1::<f32>()?)
        };
        let mut logits = Vec::new();
        for chunk in prompt.chunks(CHUNK) {
            logits = feed(chunk)?;
        }
        let mut path = Path {
            attention: attention.name().to_string(),
            top: vec![],
            max_logit_difference: 0.0,
            token_seconds: vec![],
        };
        for step in 0..STEPS {
            if attention == AttentionPath::Reference {
                reference.push(logits.clone());
            }
            let pairs = logits.iter().zip(&reference[step]);
            let difference = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            path.max_logit_difference = path.max_logit_difference.max(difference);
            path.top.push(top(&logits)?);
            let token = match paths.first() {
                None => path.top[step][0],
                Some(reference) => reference.top[step][0],
            };
            if step + 1 < STEPS {
                let start = Instant::now();
                logits = feed(&[token])?;
                path.token_seconds.push(start.elapsed().as_secs_f64());
            }
        }
        paths.push(path);
    }
    Ok(Models {
        sha256_config: sha256(format!("{config:?}").as_bytes()),
        dtype: model.dtype().as_str().to_string(),
        boundary,
        prompt_tokens: prompt.len(),
        sha256_prompt: sha256(
            &prompt
                .iter()
                .flat_map(|id| id.to_le_bytes())
                .collect::<Vec<_>>(),
        ),
        paths,
    })
}

/// So many tokens of a text, over again where it is too short.
fn prompt(config: &Config, tokenizer: &Tokenizer, len: usize) -> Result<Vec<u32>> {
    let encoding = tokenizer.encode(TEXT, false).map_err(anyhow::Error::msg)?;
    let ids = with_one_bos(encoding.get_ids(), config.bos_token_id);
    let (bos, text) = ids.split_first().context("the text has no tokens")?;
    Ok(std::iter::once(*bos)
        .chain(text.iter().copied().cycle())
        .take(len)
        .collect())
}

/// The likeliest tokens, the likeliest first; of equals the one with the lower id.
fn top(logits: &[f32]) -> Result<Vec<u32>> {
    if let Some(id) = logits.iter().position(|x| !x.is_finite()) {
        anyhow::bail!(
            "the logit of token {id} is {}, want finite logits",
            logits[id]
        );
    }
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    ids.sort_by(|&a, &b| {
        logits[b as usize]
            .total_cmp(&logits[a as usize])
            .then(a.cmp(&b))
    });
    ids.truncate(TOP);
    Ok(ids)
}

impl Models {
    /// Seconds of a token on the reference path, the least over the steps.
    pub fn reference_token_seconds(&self) -> f64 {
        self.paths
            .first()
            .map_or(f64::NAN, |path| crate::ceiling::least(&path.token_seconds))
    }
}

impl Report for Models {
    const GATE: &'static str = "model";

    fn refusals(&self, settings: &Settings) -> Vec<String> {
        let mut refusals = Vec::new();
        let boundary = boundary(settings.quick);
        if (self.boundary, self.prompt_tokens) != (boundary, boundary - BEFORE) {
            refusals.push(format!(
                "ran from {} tokens across {}, want {} across {boundary}",
                self.prompt_tokens,
                self.boundary,
                boundary - BEFORE
            ));
        }
        // In order, without those that the model can't run on.
        let ran = || self.paths.iter().map(|path| path.attention.as_str());
        let mut known = PATHS.map(AttentionPath::name).into_iter();
        let in_order = ran().all(|name| known.any(|other| other == name));
        let least = [AttentionPath::Reference, AttentionPath::Fused].map(AttentionPath::name);
        if !in_order || !least.iter().all(|name| ran().any(|other| other == *name)) {
            refusals.push(format!(
                "ran on {:?}, want at least {least:?}",
                ran().collect::<Vec<_>>()
            ));
        }
        for path in &self.paths {
            let whole = path.top.len() == STEPS
                && path.top.iter().all(|top| top.len() == TOP)
                && path.token_seconds.len() == STEPS - 1;
            if !whole || !(0.0..f32::INFINITY).contains(&path.max_logit_difference) {
                refusals.push(format!(
                    "the {} path did not run {STEPS} steps to the end",
                    path.attention
                ));
            }
        }
        let Some((reference, others)) = self.paths.split_first() else {
            return refusals;
        };
        for path in others {
            let mut steps = path.top.iter().zip(&reference.top);
            let tokens = steps
                .clone()
                .take_while(|(a, b)| a.first() == b.first())
                .count();
            if tokens < LEAST_TOKENS || tokens < STEPS {
                refusals.push(format!(
                    "the {} path says another token than the {} path at step {tokens}",
                    path.attention, reference.attention
                ));
            } else if let Some(step) = steps.position(|(a, b)| a != b) {
                refusals.push(format!("the {} path orders the ten likeliest tokens otherwise at step {step}: {:?}, not {:?}", path.attention, path.top[step], reference.top[step]));
            }
        }
        refusals
    }

    fn summary(&self) -> String {
        let worst = self
            .paths
            .iter()
            .map(|path| path.max_logit_difference)
            .fold(0.0, f32::max);
        format!(
            "{} paths, {STEPS} greedy tokens across {} in {}: same tokens, same ten likeliest in order, logits within {worst:.1e}",
            self.paths.len(),
            self.boundary,
            self.dtype
        )
    }
}
