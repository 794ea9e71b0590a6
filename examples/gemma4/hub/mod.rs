//! Checkpoints from a model hub, in the cache that every Hugging Face library shares.
//!
//! Only what a text model needs is fetched: of a sharded checkpoint, the shards that hold tensors of the text decoder.

mod cache;
mod client;
pub mod disk;
mod download;
mod progress;

use crate::bounded_file::{self, LARGEST};
use anyhow::{bail, Context, Result};
use cache::Cache;
use client::{Client, Meta};
use gem::models::gemma4::Weights;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// Bytes of an index of shards, as for one on this machine.
const LARGEST_INDEX: u64 = 16 << 20;
const INDEX: &str = "model.safetensors.index.json";
const SINGLE: &str = "model.safetensors";
pub const CONFIG: &str = "config.json";
const TOKENIZER: &str = "tokenizer.json";
/// Used where a repository has them.
const OPTIONAL: [&str; 3] = [
    "generation_config.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];

/// Which model of the hub.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct HubArgs {
    /// Take the model from the hub, as google/gemma-4-31b-it.
    #[arg(long, value_name = "MODEL")]
    pub model_id: Option<String>,

    /// Branch, tag or commit of the model.
    #[arg(long, default_value = "main", requires = "model_id")]
    pub revision: String,

    /// Use no network: the model must be in the cache of the hub. Also with HF_HUB_OFFLINE=1.
    #[arg(long)]
    pub offline: bool,
}

/// Files of one model on this machine.
pub struct Fetched {
    /// The commit's folder, with every file under its own name.
    pub folder: PathBuf,
    /// The files that were named, else the folder.
    pub weights: Vec<PathBuf>,
}

/// The weights and what belongs to them; `named` are files of the repository in place of the safetensors checkpoint.
pub fn fetch(args: &HubArgs, model_id: &str, named: Option<&[PathBuf]>) -> Result<Fetched> {
    let mut repo = Repo::open(args, model_id)?;
    let named: Option<Vec<String>> = named
        .map(|files| files.iter().map(|file| plain_path(file)).collect())
        .transpose()?;
    // A GGUF file has its own configuration and tokenizer.
    let whole = |file: &String| file.to_ascii_lowercase().ends_with(".gguf");
    let alone = named.as_ref().is_some_and(|files| files.iter().all(whole));
    let mut wanted: Vec<(String, bool)> = [CONFIG, TOKENIZER]
        .map(|file| (file.to_string(), !alone))
        .to_vec();
    wanted.extend(OPTIONAL.map(|file| (file.to_string(), false)));
    if repo.client.is_some() {
        // Anything that is there settles the commit.
        match &named {
            Some(files) if alone => repo.pin(&files[0])?,
            _ => repo.pin(CONFIG)?,
        }
    }
    let mut metas = Vec::new();
    for (file, required) in &wanted {
        match repo.look_up(file, *required)? {
            Some(meta) => metas.push((file.clone(), meta)),
            None => continue,
        }
    }
    // Small, and a missing licence shows before the first of them.
    repo.take(metas)?;
    let files = match &named {
        Some(files) => files.clone(),
        None => repo.checkpoint()?,
    };
    let mut metas = Vec::new();
    for file in &files {
        if let Some(meta) = repo.look_up(file, true)? {
            metas.push((file.clone(), meta));
        }
    }
    repo.take(metas)?;
    let folder = repo.cache.snapshot(repo.commit()?);
    let weights = match named {
        Some(files) => files.iter().map(|file| folder.join(file)).collect(),
        // Whose index is compared with the shards.
        None => vec![folder.clone()],
    };
    Ok(Fetched { folder, weights })
}

/// `config.json` alone.
pub fn fetch_config(args: &HubArgs, model_id: &str) -> Result<PathBuf> {
    let mut repo = Repo::open(args, model_id)?;
    if repo.client.is_some() {
        repo.pin(CONFIG)?;
    }
    if let Some(meta) = repo.look_up(CONFIG, true)? {
        repo.take(vec![(CONFIG.to_string(), meta)])?;
    }
    Ok(repo.cache.snapshot(repo.commit()?).join(CONFIG))
}

struct Repo {
    cache: Cache,
    /// `None` without network.
    client: Option<Client>,
    revision: String,
    commit: Option<String>,
}

impl Repo {
    fn open(args: &HubArgs, model_id: &str) -> Result<Self> {
        check_model_id(model_id)?;
        let revision = plain_path(Path::new(&args.revision))
            .with_context(|| format!("--revision is {:?}", args.revision))?;
        let cache = Cache::new(model_id)?;
        let set = |value: String| {
            !matches!(
                value.to_ascii_lowercase().as_str(),
                "" | "0" | "false" | "no" | "off"
            )
        };
        let offline = args.offline || std::env::var("HF_HUB_OFFLINE").is_ok_and(set);
        let (client, commit) = match offline {
            true => match cache.commit_of(&revision) {
                Some(commit) => (None, Some(commit)),
                None => bail!(
                    "hub: offline, and {CONFIG} of {model_id} at {revision} is not in {}: run once without --offline and HF_HUB_OFFLINE",
                    cache.folder().display()
                ),
            },
            false => (Some(Client::new(model_id)?), None),
        };
        Ok(Self {
            cache,
            client,
            revision,
            commit,
        })
    }

