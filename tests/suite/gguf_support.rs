//! GGUF files made of checkpoints, and altered.

use crate::common::trained_model;
use crate::example_quantize_convert::Plan;
use crate::example_quantize_write::{self as gguf_format, Meta};
use crate::example_replace::Replacement;
use candle::quantized::GgmlDType;
use gem::models::gemma4::Gguf;
use std::path::Path;
use tempfile::TempDir;

/// The trained model in a folder of its own, with these files beside it or in the place of its own.
pub fn trained_model_with(files: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "tokenizer.json", "model.safetensors"] {
        std::fs::copy(trained_model().join(name), dir.path().join(name)).unwrap();
    }
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    dir
}

pub fn made(folder: &Path, dtype: GgmlDType) -> (TempDir, Gguf) {
    altered(folder, dtype, |_| ())
}

/// With the plan changed before it is written.
pub fn altered(folder: &Path, dtype: GgmlDType, alter: impl FnOnce(&mut Plan)) -> (TempDir, Gguf) {
    let (dir, gguf) = try_altered(folder, dtype, alter);
    (dir, gguf.unwrap())
}

/// To a file that is not there yet.
pub fn write(plan: Plan, file: &Path) {
    let file = Replacement::of(file, "file", |_| false).unwrap();
    plan.write(file, |_| ()).unwrap();
}

pub fn try_altered(
    folder: &Path,
    dtype: GgmlDType,
    alter: impl FnOnce(&mut Plan),
) -> (TempDir, candle::Result<Gguf>) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let mut plan = Plan::new(folder, dtype).unwrap();
    alter(&mut plan);
    write(plan, &path);
    let gguf = Gguf::open(&path);
    (dir, gguf)
}

/// The bytes of a file with every tensor at the place that `place` gives it in the data, from its number, its place as written
/// and its length; `alignment` is what the file says.
pub fn placed(
    folder: &Path,
    dtype: GgmlDType,
    alignment: u32,
    place: impl Fn(usize, usize, usize) -> usize,
) -> (TempDir, candle::Result<Gguf>) {
    const KEY: &str = "general.alignment";
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let plan = || Plan::new(folder, dtype).unwrap();
    write(plan(), &path);
    let mut plan = plan();
    let written = std::fs::read(&path).unwrap();
    let written = &written[gguf_format::header(&plan.metadata, &plan.tensors).len()..];
    set(&mut plan, KEY, Some(Meta::U32(alignment)));
    let mut out = gguf_format::header(&plan.metadata, &[]);
    let at = out
        .windows(KEY.len())
        .position(|text| text == KEY.as_bytes());
    out.truncate(at.unwrap() + KEY.len() + 8);
    out[8..16].copy_from_slice(&(plan.tensors.len() as u64).to_le_bytes());
    let (mut data, mut from) = (Vec::new(), 0);
    for (i, tensor) in plan.tensors.iter().enumerate() {
        let bytes = &written[from..from + tensor.bytes()];
        let start = place(i, from, bytes.len());
        from += bytes.len().next_multiple_of(32);
        data.resize(data.len().max(start + bytes.len()), 0);
        data[start..start + bytes.len()].copy_from_slice(bytes);
        out.extend((tensor.name.len() as u64).to_le_bytes());
        out.extend(tensor.name.as_bytes());
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        let dims = tensor.shape.iter().rev();
        out.extend(dims.flat_map(|dim| (*dim as u64).to_le_bytes()));
        out.extend(gguf_format::kind(tensor.dtype).1.to_le_bytes());
        out.extend((start as u64).to_le_bytes());
    }
    out.resize(out.len().next_multiple_of(alignment as usize), 0);
    out.extend(data);
    std::fs::write(&path, out).unwrap();
    let gguf = Gguf::open(&path);
    (dir, gguf)
}

/// Sets the value of a key, or removes it.
pub fn set(plan: &mut Plan, key: &str, value: Option<Meta>) {
    plan.metadata.retain(|(name, _)| name != key);
    plan.metadata
        .extend(value.map(|value| (key.to_string(), value)));
}
