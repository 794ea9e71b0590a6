//! One file of a checkpoint, mapped.

use super::super::file;
use super::fault;
use candle::safetensors::MmapedSafetensors;
use candle::{bail, Result};
use safetensors::tensor::TensorView;
use safetensors::Dtype;
use std::path::{Path, PathBuf};

pub(super) struct Shard {
    pub(super) path: PathBuf,
    pub(super) map: MmapedSafetensors,
}

pub(super) struct Entry {
    pub(super) shard: usize,
    /// As the file has it, prefix included.
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: usize,
}

impl Shard {
    pub(super) fn open(path: &Path) -> Result<Self> {
        if let Some(fault) = file::fault(path, u64::MAX) {
            bail!("weights: {}: {fault}", path.display())
        }
        if let Some(fault) = fault::find(path) {
            bail!("weights: {}: {fault}", path.display())
        }
        // SAFETY: the mapping is sound while the file is left as it is, which `Weights` asks of its user.
        let map = match unsafe { MmapedSafetensors::new(path) } {
            Ok(map) => map,
            Err(error) => bail!("weights: {}: {error}", path.display()),
        };
        let path = path.to_path_buf();
        Ok(Self { path, map })
    }

    /// The tensors of this file, sorted by name, so that errors come in the same order every time.
    pub(super) fn entries(&self, shard: usize) -> Vec<Entry> {
        let mut tensors = self.map.tensors();
        tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
        let entry = |(name, view): (String, TensorView)| Entry {
            shard,
            name,
            dtype: view.dtype(),
            shape: view.shape().to_vec(),
            bytes: view.data().len(),
        };
        tensors.into_iter().map(entry).collect()
    }
}

pub(super) fn places(shards: &[Shard]) -> String {
    let paths: Vec<_> = shards
        .iter()
        .map(|s| s.path.display().to_string())
        .collect();
    match paths.as_slice() {
        [first, second, third, more @ ..] if !more.is_empty() => {
            format!("{first}, {second}, {third} and {} more files", more.len())
        }
        _ => paths.join(", "),
    }
}