    fn commit(&self) -> Result<&str> {
        match &self.commit {
            Some(commit) => Ok(commit),
            None => bail!("hub: no commit is known for {}", self.revision),
        }
    }

    /// Asks what commit the revision is now, from which every file is then taken.
    fn pin(&mut self, file: &str) -> Result<()> {
        if let Some(client) = &self.client {
            let commit = client.look_up(&self.revision, file)?.commit;
            self.cache.set_commit(&self.revision, &commit)?;
            self.commit = Some(commit);
        }
        Ok(())
    }

    /// What must be downloaded of a file; `None` if nothing, because it is there or the repository does not have it.
    fn look_up(&self, file: &str, required: bool) -> Result<Option<Meta>> {
        let commit = self.commit()?;
        if self.cache.has(commit, file) {
            return Ok(None);
        }
        let Some(client) = &self.client else {
            match required {
                true => bail!(
                    "hub: offline, and {file} of {} at {} is not in {}: run once without --offline and HF_HUB_OFFLINE",
                    self.cache.model_id(),
                    self.revision,
                    self.cache.snapshot(commit).display()
                ),
                false => {
                    if !self.cache.knows_none(commit, file) {
                        say!(
                            "hub: offline, and {file} is not in {}: goes on without it, though {} may have it",
                            self.cache.snapshot(commit).display(),
                            self.cache.model_id()
                        );
                    }
                    return Ok(None);
                }
            }
        };
        match client.look_up(commit, file) {
            Ok(meta) if is_text(file) && meta.size > LARGEST => bail!(
                "hub: {file} of {} has {} bytes, want at most {LARGEST}",
                self.cache.model_id(),
                meta.size
            ),
            Ok(meta) => Ok(Some(meta)),
            Err(error) if !required && error.is::<client::NoSuchFile>() => {
                self.cache.set_none(commit, file)?;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn take(&self, files: Vec<(String, Meta)>) -> Result<()> {
        let (Some(client), commit) = (&self.client, self.commit()?) else {
            return Ok(());
        };
        let missing = files
            .iter()
            .filter(|(_, meta)| !self.cache.blob(&meta.etag).is_file());
        let sizes: BTreeMap<&str, u64> = missing
            .map(|(_, meta)| {
                let there = download::partial_len(&self.cache, meta);
                (meta.etag.as_str(), meta.size.saturating_sub(there))
            })
            .collect();
        let room = sizes.values().fold(0, |sum, size| size.saturating_add(sum));
        self.cache.check_room(room)?;
        for (file, meta) in &files {
            download::fetch(client, &self.cache, commit, file, meta)?;
            self.cache.link(commit, file, &meta.etag)?;
        }
        Ok(())
    }

    /// The files of the safetensors checkpoint that the text decoder needs.
    fn checkpoint(&self) -> Result<Vec<String>> {
        let commit = self.commit()?;
        if let Some(meta) = self.look_up(INDEX, false)? {
            self.take(vec![(INDEX.to_string(), meta)])?;
        }
        let index = self.cache.snapshot(commit).join(INDEX);
        if index.is_file() {
            return text_shards(&index);
        }
        Ok(vec![SINGLE.to_string()])
    }
}

/// The shards that hold tensors of the text decoder, sorted.
fn text_shards(index: &Path) -> Result<Vec<String>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }
    let place = || index.display().to_string();
    let text = bounded_file::read(index, LARGEST_INDEX)?.unwrap_or_default();
    let map = serde_json::from_str::<Index>(&text)
        .with_context(place)?
        .weight_map;
    let mut shards = BTreeSet::new();
    for (tensor, file) in map {
        // Refused whether the tensor is wanted or not: nobody means well with such a name.
        let plain = plain_path(Path::new(&file))
            .with_context(|| format!("{}: puts {tensor} into {file:?}", place()))?;
        if Weights::wants(&tensor) {
            shards.insert(plain);
        }
    }
    if shards.is_empty() {
        bail!("{}: no tensor is of a text decoder", place());
    }
    Ok(shards.into_iter().collect())
}

/// What is read whole, unlike weights.
fn is_text(file: &str) -> bool {
    [".json", ".jinja"].iter().any(|end| file.ends_with(end))
}

/// A path that leads nowhere but into the repository, with `/` between its parts.
fn plain_path(path: &Path) -> Result<String> {
    let part = |part| match part {
        Component::Normal(name) => name
            .to_str()
            .filter(|name| !name.contains(['\\', ':']) && !name.contains(char::is_control)),
        _ => None,
    };
    let parts: Option<Vec<&str>> = path.components().map(part).collect();
    match parts {
        Some(parts) if !parts.is_empty() => Ok(parts.join("/")),
        _ => bail!("hub: {path:?} is no name in a repository, want a relative path without .."),
    }
}

fn check_model_id(id: &str) -> Result<()> {
    let plain = |part: &str| {
        let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        !part.is_empty() && part.chars().all(known) && !part.starts_with('.')
    };
    let parts: Vec<&str> = id.split('/').collect();
    if parts.len() > 2 || !parts.into_iter().all(plain) || id.contains("--") || id.contains("..") {
        bail!("--model-id is {id:?}, want owner/model as google/gemma-4-31b-it");
    }
    Ok(())
}
