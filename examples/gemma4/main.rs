//! Gemma 4 on candle's plain ops or on the fused ops of this crate; `--help` tells the rest.

mod ab;
mod args;
mod checkpoint;
mod memory;
mod prompt;
mod report;
mod run;
mod source;
mod stream;

use anyhow::{bail, Context, Result};
use args::Args;
use candle::utils::{cuda_is_available, metal_is_available};
use candle::{DType, Device};
use checkpoint::Checkpoint;
use clap::Parser;
use gem::models::gemma4::{AttentionPath, Cache, Model};
use memory::human;
use std::io::Write;
use std::time::Instant;

fn main() -> Result<()> {
    let args = Args::parse();
    let _trace = args.tracing.then(start_trace).transpose()?;
    if args.list_devices {
        return list_devices();
    }
    let device = device(&args)?;
    device.with_context(|| run(&args, &device))
}

fn run(args: &Args, device: &Device) -> Result<()> {
    let prompt = source::read(args)?;
    let Checkpoint {
        config,
        mut tokenizer,
        stop,
        weights,
    } = Checkpoint::open(&args.model)?;
    let ids = prompt.encode(&mut tokenizer, config.bos_token_id)?;
    let stop = prompt
        .stop(&tokenizer)
        .into_iter()
        .fold(stop, |stop, id| stop.with(id));
    let dtype = match args.dtype {
        Some(dtype) => dtype.into(),
        None if device.is_cpu() => DType::F32,
        None => DType::BF16,
    };
    let limit = args.max_context.unwrap_or(config.max_position_embeddings);
    if ids.len() > limit {
        bail!(
            "the prompt has {} tokens, want at most the context of {limit}",
            ids.len()
        );
    }
    let context = run::planned_context(args, ids.len()).min(limit);
    let path = args.attention.unwrap_or_default();
    if args.ab {
        ab::say_what_is_left_out(&config, dtype, device);
    } else {
        path.check(&config, dtype, device)?;
    }
    let report = args
        .json
        .as_deref()
        .map(report::Destination::open)
        .transpose()?;
    let shapes = config.tensor_shapes();
    if !args.quiet {
        let elements: usize = shapes
            .iter()
            .map(|(_, shape)| shape.iter().product::<usize>())
            .sum();
        // A comparison holds the caches of every path at once.
        let paths = match args.ab {
            true => AttentionPath::available(&config, dtype, device),
            false => vec![path],
        };
        let (mut sliding, mut full, mut tables) = (0, 0, 0);
        for path in paths {
            let bytes = Cache::planned_bytes(&config, path, context, dtype);
            (sliding, full) = (sliding + bytes.0, full + bytes.1);
            tables += Cache::planned_table_bytes(&config, path, context);
        }
        let tables = match tables {
            0 => String::new(),
            bytes => format!(", rotary tables {}", human(bytes as u64)),
        };
        eprintln!(
            "planned memory: weights {}, caches {} ({} of it in full layers){tables} for {} tokens, {dtype:?}",
            human((elements * dtype.size_in_bytes()) as u64),
            human((sliding + full) as u64),
            human(full as u64),
            context
        );
    }
    let start = Instant::now();
    let model = Model::new(&config, weights.var_builder(dtype, device))?;
    if !args.quiet {
        eprintln!(
            "loaded {} tensors in {:.2} s",
            shapes.len(),
            start.elapsed().as_secs_f64()
        );
    }
    if args.ab {
        let comparison = ab::compare(&model, &ids, &stop, args)?;
        if !args.json_replaces_text() {
            write!(std::io::stdout(), "{}", comparison.table())?;
        }
        if let Some(report) = report {
            report.write(&report::comparison_json(&model, &comparison))?;
        }
        return Ok(());
    }
    let run = run::run(&model, &tokenizer, &ids, &stop, path, args)?;
    if let Some(report) = report {
        report.write(&report::run_json(&model, &run))?;
    }
    if !args.quiet {
        report::print(&run);
    }
    Ok(())
}

fn device(args: &Args) -> Result<Device> {
    if args.cpu {
        Ok(Device::Cpu)
    } else if cuda_is_available() {
        Ok(Device::new_cuda(0)?)
    } else if metal_is_available() {
        Ok(Device::new_metal(0)?)
    } else {
        Ok(Device::Cpu)
    }
}

fn list_devices() -> Result<()> {
    let mut out = std::io::stdout();
    writeln!(out, "cpu ({} threads)", candle::utils::get_num_threads())?;
    if cuda_is_available() {
        writeln!(out, "cuda:0")?;
    }
    if metal_is_available() {
        writeln!(out, "metal:0")?;
    }
    Ok(())
}

/// Spans go to the trace until the guard is dropped at the end of the program.
fn start_trace() -> Result<tracing_chrome::FlushGuard> {
    use tracing_subscriber::prelude::*;
    let name = format!("trace-gemma4-{}.json", std::process::id());
    let file = std::fs::File::create(&name).with_context(|| name.clone())?;
    eprintln!("tracing to {name}");
    let (layer, guard) = tracing_chrome::ChromeLayerBuilder::new()
        .writer(file)
        .build();
    tracing_subscriber::registry().with(layer).init();
    Ok(guard)
}
