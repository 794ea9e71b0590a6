//! Finds the files of a checkpoint and loads them.

#[path = "hub/mod.rs"]
mod hub;
#[path = "tokenizer.rs"]
mod tokenizer;

use crate::bounded_file;
use anyhow::{bail, Context, Result};
use candle::{DType, Device};
use gem::models::gemma4::{Config, Gguf, Model, StopTokens, Weights};
use std::path::{Path, PathBuf};
use tokenizer::{read_tokenizer, shown};
use tokenizers::Tokenizer;

/// The model of this repository, in it.
const BUILT_IN: &str = "assets/tiny-gemma4";

/// Where a checkpoint is; the model of this repository by default.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ModelFiles {
    /// Safetensors files of the model, or one folder that holds them, or one GGUF file; with --model-id, files of its repository
    /// [default: the model of this repository].
    #[arg(long, value_name = "FILES", value_delimiter = ',')]
    pub weight_files: Option<Vec<PathBuf>>,

    /// [default: config.json beside the weights, or the GGUF file itself].
    #[arg(long, value_name = "FILE")]
    pub config_file: Option<PathBuf>,

    /// [default: tokenizer.json beside the weights, or the GGUF file itself].
    #[arg(long, value_name = "FILE")]
    pub tokenizer_file: Option<PathBuf>,

    #[command(flatten)]
    pub hub: hub::HubArgs,
}

impl ModelFiles {
    /// Whether it is the model of this repository.
    #[allow(
        dead_code,
        reason = "the examples that share this file do not all generate text"
    )]
    pub fn built_in(&self) -> bool {
        self.weight_files.is_none() && self.hub.model_id.is_none()
    }

    /// The configuration alone, with no weight needed; and what a GGUF file says of [`Stored::held_bytes`].
    #[allow(
        dead_code,
        reason = "the examples that share this file do not all generate text"
    )]
    pub fn config(&self, dtype: DType) -> Result<(Config, Option<u64>)> {
        if let Some([file]) = self
            .weight_files
            .as_deref()
            .filter(|_| self.hub.model_id.is_none())
        {
            if Gguf::is_gguf(file) {
                let gguf = Gguf::open(file)?;
                return Ok((
                    gguf.config().clone(),
                    Some(gguf.planned_bytes(dtype) as u64),
                ));
            }
        }
        let file = match (&self.config_file, &self.hub.model_id, &self.weight_files) {
            (Some(file), _, _) => file.clone(),
            (None, Some(id), _) => hub::fetch_config(&self.hub, id)?,
            (None, None, Some(files)) => match files.first() {
                Some(folder) if folder.is_dir() => folder.join(hub::CONFIG),
                Some(file) => file.with_file_name(hub::CONFIG),
                None => bail!("--weight-files names no file"),
            },
            (None, None, None) => built_in().join(hub::CONFIG),
        };
        Ok((Config::from_file(file)?, None))
    }

    /// The same with files of this machine in place of the hub's; `admit` sees the configuration before gigabytes are fetched for
    /// nothing.
    fn fetched(&self, admit: impl FnOnce(&Config) -> Result<()>) -> Result<Self> {
        let Some(id) = &self.hub.model_id else {
            return Ok(self.clone());
        };
        let named = self.weight_files.as_deref();
        // What files that are named hold is not known before.
        if named.is_none() {
            admit(&Config::from_file(match &self.config_file {
                Some(file) => file.clone(),
                None => hub::fetch_config(&self.hub, id)?,
            })?)?;
        }
        let fetched = hub::fetch(&self.hub, id, named)?;
        // Weights may be in a folder of their repository; these are not.
        let beside = |given: &Option<PathBuf>, name| {
            let file = fetched.folder.join(name);
            given.clone().or(file.is_file().then_some(file))
        };
        Ok(Self {
            config_file: beside(&self.config_file, "config.json"),
            tokenizer_file: beside(&self.tokenizer_file, "tokenizer.json"),
            weight_files: Some(fetched.weights),
            hub: hub::HubArgs::default(),
        })
    }
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
    pub weights: Stored,
    #[allow(
        dead_code,
        reason = "examples that share this file do not all hold a chat"
    )]
    /// Where the files beside the weights are.
    pub folder: PathBuf,
}

/// Weights as their files have them.
pub enum Stored {
    Safetensors(Weights),
    Gguf(Box<Gguf>),
}

