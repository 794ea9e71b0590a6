//! `model.safetensors.index.json`: which shard holds which tensor.

use super::super::{file, strict::Object};
use super::{refuse, Shard, Weights};
use candle::{bail, Result};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::path::Path;

pub(super) const FILE: &str = "model.safetensors.index.json";

#[derive(Deserialize)]
struct Index {
    /// Tensor to file name.
    weight_map: Object<String>,
}

/// Opens the shards that the index names, and checks that it and they agree on every tensor. A shard without a tensor of the
/// text decoder may be left out of the folder.
pub(super) fn open_shards(index: &Path) -> Result<Vec<Shard>> {
    let weight_map = read(index)?;
    let wanted: BTreeSet<&String> = weight_map
        .iter()
        .filter(|(tensor, _)| Weights::wants(tensor))
        .map(|(_, file)| file)
        .collect();
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
            if !wanted.contains(file) {
                continue;
            }
            bail!(
                "weights: {}: puts {tensor} into {file}, which is not beside the index",
                index.display()
            )
        }
        shards.insert(file, Shard::open(&path)?);
    }
    let mut faults = Vec::new();
    for (tensor, file) in &weight_map {
        let Some(shard) = shards.get(file.as_str()) else {
            continue;
        };
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
    let files: BTreeSet<&str> = weight_map.values().map(String::as_str).collect();
    for name in shards_beside(index)? {
        if !files.contains(name.as_str()) {
            let path = index.with_file_name(name);
            faults.push(format!(
                "{}: a shard beside {FILE}, which does not list it",
                path.display()
            ));
        }
    }
    refuse("weights", faults)?;
    Ok(shards.into_values().collect())
}

/// Files in the folder of the index that go by the name of its shards, sorted.
fn shards_beside(index: &Path) -> Result<BTreeSet<String>> {
    let folder = match index.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) => bail!("weights: {}: {error}", folder.display()),
    };
    // A name that is no UTF-8 is not of this form.
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let shard = |name: &String| {
        let middle = name.strip_prefix("model-");
        middle
            .and_then(|rest| rest.strip_suffix(".safetensors"))
            .and_then(|numbers| numbers.split_once("-of-"))
            .is_some()
    };
    Ok(names.filter(shard).collect())
}

fn read(index: &Path) -> Result<BTreeMap<String, String>> {
    let place = index.display();
    if let Some(fault) = file::fault(index, file::LARGEST_INDEX) {
        bail!("weights: {place}: {fault}")
    }
    let parsed = match std::fs::read(index) {
        Ok(text) => serde_json::from_slice::<Index>(&text),
        Err(error) => bail!("weights: {place}: {error}"),
    };
    match parsed.map(|index| index.weight_map.0) {
        Ok(weight_map) if !weight_map.is_empty() => Ok(weight_map),
        Ok(_) => bail!("weights: {place}: weight_map lists no tensor"),
        Err(error) => bail!("weights: {place}: {error}"),
    }
}

/// Whether the name cannot lead out of the index's folder, on any platform.
fn is_plain(name: &str) -> bool {
    Path::new(name).file_name() == Some(OsStr::new(name)) && !name.contains(['/', '\\', ':'])
}
