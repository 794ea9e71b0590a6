//! A checkpoint on disk: mapped and checked as a whole before a weight is read.

mod fault;
mod index;
mod shard;

use candle::{bail, DType, Device, Result, Shape, Tensor};
use candle_nn::var_builder::{SimpleBackend, VarBuilder};
use safetensors::Dtype;
use shard::{places, Entry, Shard};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// Before the names of the text decoder: in the published layout, and in a text-only export.
const TEXT_PREFIXES: [&str; 2] = ["model.language_model.", "model."];

/// Parts of the published checkpoints that the text decoder has no use for.
const OTHER_PARTS: [&str; 5] = [
    "model.vision_tower.",
    "model.embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
    "model.multi_modal_projector.",
];

const EMBEDDING: &str = "embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// An opened safetensors checkpoint of Gemma 4, in one file or in shards.
///
/// The files are memory-mapped, and only their headers are read until the [`VarBuilder`] asks for a tensor. They must
/// not be changed or cut short while they are open: the process would read the change, or be killed.
///
/// Tensors of the text decoder go by the name without its prefix (`layers.0.layer_scalar`), whether the checkpoint writes
/// `model.language_model.` (the published layout) or `model.` (a text-only export). Vision and audio tensors are left
/// alone; any other name is an error.
pub struct Weights {
    prefix: &'static str,
    shards: Vec<Shard>,
    /// By name without prefix; the head, if the checkpoint has its own, by its whole name.
    tensors: BTreeMap<String, Entry>,
}

impl Weights {
    /// Opens the checkpoint made of exactly these files.
    ///
    /// # Errors
    ///
    /// Names the file, and where it can the tensor, if a file is unreadable or truncated, its header lies, a name is in two
    /// files, or a tensor belongs to no known part of the model.
    pub fn open(files: &[impl AsRef<Path>]) -> Result<Self> {
        if files.is_empty() {
            bail!("weights: no file given")
        }
        let shards: Result<Vec<_>> = files.iter().map(|f| Shard::open(f.as_ref())).collect();
        Self::from_shards(shards?)
    }

    /// Whether the text decoder has a use for a tensor of this name in a published checkpoint; `false` for vision and audio.
    pub fn wants(name: &str) -> bool {
        !OTHER_PARTS.iter().any(|part| name.starts_with(part))
    }

    /// Opens the checkpoint in a folder: the shards of `model.safetensors.index.json` if there is one, else
    /// `model.safetensors`.
    ///
    /// # Errors
    ///
    /// As [`Weights::open`]; further if the index names a file outside the folder, does not agree with its shards on every
    /// tensor, or does not list a `model-*-of-*.safetensors` that lies beside it. A shard of vision or audio alone may be
    /// missing.
    pub fn open_dir(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let (index, single) = (dir.join(index::FILE), dir.join("model.safetensors"));
        if index.is_file() {
            Self::from_shards(index::open_shards(&index)?)
        } else if single.is_file() {
            Self::open(&[single])
        } else {
            bail!(
                "weights: found no checkpoint, looked for {} and {}",
                index.display(),
                single.display()
            )
        }
    }

    fn from_shards(shards: Vec<Shard>) -> Result<Self> {
        let mut entries: BTreeMap<String, Entry> = BTreeMap::new();
        for (shard, Shard { path, .. }) in shards.iter().enumerate() {
            for entry in shards[shard].entries(shard) {
                if let Some(twin) = entries.get(&entry.name) {
                    bail!(
                        "weights: {} is in two files, {} and {}",
                        entry.name,
                        shards[twin.shard].path.display(),
                        path.display()
                    )
                }
                entries.insert(entry.name.clone(), entry);
            }
        }
        let has = |prefix: &&str| entries.keys().any(|name| name.starts_with(prefix));
        let Some(prefix) = TEXT_PREFIXES.into_iter().find(has) else {
            bail!(
                "weights: no tensor of {} starts with {}",
                places(&shards),
                TEXT_PREFIXES.join(" or ")
            )
        };
        let (mut tensors, mut strays) = (BTreeMap::new(), Vec::new());
        for (name, entry) in entries {
            if !Self::wants(&name) {
                continue;
            } else if let Some(short) = name.strip_prefix(prefix) {
                tensors.insert(short.to_string(), entry);
            } else if name == HEAD {
                tensors.insert(name, entry);
            } else {
                let file = shards[entry.shard].path.display();
                strays.push(format!("{name} in {file}: belongs to no known part"));
            }
        }
        refuse("weights", strays)?;
        Ok(Self {
            prefix,
            shards,
            tensors,
        })
    }

