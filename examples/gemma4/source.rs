//! Where the prompt comes from.

use crate::args::Args;
use anyhow::{bail, Context, Result};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// A text that hides three secret words, for the model of this repository.
const DEMO: &str = include_str!("../../assets/tiny-gemma4/demo.txt");
const DEMO_QUESTION: &str = "What are the secret words?";

/// Bytes of a prompt or of a line of a conversation, more than any context holds.
pub const LARGEST: u64 = 64 << 20;

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
            read_stream(std::io::stdin(), "the prompt on stdin")?
        }
        (None, Some(path)) => read_file(path)?,
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
        Some(path) => read_file(Path::new(path)),
        None => Ok(given.to_string()),
    }
}

fn read_file(path: &Path) -> Result<String> {
    let name = path.display().to_string();
    let file = File::open(path).with_context(|| name.clone())?;
    read_stream(file, &name)
}

/// Also of what is no file.
fn read_stream(stream: impl Read, name: &str) -> Result<String> {
    let mut bytes = Vec::new();
    let more = stream.take(LARGEST + 1).read_to_end(&mut bytes);
    if more.with_context(|| name.to_string())? as u64 > LARGEST {
        bail!("{name}: does not end, want at most {LARGEST} bytes");
    }
    String::from_utf8(bytes).with_context(|| name.to_string())
}
