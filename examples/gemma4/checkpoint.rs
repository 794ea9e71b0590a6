//! Finds the files of a checkpoint and loads them.

use anyhow::{anyhow, bail, Context, Result};
use gem::models::gemma4::{Config, StopTokens, Weights};
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

const BUILT_IN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/assets/tiny-gemma4");

/// Where a checkpoint is; the model of this repository by default.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ModelFiles {
    /// Safetensors files of the model, or one folder that holds them [default: the model of this repository].
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    pub weight_files: Option<Vec<PathBuf>>,

    /// [default: config.json beside the weights].
    #[arg(long, value_name = "FILE")]
    pub config_file: Option<PathBuf>,

    /// [default: tokenizer.json beside the weights].
    #[arg(long, value_name = "FILE")]
    pub tokenizer_file: Option<PathBuf>,
}

/// A checkpoint whose files are found and checked, but whose weights are not read yet.
#[allow(
    dead_code,
    reason = "the examples that share this file do not all generate text"
)]
pub struct Checkpoint {
    pub config: Config,
    pub tokenizer: Tokenizer,
    #[allow(
        dead_code,
        reason = "examples that share this file do not all generate text"
    )]
    pub stop: StopTokens,
    pub weights: Weights,
    #[allow(
        dead_code,
        reason = "examples that share this file do not all hold a chat"
    )]
    /// Where the files beside the weights are.
    pub folder: PathBuf,
}

impl Checkpoint {
    pub fn open(given: &ModelFiles) -> Result<Self> {
        let files = given
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
        let beside =
            |file: &Option<PathBuf>, name: &str| file.clone().unwrap_or_else(|| folder.join(name));
        let config = Config::from_file(beside(&given.config_file, "config.json"))?;
        weights.check(&config.tensor_shapes())?;
        let tokenizer_file = beside(&given.tokenizer_file, "tokenizer.json");
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
            folder,
        })
    }
}