impl Stored {
    /// Bytes that the weights of a model of this type will hold, where they are not its elements in this type.
    #[allow(dead_code, reason = "not every example says what it plans")]
    pub fn held_bytes(&self, dtype: DType) -> Option<u64> {
        match self {
            Self::Safetensors(_) => None,
            Self::Gguf(gguf) => Some(gguf.planned_bytes(dtype) as u64),
        }
    }

    /// The chat template that comes with them, if it is not in a file beside them.
    #[allow(dead_code, reason = "examples that share this file do not all chat")]
    pub fn chat_template(&self) -> Option<&str> {
        match self {
            Self::Safetensors(_) => None,
            Self::Gguf(gguf) => gguf.chat_template(),
        }
    }

    /// `config` is the checkpoint's.
    pub fn load(self, config: &Config, dtype: DType, device: &Device) -> candle::Result<Model> {
        match self {
            Self::Safetensors(weights) => Model::new(config, weights.var_builder(dtype, device)),
            Self::Gguf(gguf) => Model::from_gguf(&gguf, dtype, device),
        }
    }
}

impl Checkpoint {
    /// `admit` may refuse the configuration of a checkpoint that is to be fetched, before it is.
    pub fn open(given: &ModelFiles, admit: impl FnOnce(&Config) -> Result<()>) -> Result<Self> {
        let given = &given.fetched(admit)?;
        let files = given
            .weight_files
            .clone()
            .unwrap_or_else(|| vec![built_in()]);
        if let Some(gguf) = files.iter().find(|file| Gguf::is_gguf(file)) {
            if files.len() > 1 {
                bail!("{}: is GGUF, want it alone", gguf.display());
            }
            return Self::open_gguf(gguf, given);
        }
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
        let tokenizer = tokenizer_of(&tokenizer_file, &config)?;
        let generation_file = folder.join("generation_config.json");
        let generation = bounded_file::read(&generation_file, bounded_file::LARGEST_SETTINGS)?;
        let stop = StopTokens::new(&config, generation.as_deref())
            .with_context(|| generation_file.display().to_string())?;
        Ok(Self {
            config,
            tokenizer,
            stop,
            weights: Stored::Safetensors(weights),
            folder,
        })
    }

    /// One file holds everything, but a tokenizer that is given counts.
    fn open_gguf(file: &Path, given: &ModelFiles) -> Result<Self> {
        if let Some(config) = &given.config_file {
            bail!(
                "--config-file {} is for safetensors: {} has its own",
                config.display(),
                file.display()
            );
        }
        let gguf = Gguf::open(file)?;
        gguf.check()?;
        let config = gguf.config().clone();
        let tokenizer = match &given.tokenizer_file {
            Some(file) => tokenizer_of(file, &config)?,
            None => read_tokenizer(gguf.tokenizer_json()?.as_bytes())
                .with_context(|| file.display().to_string())?,
        };
        Ok(Self {
            stop: StopTokens::new(&config, None)?,
            config,
            tokenizer,
            weights: Stored::Gguf(Box::new(gguf)),
            folder: file.parent().map(Path::to_path_buf).unwrap_or_default(),
        })
    }
}

/// The folder of the model of this repository, which may have been moved since this program was built in it.
fn built_in() -> PathBuf {
    let program = std::env::current_exe().unwrap_or_default();
    let built = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders = program.ancestors().map(|folder| folder.join(BUILT_IN));
    folders
        .find(|folder| folder.is_dir())
        .unwrap_or(built.join(BUILT_IN))
}

fn tokenizer_of(file: &Path, config: &Config) -> Result<Tokenizer> {
    let place = || file.display().to_string();
    let json = bounded_file::read(file, bounded_file::LARGEST)?;
    let json = json.with_context(|| format!("{}: there is no such file", place()))?;
    let tokenizer = read_tokenizer(json.as_bytes()).with_context(place)?;
    let vocab = tokenizer.get_vocab(true);
    // Ids may have gaps.
    if let Some((token, id)) = vocab.into_iter().max_by_key(|(_, id)| *id) {
        if id as usize >= config.vocab_size {
            bail!(
                "{}: the token {:?} has the id {id}, want one below the vocabulary of {}",
                file.display(),
                shown(&token),
                config.vocab_size
            );
        }
    }
    Ok(tokenizer)
}
