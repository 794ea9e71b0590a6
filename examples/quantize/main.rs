//! Makes a GGUF file of a Gemma 4 checkpoint; `--help` tells the rest.

#[macro_use]
#[path = "../gemma4/say.rs"]
mod say;

#[path = "../gemma4/bounded_file.rs"]
mod bounded_file;
mod convert;
#[path = "../gemma4/guard.rs"]
mod guard;
#[path = "../gemma4/hub/mod.rs"]
#[allow(dead_code, reason = "this example takes whole checkpoints")]
mod hub;
#[path = "../gemma4/memory.rs"]
#[allow(dead_code, reason = "this example does not report its peak")]
mod memory;
mod metadata;
#[path = "../gemma4/replace.rs"]
mod replace;
#[path = "../gemma4/chat/template_file.rs"]
mod template_file;
#[path = "../gemma4/tokenizer.rs"]
mod tokenizer;
mod vocabulary;
mod write;

use anyhow::{bail, Context, Result};
use candle::quantized::GgmlDType;
use clap::{Parser, ValueEnum};
use gem::models::gemma4::{Config, Gguf};
use indicatif::{ProgressBar, ProgressStyle};
use replace::Replacement;
use std::collections::BTreeMap;
use std::path::PathBuf;
use tokenizer::read_tokenizer;

/// Writes the weights, the configuration and the tokenizer of a Gemma 4 text decoder into one GGUF file, with the names and
/// metadata of llama.cpp.
///
/// Matrices become the type that is asked for, norms and scalars f32. Where rows are no multiple of the 256 elements that a
/// K-quant takes (or the 32 of q8_0 and q4_0), a matrix becomes q8_0 (or bf16), which is said on stderr.
#[derive(Debug, Parser)]
#[command(name = "quantize", version, allow_missing_positional = true)]
struct Args {
    /// Folder with config.json, the safetensors files, and tokenizer.json, generation_config.json and chat_template.jinja (or
    /// tokenizer_config.json) if they are to go along; or --model-id.
    #[arg(required_unless_present = "model_id", conflicts_with = "model_id")]
    model: Option<PathBuf>,

    /// The file to write.
    out: PathBuf,

    /// Type of the matrices.
    #[arg(long = "type", value_name = "TYPE", value_enum)]
    kind: Kind,

    /// Replace the file if it is there and GGUF.
    #[arg(long)]
    force: bool,

    #[command(flatten)]
    hub: hub::HubArgs,
}

impl Args {
    /// The folder of the checkpoint, fetched if need be.
    fn folder(&self) -> Result<PathBuf> {
        match (&self.model, &self.hub.model_id) {
            (Some(folder), _) => Ok(folder.clone()),
            (None, Some(id)) => {
                // What is not implemented is refused before gigabytes are fetched for nothing.
                Config::from_file(hub::fetch_config(&self.hub, id)?)?;
                Ok(hub::fetch(&self.hub, id, None)?.folder)
            }
            (None, None) => bail!("want a folder with a model, or --model-id"),
        }
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Kind {
    #[value(name = "q4_0")]
    Q4_0,
    #[value(name = "q8_0")]
    Q8_0,
    #[value(name = "q4_k")]
    Q4K,
    #[value(name = "q5_k")]
    Q5K,
    #[value(name = "q6_k")]
    Q6K,
    F16,
    Bf16,
    F32,
}

impl From<Kind> for GgmlDType {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Q4_0 => Self::Q4_0,
            Kind::Q8_0 => Self::Q8_0,
            Kind::Q4K => Self::Q4K,
            Kind::Q5K => Self::Q5K,
            Kind::Q6K => Self::Q6K,
            Kind::F16 => Self::F16,
            Kind::Bf16 => Self::BF16,
            Kind::F32 => Self::F32,
        }
    }
}

fn main() -> Result<()> {
    let args = Args::parse();
    if args.out.exists() && !args.force {
        bail!(
            "{} is there already, --force replaces it",
            args.out.display()
        );
    }
    let out = Replacement::of(&args.out, "GGUF file", |file| Gguf::is_gguf(file))?;
    let model = args.folder()?;
    let plan = convert::Plan::new(&model, args.kind.into())
        .with_context(|| model.display().to_string())?;
    for note in &plan.notes {
        say!("note: {note}");
    }
    let mut types: BTreeMap<&str, (usize, u64)> = BTreeMap::new();
    for tensor in &plan.tensors {
        let (count, bytes) = types.entry(write::kind(tensor.dtype).0).or_default();
        (*count, *bytes) = (*count + 1, *bytes + tensor.bytes() as u64);
    }
    let total = types.values().map(|(_, bytes)| bytes).sum();
    hub::disk::check_room(
        &args.out.display().to_string(),
        total,
        replace::folder(&args.out),
        "make room, or write to another disk",
    )?;
    let bar = ProgressBar::new(total);
    bar.set_style(ProgressStyle::with_template(
        "writing {bar:40} {bytes}/{total_bytes}, {eta} left",
    )?);
    plan.write(out, |bytes| bar.inc(bytes as u64))?;
    bar.finish_and_clear();
    for (kind, (count, bytes)) in types {
        say!("{kind:5} {count:5} tensors {:>12}", memory::human(bytes));
    }
    say!(
        "wrote {}, {}",
        args.out.display(),
        memory::human(std::fs::metadata(&args.out)?.len())
    );
    Ok(())
}
