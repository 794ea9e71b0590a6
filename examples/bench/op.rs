//! Tests of attention alone, in the shape of a full-attention layer at decode.

use crate::args::Args;
use crate::measure::{interleave, Arm, Row};
use anyhow::{bail, Result};
use candle::{DType, Device, Tensor};
use gem::attention::gpu::{Route, Tiling};
use gem::attention::reference::{self, Visible};
use gem::attention::{sdpa, RotaryKeys, RotaryTables};
use gem::models::gemma4::{Config, LayerKind};
use gem::AttentionD512;
use std::time::Instant;

/// Gemma's own is 1; with unit-normal inputs this one leaves a softmax that is not one-hot.
const SCALE: f32 = 0.044_194_174;
/// A sample runs the operator until it took so long, so that the clock and the threads do not matter.
const LEAST_SECONDS: f64 = 20e-3;
const MOST_CALLS: usize = 20_000;

/// Heads of a full-attention layer.
#[derive(Clone, Copy)]
pub struct Heads {
    pub q: usize,
    pub kv: usize,
}

impl std::fmt::Display for Heads {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "{} query heads on {} KV heads", self.q, self.kv)
    }
}

impl Heads {
    pub fn of(config: &Config) -> Result<Self> {
        let Some(layer) = config
            .layers
            .iter()
            .find(|layer| layer.kind == LayerKind::Full)
        else {
            bail!("the model has no full-attention layer");
        };
        if layer.head_dim != gem::attention::HEAD_DIM {
            bail!(
                "full-attention layers have head_dim {}, the operator is for {}",
                layer.head_dim,
                gem::attention::HEAD_DIM
            );
        }
        Ok(Self {
            q: config.num_attention_heads,
            kv: layer.num_key_value_heads,
        })
    }
}

/// Attention of one query row by what `name` stands for.
enum Kernel {
    Reference,
    Sdpa,
    Fused(AttentionD512),
    /// Keys rebuilt from values.
    SharedKv,
}

impl Kernel {
    fn named(name: &str) -> Result<Self> {
        let fused = AttentionD512::new(SCALE);
        let tiling = |tokens, heads, stage| {
            Self::Fused(fused.route(Route::Fused(Tiling {
                tokens,
                heads,
                stage,
            })))
        };
        Ok(match name {
            "reference" => Self::Reference,
            "sdpa" => Self::Sdpa,
            "fused" => Self::Fused(fused),
            "fused-kv" => Self::SharedKv,
            "fused-tile8" => tiling(8, 1, true),
            "fused-heads2" => tiling(4, 2, true),
            "fused-direct" => tiling(4, 1, false),
            "fused-matrix" => Self::Fused(fused.route(Route::Matrix)),
            "staged" => Self::Fused(fused.route(Route::Staged)),
            other => match other.strip_prefix("fused-p").map(str::parse) {
                Some(Ok(partitions)) => Self::Fused(fused.partitions(partitions)),
                _ => bail!("no arm of the operator is called {other:?}, --help names them"),
            },
        })
    }

    fn run(&self, q: &Tensor, k: &Tensor, v: &Tensor, keys: &RotaryKeys) -> candle::Result<Tensor> {
        match self {
            Self::Reference => reference::attention(q, k, v, SCALE, Visible::All),
            Self::Sdpa => sdpa::attention(q, k, v, SCALE),
            Self::Fused(op) => op.forward(q, k, v),
            Self::SharedKv => gem::attention_d512_shared_kv(q, v, keys, SCALE),
        }
    }
}

/// Those of Gemma 4: 64 pairs of dimensions turn.
fn rotary_keys(positions: usize, device: &Device) -> candle::Result<RotaryKeys> {
    let dim = gem::attention::HEAD_DIM;
    let frequencies: Vec<f64> = (0..dim / 8)
        .map(|i| 1e6f64.powf(-2.0 * i as f64 / dim as f64))
        .collect();
    let weight = Tensor::ones(dim, DType::F32, device)?;
    RotaryKeys::new(
        &weight,
        &RotaryTables::new(&frequencies, positions, device)?,
    )
}

/// Calls that take as long as a sample should, by doubling them until they do.
fn enough(device: &Device, call: &dyn Fn() -> candle::Result<Tensor>) -> Result<usize> {
    let mut calls = 1;
    loop {
        let start = Instant::now();
        for _ in 0..calls {
            call()?;
        }
        device.synchronize()?;
        let seconds = start.elapsed().as_secs_f64();
        if seconds >= LEAST_SECONDS || calls >= MOST_CALLS {
            return Ok(calls);
        }
        // Not much further than it takes: the first calls are the slowest.
        let wanted = (1.2 * LEAST_SECONDS / seconds * calls as f64).ceil() as usize;
        calls = wanted.clamp(calls + 1, MOST_CALLS);
    }
}

pub fn run(
    args: &Args,
    heads: Heads,
    dtype: DType,
    device: &Device,
    progress: &dyn Fn(String),
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let kernels = args
        .attention
        .iter()
        .map(|name| Ok((name.clone(), Kernel::named(name)?)))
        .collect::<Result<Vec<_>>>()?;
    for (name, kernel) in &kernels {
        if matches!(kernel, Kernel::Sdpa) {
            sdpa::check_device(device, dtype, gem::attention::HEAD_DIM)?;
        }
        if device.is_cpu() && GPU_ONLY.contains(&name.as_str()) {
            bail!("{name}: not on this device, it names kernels of a GPU");
        }
    }
    if args.len.contains(&0) {
        bail!("--len is 0, want at least one key");
    }
    for &len in &args.len {
        let random = |heads, len| {
            Tensor::randn(0f32, 1.0, (1, heads, len, gem::attention::HEAD_DIM), device)?
                .to_dtype(dtype)
        };
        let (q, k, v) = (
            random(heads.q, 1)?,
            random(heads.kv, len)?,
            random(heads.kv, len)?,
        );
        let bytes = 2 * (k.elem_count() * dtype.size_in_bytes()) as u64;
        let keys = rotary_keys(len, device)?;
        let mut arms = Vec::new();
        for (name, kernel) in &kernels {
            let (q, k, v, keys) = (&q, &k, &v, &keys);
            let kv_bytes = match kernel {
                Kernel::SharedKv => bytes / 2 + keys.tables().bytes() as u64,
                _ => bytes,
            };
            let row_bytes = (q.elem_count() * dtype.size_in_bytes()) as u64;
            let mut calls = None;
            arms.push(Arm {
                name: name.clone(),
                bytes: Some(kv_bytes),
                planned_bytes: kv_bytes + 2 * row_bytes,
                held_bytes: device.is_cpu().then_some(kv_bytes + row_bytes),
                run: Box::new(move || {
                    let call = || kernel.run(q, k, v, keys).map(std::hint::black_box);
                    // The first sample warms up and says how many calls the others make.
                    let calls = match calls {
                        Some(calls) => calls,
                        None => *calls.insert(enough(device, &call)?),
                    };
                    let start = Instant::now();
                    for _ in 0..calls {
                        call()?;
                    }
                    device.synchronize()?;
                    Ok(start.elapsed().as_secs_f64() / calls as f64)
                }),
            });
        }
        let step = |arm: &str| progress(format!("attention over {len} keys, {arm}"));
        rows.extend(interleave(
            "attention",
            len,
            1,
            arms,
            args.repetitions,
            step,
        )?);
    }
    Ok(rows)
}

const GPU_ONLY: [&str; 5] = [
    "fused-tile8",
    "fused-heads2",
    "fused-direct",
    "fused-matrix",
    "staged",
];
