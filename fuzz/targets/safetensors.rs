//! A folder of a checkpoint: the index of its shards, and up to three shards.
//!
//! The input is files divided by bytes 0xFF, which no JSON has: first the index, nothing for a folder without one. A file that
//! begins with `{` is a header alone, for which the length before it and the data after it are made up.
#![no_main]

use candle::{DType, Device};
use gem::models::gemma4::{Config, Weights};
use libfuzzer_sys::fuzz_target;
use std::path::Path;
use std::sync::LazyLock;

static CONFIG: LazyLock<Config> =
    LazyLock::new(|| Config::from_json(include_str!("../seeds/config/smallest.json")).unwrap());

/// More data than any seed has.
const MOST_DATA: u64 = 1 << 16;

fuzz_target!(|input: &[u8]| {
    let mut files = input.split(|byte| *byte == 0xff);
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    let index = files.next().unwrap_or_default();
    if !index.is_empty() {
        write("model.safetensors.index.json", index);
    }
    for (name, bytes) in ["model.safetensors", "b.safetensors", "c.safetensors"]
        .into_iter()
        .zip(files)
    {
        write(name, &file(bytes));
    }
    open(folder.path());
});

fn open(folder: &Path) {
    let Ok(weights) = Weights::open_dir(folder) else {
        return;
    };
    assert!(weights.bytes_on_disk() as u64 <= 3 * MOST_DATA + (1 << 20));
    let shapes = CONFIG.tensor_shapes();
    let checked = weights.check(&shapes);
    for dtype in [DType::F32, DType::F16] {
        let Ok(weights) = Weights::open_dir(folder) else {
            panic!("opened once, not twice");
        };
        let vb = weights.var_builder(dtype, &Device::Cpu);
        for (name, shape) in &shapes {
            match vb.get(shape.as_slice(), name) {
                Ok(tensor) => assert_eq!((tensor.dims(), tensor.dtype()), (&shape[..], dtype)),
                // What was checked can be read, unless its values do not fit.
                Err(e) => assert!(checked.is_err() || dtype == DType::F16, "{name}: {e}"),
            }
        }
    }
}

fn file(bytes: &[u8]) -> Vec<u8> {
    if bytes.first() != Some(&b'{') {
        return bytes.to_vec();
    }
    let header: serde_json::Value = serde_json::from_slice(bytes).unwrap_or_default();
    let ends = header.as_object().into_iter().flat_map(|tensors| {
        let end = |tensor: &serde_json::Value| tensor["data_offsets"][1].as_u64();
        tensors.values().filter_map(end)
    });
    let data = ends.max().unwrap_or(0).min(MOST_DATA) as usize;
    let mut file = (bytes.len() as u64).to_le_bytes().to_vec();
    file.extend(bytes);
    file.resize(file.len() + data, 0x3c);
    file
}
