//! Interleaved A/B runner: every arm once per round, the order reversed every other round, medians, spread and ratios.
//!
//! `cargo bench --bench ab -- --help`. Criterion (`cargo bench --bench attention`) measures one arm after the other, which
//! a machine that others use too does not allow to compare; this does. `cargo test --bench ab` measures nothing, but checks the
//! medians and quartiles.

mod arms;
mod plot;
mod quantiles;
mod read;
mod report;
mod samples;

use anyhow::{Context, Result};
use candle::DType;
use clap::Parser;

use report::{Case, Receipt};
use samples::Arm;

#[derive(Parser, Debug)]
#[command(about = "Compares attention at head_dim 512 between arms, in interleaved rounds")]
struct Args {
    /// Arms: limit (reading K and V), limit-v (reading V), products (multiply-adds alone), fused, fused-kv (values alone, keys rebuilt), fused-aligned, fused-avx512, fused-avx2, fused-portable, fused-pN (N partitions), grouped, repeat_kv, torch, torch-sdpa.
    #[arg(long, value_delimiter = ',', default_value = "limit,fused,grouped")]
    arms: Vec<String>,
    /// Element type of q, K and V.
    #[arg(long, value_delimiter = ',', default_value = "f32,f16,bf16")]
    dtype: Vec<String>,
    /// Keys.
    #[arg(long, value_delimiter = ',', default_value = "1024,8192,65536")]
    len: Vec<usize>,
    /// Query rows: 1 for decode, 0 for as many as keys.
    #[arg(long, default_value_t = 1)]
    q_len: usize,
    #[arg(long, default_value_t = 32)]
    q_heads: usize,
    #[arg(long, default_value_t = 4)]
    kv_heads: usize,
    #[arg(long, default_value_t = 1)]
    batch: usize,
    #[arg(long, default_value_t = 15)]
    rounds: usize,
    /// A Python with torch, for the torch arms.
    #[arg(long, default_value = "python3")]
    python: String,
    /// Writes every sample here.
    #[arg(long)]
    json: Option<std::path::PathBuf>,
    /// Measures nothing, but draws the receipts given here into this folder.
    #[arg(long, requires = "receipts")]
    plot: Option<std::path::PathBuf>,
    #[arg(long, value_delimiter = ',')]
    receipts: Vec<std::path::PathBuf>,
    /// What cargo bench passes, and cargo test does not.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(folder) = &args.plot {
        let receipts: Vec<Receipt> = args
            .receipts
            .iter()
            .map(|path| Receipt::read(path))
            .collect::<Result<_>>()?;
        return plot::draw(&receipts, folder);
    }
    if !args.bench {
        return samples::check_statistics();
    }
    let mut receipt = Receipt::new();
    println!("{}", report::HEADER);
    for dtype in &args.dtype {
        for len in &args.len {
            let case = measure(&args, dtype, *len)?;
            case.print();
            receipt.cases.push(case);
        }
    }
    if let Some(path) = &args.json {
        receipt.write(path)?;
    }
    Ok(())
}

fn measure(args: &Args, dtype: &str, len: usize) -> Result<Case> {
    let shape = arms::Shape {
        dtype: match dtype {
            "f32" => DType::F32,
            "f16" => DType::F16,
            "bf16" => DType::BF16,
            other => anyhow::bail!("unknown dtype {other}, want f32, f16 or bf16"),
        },
        batch: args.batch,
        q_heads: args.q_heads,
        kv_heads: args.kv_heads,
        q_len: if args.q_len == 0 { len } else { args.q_len },
        kv_len: len,
    };
    let inputs = arms::Inputs::new(shape)?;
    let mut runs = Vec::new();
    for name in &args.arms {
        let run = arms::arm(name, &inputs, &args.python).with_context(|| format!("arm {name}"))?;
        runs.push((Arm::new(name), run));
    }
    samples::interleave(&mut runs, args.rounds, 20e-3)?;
    Ok(Case {
        dtype: dtype.to_string(),
        batch: shape.batch,
        q_heads: shape.q_heads,
        kv_heads: shape.kv_heads,
        q_len: shape.q_len,
        kv_len: shape.kv_len,
        kv_bytes: shape.kv_bytes(),
        arms: runs.into_iter().map(|(arm, _)| arm).collect(),
    })
}
