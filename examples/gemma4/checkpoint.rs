//! Finds the files of a checkpoint and loads them.

use crate::args::Args;
use anyhow::{anyhow, bail, Context, Result};
use gem::models::gemma4::{Config, StopTokens, Weights};
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

const BUILT_IN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/tiny-gemma4");

/// A checkpoint whose files are found and checked, but whose weights are not read yet.
pub struct Checkpoint {
    pub config: Config,
    pub tokenizer: Tokenizer,
    pub stop: StopTokens,
    pub weights: Weights,
}

impl Checkpoint {
    pub fn open(args: &Args) -> Result<Self> {
        let files = args
            .weight_files
            .clone()
            .unwrap_or_else(|| vec![PathBuf::from(BUILT_IN)]);
        let (weights, folder) = match files.as_slice() {
            [folder] if folder.is_dir() => (Weights::open_dir(folder)?, folder.clone()),
            [first, ..] => {
                let folder = first.parent().map(Path::to_path_buf).unwrap_or_default();
                (Weights::open(&files)?, folder)
            }
            [] => bail!("--weight-files names no file"),
        };
        let beside = |given: &Option<PathBuf>, name: &str| {
            given.clone().unwrap_or_else(|| folder.join(name))
        };
        let config = Config::from_file(beside(&args.config_file, "config.json"))?;
        weights.check(&config.tensor_shapes())?;
        let tokenizer_file = beside(&args.tokenizer_file, "tokenizer.json");
        let tokenizer = Tokenizer::from_file(&tokenizer_file)
            .map_err(|e| anyhow!("{}: {e}", tokenizer_file.display()))?;
        let vocab = tokenizer.get_vocab_size(true);
        if vocab > config.vocab_size {
            bail!(
                "{}: the tokenizer has {vocab} tokens, want at most the {} of the model",
                tokenizer_file.display(),
                config.vocab_size
            );
        }
        let generation_file = folder.join("generation_config.json");
        let generation = match std::fs::read_to_string(&generation_file) {
            Ok(text) => Some(text),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            Err(e) => return Err(e).with_context(|| generation_file.display().to_string()),
        };
        let stop = StopTokens::new(&config, generation.as_deref())?;
        Ok(Self {
            config,
            tokenizer,
            stop,
            weights,
        })
    }
}
