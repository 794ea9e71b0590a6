//! Gemma 4 on candle's plain ops or on the fused ops of this crate; `--help` tells the rest.

#[macro_use]
mod say;

mod ab;
mod args;
mod bounded_file;
mod chat;
mod checkpoint;
mod converse;
mod guard;
mod interrupt;
mod memory;
mod plan;
mod replace;
mod report;
mod run;
mod session;
mod source;
mod stream;

use anyhow::{bail, Context, Result};
use args::Args;
use candle::utils::{cuda_is_available, metal_is_available};
use candle::{DType, Device};
use chat::{Conversation, Encoder, Form, Piece, Role, Template};
use checkpoint::{Checkpoint, Stored};
use clap::Parser;
use gem::models::gemma4::Config;
use session::Session;
use source::Prompt;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

/// Tokens that a conversation is planned for if nothing is said; it may grow past them.
const CONVERSATION: usize = 8192;

fn main() -> Result<()> {
    let args = Args::parse();
    let _trace = args.tracing.then(start_trace).transpose()?;
    if args.list_devices {
        return list_devices();
    }
    let device = gem::device::choose(args.cpu)?;
    device.with_context(|| run(&args, &device))
}

fn run(args: &Args, device: &Device) -> Result<()> {
    let dtype = match args.dtype {
        Some(dtype) => dtype.into(),
        None if device.is_cpu() => DType::F32,
        None => DType::BF16,
    };
    if args.plan.plan {
        let (config, held) = args.model.config(dtype)?;
        return plan::print_table(args, &config, dtype, device, held);
    }
    let converses = args.converses();
    if converses && args.json.is_some() {
        bail!("--json reports on one answer: want --prompt or --prompt-file beside it");
    }
    let prompt = match converses {
        true => None,
        false => Some(source::read(args)?),
    };
    let mut conversation = Conversation {
        think: args.chat.think,
        system: args
            .chat
            .system
            .as_deref()
            .map(source::system)
            .transpose()?,
        ..Default::default()
    };
    let Checkpoint {
        config,
        tokenizer,
        mut stop,
        weights,
        folder,
    } = Checkpoint::open(&args.model, |config| {
        // A prompt of one token is the least.
        let context = context(args, config, 1);
        let (demand, paths) = plan::demand(args, config, dtype, device, context, None)?;
        plan::check(args, config, &demand, &paths, device)
    })?;
    let encoder = Encoder::new(tokenizer);
    let bos = config.bos_token_id;
    let form = match prompt {
        Some(Prompt::Raw(_)) => None,
        _ => Some(form(args, &weights, &folder, bos)?),
    };
    if let Some(form) = &form {
        for id in form.end_of_turn(&encoder)? {
            stop = stop.with(id);
        }
    }
    let ids = match (prompt, &form) {
        (Some(Prompt::User(text)), Some(form)) => {
            conversation.push(Role::User, &text);
            form.prompt(&conversation, &encoder)?
        }
        (Some(Prompt::Raw(text)), _) => encoder.encode(&[Piece::Template(text)], bos)?,
        _ => vec![],
    };
    let limit = args.max_context.unwrap_or(config.max_position_embeddings);
    if ids.len() > limit {
        bail!(
            "the prompt has {} tokens, want at most the context of {limit}",
            ids.len()
        );
    }
    let context = context(args, &config, ids.len());
    let held = weights.held_bytes(dtype);
    let (demand, paths) = plan::demand(args, &config, dtype, device, context, held)?;
    if args.ab {
        ab::say_what_is_left_out(&config, dtype, device);
    }
    let report = args
        .json
        .as_deref()
        .map(report::Destination::open)
        .transpose()?;
    let shapes = config.tensor_shapes();
    if !args.quiet {
        say!("{}", plan::line(&config, &demand, &paths));
    }
    plan::check(args, &config, &demand, &paths, device)?;
    let start = Instant::now();
    let model = weights.load(&config, dtype, device)?;
    if !args.quiet {
        say!(
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
    if let (true, Some(form)) = (converses, &form) {
        let cache = run::new_cache(&model, demand.path, args, &[])?;
        let mut session = Session::new(conversation, &model, cache, &encoder, form, &stop, args);
        return converse::converse(&mut session);
    }
    let run = run::run(&model, encoder.tokenizer(), &ids, &stop, demand.path, args)?;
    if let Some(report) = report {
        report.write(&report::run_json(&model, &run))?;
    }
    if !args.quiet {
        report::print(&run);
    }
    Ok(())
}

/// Tokens that a run is planned for: a prompt of so many with its answer, or a conversation.
fn context(args: &Args, config: &Config, prompt_len: usize) -> usize {
    let limit = args.max_context.unwrap_or(config.max_position_embeddings);
    match (args.converses(), args.max_context) {
        (true, Some(most)) => most,
        (true, None) => CONVERSATION.min(limit),
        (false, _) => run::planned_context(args, prompt_len).min(limit),
    }
}

/// The template that `args` or the checkpoint gives, else the built-in one, which is told.
fn form(args: &Args, weights: &Stored, folder: &Path, bos: u32) -> Result<Form> {
    let given = args.chat.chat_template.as_deref().map(Template::from_file);
    let found = match (given, weights.chat_template()) {
        (Some(template), _) => Some(template?),
        (None, Some(source)) => Some(Template::new(source.into(), "the GGUF's template".into())?),
        (None, None) => Template::of_checkpoint(folder)?,
    };
    let template = found.unwrap_or_else(|| {
        if !args.quiet {
            say!("no chat template beside the weights: the built-in form of Gemma 4 is used");
        }
        Template::built_in()
    });
    Ok(Form { template, bos })
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
    let file = std::fs::File::create_new(&name).with_context(|| name.clone())?;
    say!("tracing to {name}");
    let (layer, guard) = tracing_chrome::ChromeLayerBuilder::new()
        .writer(file)
        .build();
    tracing_subscriber::registry().with(layer).init();
    Ok(guard)
}
