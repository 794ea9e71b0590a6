//! How fast attention paths are against each other, on this machine; `--help` tells the rest.

#[macro_use]
#[path = "../gemma4/say.rs"]
mod say;

mod admit;
mod args;
#[path = "../gemma4/bounded_file.rs"]
mod bounded_file;
#[path = "../gemma4/checkpoint.rs"]
mod checkpoint;
#[path = "../gemma4/guard.rs"]
mod guard;
mod measure;
#[path = "../gemma4/memory.rs"]
mod memory;
mod model;
mod op;
mod peak;
mod plot;
#[path = "../../benches/ab/quantiles.rs"]
mod quantiles;
#[path = "../gemma4/replace.rs"]
mod replace;
mod report;
mod synthetic;

use anyhow::Result;
use args::{Args, Shape};
use candle::{DType, Device};
use checkpoint::Checkpoint;
use clap::Parser;
use gem::models::gemma4::{Config, Model};
use indicatif::{ProgressBar, ProgressStyle};
use report::Setting;
use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    args.check()?;
    let plot = args
        .plot
        .as_deref()
        .map(plot::Destination::open)
        .transpose()?;
    let device = gem::device::choose(args.cpu)?;
    let dtype = match args.dtype {
        Some(dtype) => dtype.into(),
        None if device.is_cpu() => DType::F32,
        None => DType::BF16,
    };
    let source = Source::open(&args)?;
    let mut setting = setting(&args, &source, &device, dtype);
    let bar = ProgressBar::new_spinner();
    bar.set_style(ProgressStyle::with_template("{spinner} {msg}, {elapsed}")?);
    bar.enable_steady_tick(Duration::from_millis(200));
    let progress = |what: String| bar.set_message(what);
    let rows = match args.op {
        Some(args::Op::Attention) => {
            let heads = op::Heads::of(source.config())?;
            setting.model = heads.to_string();
            op::run(&args, heads, dtype, &device, &progress)?
        }
        None => {
            let paths = model::check(&args, source.config(), dtype, &device)?;
            progress("loading".to_string());
            let weights = source.weight_bytes(dtype);
            let model = source.load(dtype, &device)?;
            model::run(&args, &model, weights, &paths, &progress)?
        }
    };
    bar.finish_and_clear();
    let mut out = std::io::stdout().lock();
    report::print(&mut out, args.output, &setting, &rows)?;
    let status = match args.admit {
        true => admit(&mut std::io::stderr(), &rows)?,
        false => ExitCode::SUCCESS,
    };
    if let Some(plot) = plot {
        plot.draw(
            &format!("{}, {}, {}", setting.model, setting.dtype, setting.device),
            &rows,
        )?;
    }
    Ok(status)
}

/// Says yes or no for each arm but the first, with the reasons.
fn admit(out: &mut impl Write, rows: &[measure::Row]) -> Result<ExitCode> {
    let measured = rows.iter().map(|row| admit::Measured {
        test: row.test.clone(),
        context: row.context,
        arm: row.arm.clone(),
        rounds: row.seconds.len(),
        ratio: row.ratio,
        ratio_spread: row.ratio_spread,
    });
    let decisions = admit::decide(&measured.collect::<Vec<_>>());
    if decisions.is_empty() {
        writeln!(out, "there is no second arm to decide on")?;
    }
    for decision in &decisions {
        match decision.reasons.as_slice() {
            [] => writeln!(out, "{}: yes", decision.arm)?,
            reasons => writeln!(out, "{}: no: {}", decision.arm, reasons.join("; "))?,
        }
    }
    let all = !decisions.is_empty() && decisions.iter().all(|decision| decision.reasons.is_empty());
    Ok(match all {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Where the weights come from.
enum Source {
    Checkpoint {
        config: Config,
        weights: Box<checkpoint::Stored>,
    },
    Synthetic {
        config: Config,
        name: String,
    },
}

impl Source {
    fn open(args: &Args) -> Result<Self> {
        let Some(shape) = args.shape else {
            let Checkpoint {
                config, weights, ..
            } = Checkpoint::open(&args.model, |_| Ok(()))?;
            return Ok(Self::Checkpoint {
                config,
                weights: Box::new(weights),
            });
        };
        let Shape::Gemma31B = shape;
        let config = synthetic::config(shape, args.layers, args.vocab)?;
        let name = format!(
            "random weights, 31b, {} layers, {} tokens",
            config.layers.len(),
            config.vocab_size
        );
        Ok(Self::Synthetic { config, name })
    }

    fn config(&self) -> &Config {
        match self {
            Self::Checkpoint { config, .. } | Self::Synthetic { config, .. } => config,
        }
    }

    /// Bytes of all weights, and of those that a token reads.
    fn weight_bytes(&self, dtype: DType) -> (u64, u64) {
        let held = match self {
            Self::Checkpoint { weights, .. } => weights.held_bytes(dtype),
            Self::Synthetic { .. } => None,
        };
        model::weight_bytes(self.config(), dtype, held)
    }

    fn load(self, dtype: DType, device: &Device) -> Result<Model> {
        Ok(match self {
            Self::Checkpoint { config, weights } => weights.load(&config, dtype, device)?,
            Self::Synthetic { config, .. } => {
                Model::new(&config, synthetic::weights(dtype, device))?
            }
        })
    }
}

fn setting(args: &Args, source: &Source, device: &Device, dtype: DType) -> Setting {
    let hub = args.model.hub.model_id.as_ref();
    let model = match (source, &args.model.weight_files) {
        (Source::Synthetic { name, .. }, _) => name.clone(),
        (_, None) if hub.is_some() => hub.cloned().unwrap_or_default(),
        (_, None) => "tiny-gemma4".to_string(),
        (_, Some(files)) => files
            .first()
            .and_then(|file| file.file_name())
            .map_or(String::new(), |name| name.to_string_lossy().into_owned()),
    };
    Setting {
        gem: env!("CARGO_PKG_VERSION"),
        device: match device {
            Device::Cpu => "cpu",
            Device::Metal(_) => "metal",
            Device::Cuda(_) => "cuda",
        }
        .to_string(),
        machine: machine(),
        threads: rayon::current_num_threads(),
        model,
        dtype: dtype.as_str().to_string(),
    }
}

/// The processor where the system names it, else what the program was built for.
fn machine() -> String {
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    match name {
        Some((_, name)) => name.to_string(),
        None => format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
    }
}
