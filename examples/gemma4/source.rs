//! Where the prompt comes from.

use crate::args::Args;
use anyhow::{bail, Context, Result};
use std::io::Read;
use std::path::Path;

/// A text that hides three secret words, for the model of this repository.
const DEMO: &str = include_str!("../../assets/tiny-gemma4/demo.txt");
const DEMO_QUESTION: &str = "What are the secret words?";

pub enum Prompt {
    /// Text to continue; control tokens in it count.
    Raw(String),
    /// The content of a user turn; control tokens in it are plain text.
    User(String),
}

pub fn read(args: &Args) -> Result<Prompt> {
    let text = match (&args.prompt, &args.prompt_file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) if path == Path::new("-") => {
            let mut text = String::new();
            std::io::stdin()
                .read_to_string(&mut text)
                .context("the prompt on stdin")?;
            text
        }
        (None, Some(path)) => {
            std::fs::read_to_string(path).with_context(|| path.display().to_string())?
        }
        (None, None) if !args.model.built_in() => {
            let flag = match args.model.hub.model_id {
                Some(_) => "--model-id",
                None => "--weight-files",
            };
            bail!("{flag} needs --prompt or --prompt-file: the built-in text is for the built-in model")
        }
        (None, None) => return Ok(Prompt::User(format!("{DEMO}\n{DEMO_QUESTION}"))),
    };
    Ok(if args.chat.chat {
        Prompt::User(text)
    } else {
        Prompt::Raw(text)
    })
}

/// `--system`: the text itself, or after an @ the file that holds it.
pub fn system(given: &str) -> Result<String> {
    match given.strip_prefix('@') {
        Some(path) => std::fs::read_to_string(path).with_context(|| path.to_string()),
        None => Ok(given.to_string()),
    }
}
