//! Interleaved A/B runner of the fused projection: as `--bench ab`, on the same statistics.
//!
//! `cargo bench --bench ab_projection -- --help`. In a decode every weight comes from memory, since the rest of the model has
//! passed through the caches in between; so with `--cold` the runs go round as many copies as no cache holds.

#[path = "../ab/quantiles.rs"]
mod quantiles;
#[path = "../ab/read.rs"]
mod read;
#[path = "../ab/samples.rs"]
mod samples;

use std::cell::Cell;
use std::rc::Rc;

use anyhow::{bail, ensure, Context, Result};
use candle::{DType, Device, Tensor};
use clap::Parser;
use gem::projection::CpuKernel;
use gem::FusedProjection;
use serde::Serialize;

use samples::{interleave, timed, Arm, Origin, Run};

/// Bytes of weights to go round with `--cold`: more than a third-level cache.
const COLD_BYTES: usize = 160 << 20;

#[derive(Parser, Debug)]
#[command(about = "Compares a fused projection with separate ones, in interleaved rounds")]
struct Args {
    /// Arms: limit (reading the weights), fused, fused-avx512, fused-avx2, fused-portable, separate (the op on each block), candle (one matmul on the packed weight, result in its type), candle-separate, candle-f32 (as candle, weights widened in the call where they are half precision).
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "limit,fused,separate,candle,candle-separate"
    )]
    arms: Vec<String>,
    /// Element type of xs and weights.
    #[arg(long, value_delimiter = ',', default_value = "f32,f16,bf16")]
    dtype: Vec<String>,
    /// Rows of xs.
    #[arg(long, value_delimiter = ',', default_value = "1,8,256,2048")]
    rows: Vec<usize>,
    /// Rows of each block, joined by +; several cases separated by commas.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "512+512+128,512+512+128+512"
    )]
    blocks: Vec<String>,
    #[arg(long, default_value_t = 2560)]
    hidden: usize,
    /// Weights come from memory, not from a cache.
    #[arg(long)]
    cold: bool,
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// Writes every sample here.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
    /// What cargo bench passes, and cargo test does not.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Serialize)]
struct Receipt {
    #[serde(flatten)]
    origin: Origin,
    cases: Vec<Case>,
}

#[derive(Serialize)]
struct Case {
    dtype: String,
    rows: usize,
    blocks: String,
    hidden: usize,
    weight_bytes: usize,
    copies: usize,
    arms: Vec<Arm>,
}

fn main() -> Result<()> {
    let args = Args::parse();
    if !args.bench {
        return samples::check_statistics();
    }
    let mut receipt = Receipt {
        origin: Origin::of("ab_projection"),
        cases: Vec::new(),
    };
    println!("| dtype | rows | blocks | hidden | arm | median ms | least ms | ± % | GB/s | GFLOP/s | x limit | x fused |");
    println!("|---|---:|---|---:|---|---:|---:|---:|---:|---:|---:|---:|");
    for dtype in &args.dtype {
        for blocks in &args.blocks {
            for rows in &args.rows {
                let case = measure(&args, dtype, blocks, *rows)?;
                case.print();
                receipt.cases.push(case);
            }
        }
    }
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&receipt)? + "\n";
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// One copy of the weights.
struct Weights {
    packed: FusedProjection,
    separate: Vec<FusedProjection>,
}

