//! A GGUF file: an error, or a model that loads and answers.
#![no_main]

use candle::{DType, Device, Tensor};
use gem::models::gemma4::{AttentionPath, Gguf, MemoryDemand, MemoryPlan, Model};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    std::fs::write(&path, bytes).unwrap();
    let Ok(gguf) = Gguf::open(&path) else {
        return;
    };
    let _ = (gguf.types(), gguf.chat_template(), gguf.tokenizer_json());
    let planned = gguf.planned_bytes(DType::F32);
    let demand = MemoryDemand {
        path: AttentionPath::Fused,
        dtype: DType::F32,
        on_cpu: true,
        context: 64,
        chunk: 64,
        weight_bytes: Some(planned as u64),
        marks: true,
    };
    MemoryPlan::new(gguf.config(), &demand);
    let checked = gguf.check();
    let model = match Model::from_gguf(&gguf, DType::F32, &Device::Cpu) {
        Ok(model) => model,
        Err(e) => return assert!(checked.is_err(), "{e}"),
    };
    if checked.is_err() {
        return;
    }
    let ids = Tensor::new(&[[0u32, 0]], &Device::Cpu).unwrap();
    let mut cache = model.new_cache(AttentionPath::Reference).unwrap();
    let logits = model.forward(&ids, &mut cache).unwrap();
    assert_eq!(logits.dims(), [1, gguf.config().vocab_size]);
});
