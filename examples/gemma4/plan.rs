//! What a run will take of memory, said and judged before a weight is read.

use crate::args::Args;
use crate::memory::human;
use anyhow::{bail, Result};
use candle::{DType, Device};
use gem::models::gemma4::{AttentionPath, Config, MemoryDemand, MemoryPlan};
use std::io::Write;

const CONTEXTS: [usize; 4] = [8192, 32_768, 131_072, 262_144];

#[derive(Debug, Clone, clap::Args)]
pub struct PlanArgs {
    /// Print the memory that contexts of 8K to 262K tokens take on each path, and load nothing; needs config.json alone. With
    /// --chat and no prompt, what a conversation copies of the sliding caches is counted with them.
    #[arg(long, conflicts_with_all = ["json", "ab"])]
    pub plan: bool,

    /// Memory that the run may take [default: what the machine has available].
    #[arg(long, value_name = "GIB", value_parser = positive)]
    pub memory_limit: Option<f64>,
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(x) if x.is_finite() && x > 0.0 => Ok(x),
        _ => Err("want a positive number of GiB".into()),
    }
}

/// What `args` ask for, and the paths whose caches are held at once: a comparison's are all.
///
/// # Errors
///
/// A path that the device or the type does not have.
pub fn demand(
    args: &Args,
    config: &Config,
    dtype: DType,
    device: &Device,
    context: usize,
    weight_bytes: Option<u64>,
) -> Result<(MemoryDemand, Vec<AttentionPath>)> {
    let demand = asked(args, dtype, device, context, weight_bytes);
    let paths = match args.ab {
        true => AttentionPath::available(config, dtype, device),
        false => {
            demand.path.check(config, dtype, device)?;
            vec![demand.path]
        }
    };
    Ok((demand, paths))
}

fn asked(
    args: &Args,
    dtype: DType,
    device: &Device,
    context: usize,
    weight_bytes: Option<u64>,
) -> MemoryDemand {
    MemoryDemand {
        path: args.attention.unwrap_or_default(),
        dtype,
        on_cpu: device.is_cpu(),
        context,
        chunk: args.prefill_chunk,
        weight_bytes,
        marks: args.converses(),
    }
}

/// The table of `--plan`, by context and path.
pub fn print_table(
    args: &Args,
    config: &Config,
    dtype: DType,
    device: &Device,
    weight_bytes: Option<u64>,
) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let demand = |path, context| MemoryDemand {
        path,
        ..asked(args, dtype, device, context, weight_bytes)
    };
    writeln!(
        out,
        "| context | path | weights | sliding caches | full caches | rotary tables | activations | total |\n|---:|---|---:|---:|---:|---:|---:|---:|"
    )?;
    let most = args.max_context.unwrap_or(config.max_position_embeddings);
    let mut contexts: Vec<usize> = CONTEXTS.into_iter().filter(|&n| n <= most).collect();
    if args.max_context.is_some() || contexts.is_empty() {
        contexts.push(most.min(config.max_position_embeddings));
        contexts.dedup();
    }
    let paths = AttentionPath::available(config, dtype, device);
    for context in contexts {
        for &path in &paths {
            let plan = MemoryPlan::new(config, &demand(path, context));
            writeln!(
                out,
                "| {context} | {path} | {} | {} | {} | {} | {} | {} |",
                human(plan.weights),
                human(plan.sliding_caches + plan.marks),
                human(plan.full_caches),
                human(plan.rotary_tables),
                human(plan.activations),
                human(plan.total())
            )?;
        }
    }
    if let Some(limit) = limit(args, device) {
        for &path in &paths {
            match MemoryPlan::largest_context(config, &demand(path, 1), limit) {
                Some(most) => writeln!(out, "\n{path}: {most} tokens fit into {}", human(limit))?,
                None => writeln!(out, "\n{path}: does not fit into {}", human(limit))?,
            }
        }
    }
    Ok(())
}