fn measure(args: &Args, dtype: &str, blocks: &str, rows: usize) -> Result<Case> {
    let of_type = match dtype {
        "f32" => DType::F32,
        "f16" => DType::F16,
        "bf16" => DType::BF16,
        other => bail!("unknown dtype {other}, want f32, f16 or bf16"),
    };
    let sizes: Vec<usize> = blocks
        .split('+')
        .map(|rows| rows.parse().with_context(|| format!("blocks {blocks}")))
        .collect::<Result<_>>()?;
    let weight_bytes = sizes.iter().sum::<usize>() * args.hidden * of_type.size_in_bytes();
    ensure!(weight_bytes > 0, "blocks {blocks} are empty");
    let copies = match args.cold {
        true => COLD_BYTES.div_ceil(weight_bytes).max(2),
        false => 1,
    };
    let random = |rows, scale| {
        Tensor::randn(0f32, scale, (rows, args.hidden), &Device::Cpu)?.to_dtype(of_type)
    };
    let mut all = Vec::with_capacity(copies);
    for _ in 0..copies {
        let blocks = sizes
            .iter()
            .map(|rows| random(*rows, 0.02))
            .collect::<candle::Result<Vec<_>>>()?;
        let names: Vec<String> = (0..blocks.len()).map(|i| i.to_string()).collect();
        let named: Vec<_> = names.iter().map(String::as_str).zip(&blocks).collect();
        let alone = |block: &(&str, &Tensor)| FusedProjection::pack(&[*block]);
        all.push(Weights {
            packed: FusedProjection::pack(&named)?,
            separate: named.iter().map(alone).collect::<candle::Result<_>>()?,
        });
    }
    let (all, xs) = (Rc::new(all), random(rows, 1.0)?);
    let mut runs = Vec::new();
    for name in &args.arms {
        let run = arm(name, all.clone(), xs.clone()).with_context(|| format!("arm {name}"))?;
        runs.push((Arm::new(name), run));
    }
    interleave(&mut runs, args.rounds, 20e-3)?;
    Ok(Case {
        dtype: dtype.to_string(),
        rows,
        blocks: blocks.to_string(),
        hidden: args.hidden,
        weight_bytes,
        copies,
        arms: runs.into_iter().map(|(arm, _)| arm).collect(),
    })
}

fn arm(name: &str, all: Rc<Vec<Weights>>, xs: Tensor) -> Result<Run> {
    let turn = Cell::new(0);
    // A copy after the other; an arm goes on where it stopped, while others have used the caches.
    let each = move |f: fn(&Weights, &Tensor) -> Result<()>| {
        timed(move || {
            turn.set((turn.get() + 1) % all.len());
            f(&all[turn.get()], &xs)
        })
    };
    fn done<T>(value: T) -> Result<()> {
        std::hint::black_box(value);
        Ok(())
    }
    fn on(kernel: CpuKernel, w: &Weights, xs: &Tensor) -> Result<()> {
        done(w.packed.clone().cpu_kernel(kernel).forward(xs)?)
    }
    fn matmul(w: &FusedProjection, xs: &Tensor) -> Result<()> {
        done(xs.matmul(&w.weight().t()?)?)
    }
    Ok(match name {
        "limit" => each(|w, _| read::read(w.packed.weight())),
        "fused" => each(|w, xs| done(w.packed.forward(xs)?)),
        "fused-avx512" => each(|w, xs| on(CpuKernel::Avx512, w, xs)),
        "fused-avx2" => each(|w, xs| on(CpuKernel::Avx2, w, xs)),
        "fused-portable" => each(|w, xs| on(CpuKernel::Portable, w, xs)),
        "separate" => each(|w, xs| {
            w.separate
                .iter()
                .try_for_each(|block| done(block.forward(xs)?))
        }),
        "candle" => each(|w, xs| matmul(&w.packed, xs)),
        "candle-separate" => each(|w, xs| w.separate.iter().try_for_each(|w| matmul(w, xs))),
        "candle-f32" => each(|w, xs| {
            let weight = w.packed.weight().to_dtype(DType::F32)?;
            done(xs.to_dtype(DType::F32)?.matmul(&weight.t()?)?)
        }),
        other => bail!("unknown arm {other}"),
    })
}

impl Case {
    fn print(&self) {
        let bytes = self.weight_bytes as f64;
        for arm in &self.arms {
            let ratio = |to: &str| match self.arms.iter().find(|arm| arm.name == to) {
                Some(to) => format!("{:.2}", arm.ratio(to)),
                None => String::new(),
            };
            let elements = bytes / if self.dtype == "f32" { 4.0 } else { 2.0 };
            println!(
                "| {} | {} | {} | {} | {} | {:.4} | {:.4} | {:.1} | {:.1} | {:.1} | {} | {} |",
                self.dtype,
                self.rows,
                self.blocks,
                self.hidden,
                arm.name,
                arm.median(),
                arm.quantile(0.0),
                100.0 * arm.spread(),
                bytes / arm.median() / 1e6,
                2.0 * self.rows as f64 * elements / arm.median() / 1e6,
                ratio("limit"),
                ratio("fused"),
            );
        }
    }
}
