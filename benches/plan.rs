//! Peak memory of the 31B's shape, with fewer layers, against what [`MemoryPlan`] says; the time to the first token and of the
//! next ones beside it.
//!
//! `cargo bench --bench plan -- [LAYERS [CONTEXT,CONTEXT..]]`; one fresh process a row, since a peak can't be taken back. The
//! vocabulary is whole, so 6 layers in bf16 take 9 GB.

mod args {
    /// The shapes that [`synthetic`](super::synthetic) knows.
    pub enum Shape {
        Gemma31B,
    }
}
#[path = "../examples/gemma4/memory.rs"]
mod memory;
#[path = "../examples/bench/synthetic.rs"]
mod synthetic;

use candle::{DType, Device, Tensor};
use gem::models::gemma4::{AttentionPath, Config, MemoryDemand, MemoryPlan, Model};
use std::process::Command;
use std::time::Instant;

const CHUNK: usize = 512;
const DECODED: usize = 8;
const DTYPE: DType = DType::BF16;
const PATHS: [AttentionPath; 3] = [
    AttentionPath::Reference,
    AttentionPath::Fused,
    AttentionPath::FusedSharedKv,
];
/// Set in the processes that measure one row each: layers, context, path.
const ROW: &str = "GEM_PLAN_BENCH_ROW";

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    if let Ok(row) = std::env::var(ROW) {
        return measure(&row);
    }
    // cargo passes --bench.
    let given: Vec<String> = std::env::args()
        .skip(1)
        .filter(|a| !a.starts_with('-'))
        .collect();
    let layers = given.first().map_or("6", String::as_str);
    let contexts = given.get(1).map_or("2048,4096,8192", String::as_str);
    println!("| context | path | planned MiB | of it activations | peak MiB | plan / peak | first token s | tokens/s |");
    println!("|---:|---|---:|---:|---:|---:|---:|---:|");
    for context in contexts.split(',') {
        for path in PATHS {
            let row = format!("{layers},{context},{path}");
            let output = Command::new(std::env::current_exe()?)
                .env(ROW, row)
                .output()?;
            if !output.status.success() {
                return Err(String::from_utf8_lossy(&output.stderr).into());
            }
            print!("{}", String::from_utf8(output.stdout)?);
        }
    }
    Ok(())
}

/// Prints one row of the table.
fn measure(row: &str) -> Outcome<()> {
    let [layers, context, path] = row.split(',').collect::<Vec<_>>()[..] else {
        return Err(format!("{ROW} is {row}").into());
    };
    let (context, path): (usize, AttentionPath) = (context.parse()?, path.parse()?);
    let config: Config = synthetic::config(args::Shape::Gemma31B, Some(layers.parse()?), None)?;
    let plan = MemoryPlan::new(
        &config,
        &MemoryDemand {
            path,
            dtype: DTYPE,
            on_cpu: true,
            context,
            chunk: CHUNK,
            weight_bytes: None,
            marks: false,
        },
    );
    let model = Model::new(&config, synthetic::weights(DTYPE, &Device::Cpu))?;
    let mut cache = model.new_cache(path)?;
    cache.reserve(context);
    let ids: Vec<u32> = (0..(context - DECODED) as u32)
        .map(|i| i.wrapping_mul(2_654_435_761) % config.vocab_size as u32)
        .collect();
    let start = Instant::now();
    let input = Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?;
    model.prefill(&input, CHUNK, &mut cache)?;
    let first = start.elapsed().as_secs_f64();
    let start = Instant::now();
    for _ in 0..DECODED {
        model.forward(&Tensor::new(&[[7u32]], &Device::Cpu)?, &mut cache)?;
    }
    let rate = DECODED as f64 / start.elapsed().as_secs_f64();
    let peak = memory::peak().ok_or("the system does not tell the peak of this process")?;
    let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
    println!(
        "| {context} | {path} | {:.0} | {:.0} | {:.0} | {:.3} | {first:.1} | {rate:.2} |",
        mib(plan.total()),
        mib(plan.activations),
        mib(peak),
        plan.total() as f64 / peak as f64
    );
    Ok(())
}