/// One line about `paths`, whose caches are held at once.
pub fn line(config: &Config, demand: &MemoryDemand, paths: &[AttentionPath]) -> String {
    let plan = joined(config, demand, paths);
    let tables = match plan.rotary_tables {
        0 => String::new(),
        bytes => format!(", rotary tables {}", human(bytes)),
    };
    let marks = match plan.marks {
        0 => String::new(),
        bytes => format!(", {} copied to go back to", human(bytes)),
    };
    format!(
        "planned memory: weights {}, caches {} ({} of it in full layers{marks}){tables}, activations {} for {} tokens, {:?}",
        human(plan.weights),
        human(plan.sliding_caches + plan.marks + plan.full_caches),
        human(plan.full_caches),
        human(plan.activations),
        demand.context,
        demand.dtype
    )
}

/// Refuses a run that can't fit, and says what would.
pub fn check(
    args: &Args,
    config: &Config,
    demand: &MemoryDemand,
    paths: &[AttentionPath],
    device: &Device,
) -> Result<()> {
    let Some(limit) = limit(args, device) else {
        return Ok(());
    };
    let need = joined(config, demand, paths).total();
    if need <= limit {
        return Ok(());
    }
    let mut text = format!(
        "{} tokens need {}, {} is there",
        demand.context,
        human(need),
        human(limit)
    );
    // A comparison has no one path to give advice on.
    if let [path] = paths {
        text += &match MemoryPlan::largest_context(config, demand, limit) {
            Some(most) => format!("\n  the {path} path has room for {most} tokens: --max-context {most} and a prompt within it"),
            None => format!("\n  no context fits: the weights are {}", human(joined(config, demand, paths).weights)),
        };
        let mut others: Vec<(u64, String)> = Vec::new();
        for other in AttentionPath::available(config, demand.dtype, device) {
            let demand = MemoryDemand {
                path: other,
                ..*demand
            };
            others.push((
                MemoryPlan::new(config, &demand).total(),
                format!("--attention {other}"),
            ));
        }
        // Quantized weights do not shrink with the type of the products.
        if demand.dtype == DType::F32 {
            let demand = MemoryDemand {
                dtype: DType::BF16,
                ..*demand
            };
            others.push((
                MemoryPlan::new(config, &demand).total(),
                "--dtype bf16".to_string(),
            ));
        }
        for (bytes, flag) in others.iter().filter(|(bytes, _)| *bytes < need) {
            text += &format!("\n  {flag} needs {}", human(*bytes));
        }
    }
    text += "\n  --memory-limit GIB overrides what is there";
    bail!(text)
}

/// One model, the caches of every path, and the activations of the one that holds most.
fn joined(config: &Config, demand: &MemoryDemand, paths: &[AttentionPath]) -> MemoryPlan {
    let plans = paths
        .iter()
        .map(|&path| MemoryPlan::new(config, &MemoryDemand { path, ..*demand }));
    let both = |a: MemoryPlan, b: MemoryPlan| MemoryPlan {
        weights: a.weights,
        sliding_caches: a.sliding_caches + b.sliding_caches,
        marks: a.marks + b.marks,
        full_caches: a.full_caches + b.full_caches,
        rotary_tables: a.rotary_tables + b.rotary_tables,
        activations: a.activations.max(b.activations),
    };
    plans
        .reduce(both)
        .unwrap_or_else(|| MemoryPlan::new(config, demand))
}

/// Bytes that a run may take; `None` where the system does not tell.
fn limit(args: &Args, device: &Device) -> Option<u64> {
    match args.plan.memory_limit {
        Some(gib) => Some((gib * (1u64 << 30) as f64) as u64),
        // Apple GPUs share the memory of the machine; nothing here asks an NVIDIA GPU.
        None if device.is_cuda() => None,
        None => available(),
    }
}

/// What can be had without swapping.
#[cfg(target_os = "linux")]
fn available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

/// All memory of the machine: macOS does not tell what it could free.
#[cfg(target_os = "macos")]
fn available() -> Option<u64> {
    let output = std::process::Command::new("/usr/sbin/sysctl")
        .args(["-n", "hw.memsize"])
        .output()
        .ok()?;
    String::from_utf8(output.stdout).ok()?.trim().parse().ok()
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn available() -> Option<u64> {
    None
}
