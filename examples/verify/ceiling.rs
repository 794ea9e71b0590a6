//! Gate 5: what full attention can give at all: its share of a token on plain ops, from stage times of this machine.

use crate::model::Models;
use crate::receipt::{Report, Settings};
use crate::Progress;
use anyhow::Result;
use candle::{DType, Device, Tensor};
use gem::attention::reference::{self, Visible};
use gem::models::gemma4::{Config, LayerConfig, LayerKind, Model};
use serde::{Deserialize, Serialize};
use std::time::Instant;

/// The gain of a whole token that is worth a change.
const GAIN: f64 = 0.03;
const RUNS: usize = 7;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ceiling {
    gain: f64,
    full_layers: usize,
    /// Measured in gate 4, at `measured_at` tokens.
    token_ms: f64,
    measured_at: usize,
    contexts: Vec<Context>,
}

#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Context {
    tokens: usize,
    /// Of one layer, plain ops: the least of some runs.
    attention_ms: f64,
    scores_ms: f64,
    softmax_ms: f64,
    values_ms: f64,
    /// The measured token, with its attention replaced by that of so many tokens.
    token_ms: f64,
    /// Of full attention in such a token.
    share: f64,
    /// Cut of full attention that makes the token faster by `gain`.
    cut_for_gain: f64,
}

fn contexts(quick: bool) -> &'static [usize] {
    match quick {
        true => &[1024, 8192],
        false => &[8192, 65_536, 131_072],
    }
}

pub fn steps(quick: bool) -> u64 {
    contexts(quick).len() as u64
}

/// The least of what was measured. Times are subtracted that were not taken together, and what else a machine does only adds to
/// them: the least are those that it added least to.
pub fn least(seconds: &[f64]) -> f64 {
    seconds.iter().copied().reduce(f64::min).unwrap_or(f64::NAN)
}

/// The least of `RUNS` runs after one that warms up, in milliseconds.
fn timed(device: &Device, f: impl Fn() -> candle::Result<Tensor>) -> Result<f64> {
    let mut seconds = Vec::with_capacity(RUNS);
    for run in 0..=RUNS {
        let start = Instant::now();
        std::hint::black_box(f()?);
        device.synchronize()?;
        if run > 0 {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    Ok(least(&seconds) * 1e3)
}

pub fn run(
    settings: &Settings,
    config: &Config,
    model: &Model,
    models: &Models,
    progress: &Progress,
) -> Result<Ceiling> {
    let full: Vec<&LayerConfig> = config
        .layers
        .iter()
        .filter(|layer| layer.kind == LayerKind::Full)
        .collect();
    let Some(layer) = full.first() else {
        anyhow::bail!("the model has no full-attention layer");
    };
    let measured_at = models.boundary;
    let token_ms = models.reference_token_seconds() * 1e3;
    let here = stages(config, layer, model, measured_at)?;
    let mut measured = Vec::new();
    for &tokens in contexts(settings.quick) {
        progress.step(format!("stage times at {tokens} tokens"));
        let mut context = match tokens == measured_at {
            true => here.clone(),
            false => stages(config, layer, model, tokens)?,
        };
        let layers = full.len() as f64;
        context.token_ms = token_ms + layers * (context.attention_ms - here.attention_ms);
        context.share = layers * context.attention_ms / context.token_ms;
        context.cut_for_gain = GAIN / context.share;
        measured.push(context);
    }
    Ok(Ceiling {
        gain: GAIN,
        full_layers: full.len(),
        token_ms,
        measured_at,
        contexts: measured,
    })
}

/// Stage times of one full-attention layer for one token.
fn stages(config: &Config, layer: &LayerConfig, model: &Model, tokens: usize) -> Result<Context> {
    let (heads, kv_heads, dim) = (
        config.num_attention_heads,
        layer.num_key_value_heads,
        layer.head_dim,
    );
    let device = model.device();
    let random = |heads, len| -> candle::Result<Tensor> {
        Tensor::randn(0f32, 1.0, (1, heads, len, dim), device)?.to_dtype(model.dtype())
    };
    let (q, k, v) = (
        random(heads, 1)?,
        random(kv_heads, tokens)?,
        random(kv_heads, tokens)?,
    );
    let rows = q.reshape((1, kv_heads, heads / kv_heads, dim))?;
    let keys = k.transpose(2, 3)?;
    let scores = rows.matmul(&keys)?.to_dtype(DType::F32)?;
    let weights = candle_nn::ops::softmax_last_dim(&scores)?.to_dtype(model.dtype())?;
    Ok(Context {
        tokens,
        attention_ms: timed(device, || {
            reference::attention(&q, &k, &v, 1.0, Visible::All)
        })?,
        scores_ms: timed(device, || rows.matmul(&keys))?,
        softmax_ms: timed(device, || candle_nn::ops::softmax_last_dim(&scores))?,
        values_ms: timed(device, || weights.matmul(&v))?,
        token_ms: 0.0,
        share: 0.0,
        cut_for_gain: 0.0,
    })
}

impl Report for Ceiling {
    const GATE: &'static str = "ceiling";

    fn refusals(&self, settings: &Settings) -> Vec<String> {
        let mut refusals = Vec::new();
        let time = |ms: f64| ms.is_finite() && ms > 0.0;
        if self.gain != GAIN || self.full_layers == 0 || !time(self.token_ms) {
            refusals.push(format!(
                "{} full layers and a token of {} ms say nothing about a gain of {GAIN}",
                self.full_layers, self.token_ms
            ));
        }
        if !self
            .contexts
            .iter()
            .map(|context| &context.tokens)
            .eq(contexts(settings.quick))
        {
            refusals.push(format!(
                "was not measured at {:?}",
                contexts(settings.quick)
            ));
        }
        for c in &self.contexts {
            let measured = [
                c.attention_ms,
                c.scores_ms,
                c.softmax_ms,
                c.values_ms,
                c.token_ms,
            ];
            let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b.abs();
            let follows = close(
                c.share,
                self.full_layers as f64 * c.attention_ms / c.token_ms,
            ) && close(c.cut_for_gain, GAIN / c.share);
            if !measured.into_iter().all(time) || !(0.0..1.0).contains(&c.share) || !follows {
                refusals.push(format!("the stage times at {} tokens do not fit each other: {:.4} ms of attention in {} layers, a token of {:.4} ms", c.tokens, c.attention_ms, self.full_layers, c.token_ms));
            }
        }
        refusals
    }

    fn summary(&self) -> String {
        let parts: Vec<String> = self
            .contexts
            .iter()
            .map(|c| {
                let cut = match c.cut_for_gain {
                    cut if cut <= 1.0 => format!("a cut of {:.1} % of it", 100.0 * cut),
                    _ => "no cut of it".to_string(),
                };
                format!(
                    "at {} tokens {:.1} % of a token, {cut} gains 3 %",
                    c.tokens,
                    100.0 * c.share
                )
            })
            .collect();
        format!("full attention on plain ops: {}", parts.join("; "))
    }
}
