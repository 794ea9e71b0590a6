//! GGUF files made of checkpoints, and altered.

use crate::common::trained_model;
use crate::example_quantize_convert::Plan;
use crate::example_quantize_write::Meta;
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

/// Sets the value of a key, or removes it.
pub fn set(plan: &mut Plan, key: &str, value: Option<Meta>) {
    plan.metadata.retain(|(name, _)| name != key);
    plan.metadata
        .extend(value.map(|value| (key.to_string(), value)));
}