    /// Compares the checkpoint with the names (without prefix) and shapes of the model, before any of it is loaded.
    ///
    /// A `lm_head.weight` that is not expected is accepted if it is the embedding byte for byte: the model's head is tied to it.
    ///
    /// # Errors
    ///
    /// One error for all that is wrong (the first eight in words): tensors that are missing, not expected, of another
    /// shape, or stored as anything but BF16, F16 or F32.
    pub fn check(&self, expected: &[(String, Vec<usize>)]) -> Result<()> {
        let mut faults = Vec::new();
        for (name, want) in expected {
            match self.tensors.get(name) {
                None => faults.push(self.missing(name)),
                Some(entry) if entry.shape != *want => faults.push(format!(
                    "{}: has shape {:?}, want {want:?}",
                    self.place(entry),
                    entry.shape
                )),
                Some(entry) => faults.extend(self.unreadable(entry)),
            }
        }
        let expected: BTreeSet<&String> = expected.iter().map(|(name, _)| name).collect();
        let tied_head = self
            .tensors
            .get(HEAD)
            .filter(|_| !expected.contains(&HEAD.to_string()));
        for (name, entry) in &self.tensors {
            if !expected.contains(name) && name != HEAD {
                faults.push(format!("{}: not a tensor of this model", self.place(entry)));
            }
        }
        refuse("weights", faults)?;
        match tied_head {
            Some(head) => self.check_head(head),
            None => Ok(()),
        }
    }

    fn check_head(&self, head: &Entry) -> Result<()> {
        let embedding = self.entry(EMBEDDING)?;
        let same_kind = head.dtype == embedding.dtype && head.shape == embedding.shape;
        if !same_kind || self.view(head)?.data() != self.view(embedding)?.data() {
            bail!(
                "weights: {} is not {}, but the head of this model is tied to it",
                self.place(head),
                self.place(embedding)
            )
        }
        Ok(())
    }

    /// Bytes of the text decoder's tensors in the files.
    pub fn bytes_on_disk(&self) -> usize {
        self.tensors.values().map(|entry| entry.bytes).sum()
    }

    /// Hands the tensors out by their names without prefix, as `dtype` on `device`.
    ///
    /// Its errors name the tensor and the file; one is that a value is too large for F16.
    pub fn var_builder(self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(self), dtype, device.clone())
    }

    fn entry(&self, name: &str) -> Result<&Entry> {
        match self.tensors.get(name) {
            Some(entry) => Ok(entry),
            None => bail!("weights: {}", self.missing(name)),
        }
    }

    fn missing(&self, name: &str) -> String {
        let prefix = if name == HEAD { "" } else { self.prefix };
        format!("{prefix}{name}: missing from {}", places(&self.shards))
    }

    fn view(&self, entry: &Entry) -> Result<safetensors::tensor::TensorView<'_>> {
        self.shards[entry.shard].map.get(&entry.name)
    }

    fn place(&self, entry: &Entry) -> String {
        format!(
            "{} in {}",
            entry.name,
            self.shards[entry.shard].path.display()
        )
    }

    fn unreadable(&self, entry: &Entry) -> Option<String> {
        match entry.dtype {
            Dtype::BF16 | Dtype::F16 | Dtype::F32 => None,
            other => Some(format!(
                "{}: is stored as {other:?}, want BF16, F16 or F32",
                self.place(entry)
            )),
        }
    }
}

impl SimpleBackend for Weights {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
        let entry = self.entry(name)?;
        if entry.shape != shape.dims() {
            bail!(
                "weights: {}: has shape {:?}, want {:?}",
                self.place(entry),
                entry.shape,
                shape.dims()
            )
        }
        self.get_unchecked(name, dtype, device)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let entry = self.entry(name)?;
        refuse("weights", self.unreadable(entry).into_iter().collect())?;
        let read = || -> Result<Tensor> {
            let stored = self.shards[entry.shard].map.load(&entry.name, device)?;
            stored.to_dtype(dtype)
        };
        let tensor = match read() {
            Ok(tensor) => tensor,
            Err(error) => bail!("weights: {}: {error}", self.place(entry)),
        };
        // BF16 and F32 reach far beyond F16, whose infinities would only show as NaN logits.
        if dtype == DType::F16 && entry.dtype != Dtype::F16 && entry.bytes > 0 {
            let largest = tensor.abs()?.max_all()?.to_dtype(DType::F32)?;
            if largest.to_scalar::<f32>()?.is_infinite() {
                bail!(
                    "weights: {}: holds a value too large for F16, use BF16 or F32",
                    self.place(entry)
                )
            }
        }
        Ok(tensor)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }
}

/// An error that lists the faults, if there are any.
pub(super) fn refuse(what: &str, faults: Vec<String>) -> Result<()> {
    const SHOWN: usize = 8;
    match faults.as_slice() {
        [] => Ok(()),
        [one] => bail!("{what}: {one}"),
        many => {
            let mut text = format!("{what}: {} faults", many.len());
            for fault in many.iter().take(SHOWN) {
                text += &format!("\n  {fault}");
            }
            if many.len() > SHOWN {
                text += &format!("\n  and {} more", many.len() - SHOWN);
            }
            bail!("{text}")
        }
    }
}
