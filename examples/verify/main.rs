//! Whether the ops of candle-gem can be trusted on this device: five gates, in order, each with a receipt; `--help` tells the rest.

#[macro_use]
#[path = "../gemma4/say.rs"]
mod say;

mod algebra;
#[path = "../gemma4/bounded_file.rs"]
mod bounded_file;
mod ceiling;
#[path = "../gemma4/checkpoint.rs"]
mod checkpoint;
#[path = "../gemma4/guard.rs"]
mod guard;
mod measure;
#[allow(dead_code, reason = "the hub names sizes, and asks for no peak")]
#[path = "../gemma4/memory.rs"]
mod memory;
mod model;
mod operators;
mod receipt;
#[path = "../gemma4/replace.rs"]
mod replace;
mod resources;
mod routes;
mod sources;

use anyhow::Result;
use candle::DType;
use checkpoint::{Checkpoint, ModelFiles};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use receipt::{Receipts, Report, Settings, Verdict};
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

/// Name of the gate whose receipt starts a set.
const FIRST_GATE: &str = "algebra";

/// Checks the ops of candle-gem on this device and keeps a receipt of everything.
///
/// Five gates, in this order; the first refusal ends the run and makes the exit status 1: the algebra of partial states on the CPU
/// against f64; what every kernel takes, and on Metal whether its pipelines can be launched; every route against the baseline
/// route and f64; a model on every attention path, token by token; the share of full attention in a token, and so what any
/// speed-up of it can give. Says nothing about speed otherwise.
#[derive(Debug, Parser)]
#[command(name = "verify", version)]
struct Args {
    /// Fewer and shorter contexts; under a minute on two cores.
    #[arg(long)]
    quick: bool,

    /// Folder for the receipts, without receipts in it [default: verify-receipts/SECONDS-SINCE-1970].
    #[arg(long, value_name = "DIR")]
    receipts: Option<PathBuf>,

    /// Measure nothing, but read the receipts in DIR back and judge them again; an edited one is refused.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["quick", "receipts", "seed", "cpu", "weight_files", "config_file", "tokenizer_file"])]
    check: Option<PathBuf>,

    /// Of the random inputs.
    #[arg(long, default_value_t = 299792458)]
    seed: u64,

    #[command(flatten)]
    model: ModelFiles,

    /// Run on the CPU even if a GPU is there.
    #[arg(long)]
    cpu: bool,
}

/// A bar on stderr where that is a terminal, nothing elsewhere.
pub struct Progress(ProgressBar);

impl Progress {
    fn new(steps: u64) -> Result<Self> {
        let bar = ProgressBar::new(steps);
        bar.set_style(ProgressStyle::with_template(
            "{bar:30} {pos}/{len} {msg}, {eta} left",
        )?);
        Ok(Self(bar))
    }

    fn step(&self, what: String) {
        self.0.set_message(what);
        self.0.inc(1);
    }
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let mut table = Table::new();
    let ended = match &args.check {
        Some(folder) => check(folder, &mut table),
        None => measure(&args, &mut table),
    };
    // Gates that were passed before an error are told, too.
    if ended.is_ok() || !table.verdicts.is_empty() {
        table.print()?;
    }
    ended?;
    Ok(match table.passed() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

fn measure(args: &Args, table: &mut Table) -> Result<()> {
    let device = gem::device::choose(args.cpu)?;
    let settings = Settings::new(&device, args.quick, args.seed);
    // Everything that can be wrong with the model is said before the first gate.
    let Checkpoint {
        config,
        tokenizer,
        weights,
        ..
    } = Checkpoint::open(&args.model, |_| Ok(()))?;
    model::check(&config, args.quick)?;
    let folder = match &args.receipts {
        Some(folder) => folder.clone(),
        None => PathBuf::from("verify-receipts").join(seconds_since_1970().to_string()),
    };
    let mut receipts = Receipts::create(&folder, settings.clone())?;
    table.what = settings.to_string();
    let quick = args.quick;
    let steps = algebra::steps(quick)
        + resources::steps()
        + operators::steps(quick)
        + model::steps(quick)
        + ceiling::steps(quick);
    let progress = Progress::new(steps)?;
    table.receipts = Some(folder);

    if table.add(receipts.write(algebra::run(&settings, &progress)?)?) {
        return Ok(());
    }
    if table.add(receipts.write(resources::run(&device, &progress)?)?) {
        return Ok(());
    }
    if table.add(receipts.write(operators::run(&settings, &device, &progress)?)?) {
        return Ok(());
    }
    let dtype = if device.is_cpu() {
        DType::F32
    } else {
        DType::BF16
    };
    let model = weights.load(&config, dtype, &device)?;
    let models = model::run(&settings, &config, &model, &tokenizer, &progress)?;
    let ceiling = ceiling::run(&settings, &config, &model, &models, &progress);
    if table.add(receipts.write(models)?) {
        return Ok(());
    }
    table.add(receipts.write(ceiling?)?);
    progress.0.finish_and_clear();
    Ok(())
}

fn check(folder: &std::path::Path, table: &mut Table) -> Result<()> {
    let mut receipts = Receipts::open(folder)?;
    table.what = receipts.settings.to_string();
    let gates: [fn(&mut Receipts) -> Result<Verdict>; 5] = [
        Receipts::check::<algebra::Algebra>,
        Receipts::check::<resources::Resources>,
        Receipts::check::<operators::Operators>,
        Receipts::check::<model::Models>,
        Receipts::check::<ceiling::Ceiling>,
    ];
    for gate in gates {
        if table.add(gate(&mut receipts)?) {
            break;
        }
    }
    Ok(())
}

fn seconds_since_1970() -> u64 {
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed();
    since.map_or(0, |duration| duration.as_secs())
}

/// What was decided, for people.
struct Table {
    /// Of which run.
    what: String,
    verdicts: Vec<Verdict>,
    receipts: Option<PathBuf>,
}

const GATES: [&str; 5] = [
    algebra::Algebra::GATE,
    resources::Resources::GATE,
    operators::Operators::GATE,
    model::Models::GATE,
    ceiling::Ceiling::GATE,
];

impl Table {
    fn new() -> Self {
        Self {
            what: String::new(),
            verdicts: vec![],
            receipts: None,
        }
    }

    /// Whether it was refused.
    fn add(&mut self, verdict: Verdict) -> bool {
        let refused = !verdict.refusals.is_empty();
        self.verdicts.push(verdict);
        refused
    }

    fn passed(&self) -> bool {
        let refused = |verdict: &Verdict| !verdict.refusals.is_empty();
        self.verdicts.len() == GATES.len() && !self.verdicts.iter().any(refused)
    }

    fn print(&self) -> Result<()> {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{}\n", self.what)?;
        writeln!(out, "| gate | verdict | |\n|---|---|---|")?;
        for (i, gate) in GATES.into_iter().enumerate() {
            match self.verdicts.get(i) {
                None => writeln!(out, "| {gate} | not run | |")?,
                Some(verdict) if verdict.refusals.is_empty() => {
                    writeln!(out, "| {gate} | passed | {} |", verdict.summary)?
                }
                Some(verdict) => {
                    for refusal in &verdict.refusals {
                        writeln!(out, "| {gate} | REFUSED | {refusal} |")?;
                    }
                }
            }
        }
        if let Some(folder) = &self.receipts {
            say!("receipts: {}", folder.display());
        }
        Ok(())
    }
}
