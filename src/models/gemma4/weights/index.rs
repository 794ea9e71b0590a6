//! `model.safetensors.index.json`: which shard holds which tensor.

use super::{refuse, Shard};
use candle::{bail, Result};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;

pub(super) const FILE: &str = "model.safetensors.index.json";

#[derive(Deserialize)]
struct Index {
    /// Tensor to file name.
    weight_map: BTreeMap<String, String>,
}

/// Opens the shards that the index names, and checks that it and they agree on every tensor.
pub(super) fn open_shards(index: &Path) -> Result<Vec<Shard>> {
    let weight_map = read(index)?.weight_map;
    let mut shards: BTreeMap<&str, Shard> = BTreeMap::new();
    for (tensor, file) in &weight_map {
        if shards.contains_key(file.as_str()) {
            continue;
        }
        if !is_plain(file) {
            bail!(
                "weights: {}: puts {tensor} into {file:?}, want the name of a file beside the index",
                index.display()
            )
        }
        let path = index.with_file_name(file);
        if !path.is_file() {
            bail!(
                "weights: {}: puts {tensor} into {file}, which is not beside the index",
                index.display()
            )
        }
        shards.insert(file, Shard::open(&path)?);
    }
    let mut faults = Vec::new();
    for (tensor, file) in &weight_map {
        let shard = &shards[file.as_str()];
        if shard.map.get(tensor).is_err() {
            let path = shard.path.display();
            faults.push(format!("{tensor}: not in {path}, where {FILE} puts it"));
        }
    }
    for (file, shard) in &shards {
        for entry in shard.entries(0) {
            // A tensor that the index puts into another file is a fault here too: there it is missing or twice.
            if weight_map.get(&entry.name).map(String::as_str) != Some(file) {
                let (name, path) = (entry.name, shard.path.display());
                faults.push(format!("{name}: in {path}, where {FILE} does not put it"));
            }
        }
    }
    refuse("weights", faults)?;
    Ok(shards.into_values().collect())
}

fn read(index: &Path) -> Result<Index> {
    let place = index.display();
    let parsed = match std::fs::read(index) {
        Ok(text) => serde_json::from_slice::<Index>(&text),
        Err(error) => bail!("weights: {place}: {error}"),
    };
    match parsed {
        Ok(parsed) if !parsed.weight_map.is_empty() => Ok(parsed),
        Ok(_) => bail!("weights: {place}: weight_map lists no tensor"),
        Err(error) => bail!("weights: {place}: {error}"),
    }
}

/// Whether the name cannot lead out of the index's folder, on any platform.
fn is_plain(name: &str) -> bool {
    Path::new(name).file_name() == Some(OsStr::new(name)) && !name.contains(['/', '\\', ':'])
}
