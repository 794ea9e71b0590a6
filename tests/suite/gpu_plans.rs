//! Plans for a real GPU: with their inputs, and what the harness makes of them, in files that `tests/gpu` runs.

use crate::attention_support::{inputs, SCALE};
use crate::metal_attention::routes;
use crate::metal_support::{run, Call};
use candle::{DType, IndexOp, Tensor};
use gem::attention::gpu::states::{self, StateSizes};
use gem::attention::gpu::{plan_states, Route};
use gem::attention::plan::Partitions;
use gem::attention::AttentionGeometry;
use gem::backend::plan::{Binding, Plan, Slot, Target};
use gem::AttentionD512;
use msl::Mode;
use serde_json::{json, Value};
use sha2::{Digest, Sha256};
use std::path::PathBuf;

/// Where they go: `target/gpu-plans`.
fn folder() -> PathBuf {
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    target.with_file_name("gpu-plans")
}

/// The storage behind a tensor as bytes, whatever view of it the tensor is.
fn storage(t: &Tensor) -> Vec<u8> {
    fn bytes<T: Copy, const N: usize>(values: &[T], f: fn(T) -> [u8; N]) -> Vec<u8> {
        values.iter().flat_map(|&x| f(x)).collect()
    }
    let (storage, _) = t.storage_and_layout();
    match &*storage {
        candle::Storage::Cpu(candle::CpuStorage::F32(v)) => bytes(v, f32::to_le_bytes),
        candle::Storage::Cpu(candle::CpuStorage::F16(v)) => bytes(v, half::f16::to_le_bytes),
        candle::Storage::Cpu(candle::CpuStorage::BF16(v)) => bytes(v, half::bf16::to_le_bytes),
        _ => panic!("{:?}", t.dtype()),
    }
}

fn binding(binding: &Binding) -> Value {
    let how = match binding {
        Binding::Read(_) => "read",
        Binding::Write(_) => "write",
        Binding::Update(_) => "update",
    };
    match binding.slot() {
        Slot::Input(i) => json!([how, "input", i]),
        Slot::Output(i) => json!([how, "output", i]),
        Slot::Scratch(i) => json!([how, "scratch", i]),
    }
}

fn as_json(plan: &Plan) -> Value {
    let passes: Vec<Value> = plan
        .passes
        .iter()
        .map(|pass| {
            json!({
                "source": pass.source.file(),
                "entry": pass.entry,
                "buffers": pass.buffers.iter().map(binding).collect::<Vec<_>>(),
                "params": pass.params,
                "threadgroups": pass.threadgroups,
                "threads": pass.threads,
                "threadgroup_bytes": pass.threadgroup_bytes,
            })
        })
        .collect();
    let outputs: Vec<Value> = plan
        .outputs
        .iter()
        .map(|output| json!({"dtype": output.dtype.as_str(), "elements": output.elements}))
        .collect();
    json!({"outputs": outputs, "scratch": plan.scratch, "passes": passes})
}

/// Writes cases one after the other.
struct Writer {
    folder: PathBuf,
    cases: Vec<Value>,
}

impl Writer {
    fn new() -> Self {
        let folder = folder();
        std::fs::create_dir_all(&folder).unwrap();
        Self {
            folder,
            cases: vec![],
        }
    }

    fn add(&mut self, name: String, plan: &Plan, inputs: &[&Tensor]) {
        let (outputs, _) = run(plan, inputs, Mode::Fast).unwrap();
        // Named by content: most cases share their inputs.
        let file = |t: &Tensor| {
            let bytes = storage(t);
            let digest = Sha256::digest(&bytes);
            let file = format!(
                "{:016x}.bin",
                u64::from_be_bytes(digest[..8].try_into().unwrap())
            );
            std::fs::write(self.folder.join(&file), bytes).unwrap();
            json!(file)
        };
        let case = json!({
            "name": name,
            "plan": as_json(plan),
            "inputs": inputs.iter().map(|t| file(t)).collect::<Vec<_>>(),
            "expected": outputs.iter().map(file).collect::<Vec<_>>(),
        });
        self.cases.push(case);
    }

    fn finish(self) {
        let text = serde_json::to_string(&self.cases).unwrap();
        std::fs::write(self.folder.join("cases.json"), text).unwrap();
        println!("{} cases in {}", self.cases.len(), self.folder.display());
    }
}

/// A view of a larger cache that holds NaN everywhere else.
fn view(t: &Tensor) -> Tensor {
    let (b, h, n, d) = t.dims4().unwrap();
    let cache = (Tensor::ones((b, h, n + 7, d), DType::F32, t.device()).unwrap() * f64::NAN)
        .unwrap()
        .to_dtype(t.dtype())
        .unwrap();
    let cache = cache
        .slice_assign(&[0..b, 0..h, 4..4 + n, 0..d], t)
        .unwrap();
    cache.i((.., .., 4..4 + n)).unwrap()
}

#[test]
#[ignore = "writes files for a machine with a GPU"]
fn plans_for_a_gpu() {
    let mut writer = Writer::new();
    // batch, query heads, KV heads, query rows, keys; partitions
    let shapes = [
        ((1, 8, 1, 1, 1), 1),
        ((1, 8, 1, 1, 3), 2),
        ((1, 8, 1, 1, 33), 3),
        ((1, 8, 1, 1, 100), 7),
        ((1, 8, 1, 1, 513), 8),
        ((2, 8, 4, 1, 31), 2),
        ((1, 6, 1, 1, 40), 4),
        ((1, 16, 1, 1, 40), 3),
        ((1, 2, 2, 1, 64), 33),
        ((1, 8, 2, 3, 40), 2),
        ((1, 4, 2, 17, 17), 2),
    ];
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (shape, partitions) in shapes {
            let [q, k, v] = inputs(7, shape)
                .unwrap()
                .map(|t| t.to_dtype(dtype).unwrap());
            let (k, v) = (view(&k), view(&v));
            for route in routes() {
                let call = Call {
                    qkv: [&q, &k, &v],
                    scale: SCALE,
                    partitions,
                    causal: true,
                    route,
                };
                // What a route has no use for, it refuses.
                if let Ok(plan) = call.plan() {
                    let name = format!("{route:?} {dtype:?} {shape:?} in {partitions}");
                    writer.add(name, &plan, &[&q, &k, &v]);
                }
            }
        }
    }
    let [q, k, v] = inputs(8, (1, 8, 2, 2, 50)).unwrap();
    let geometry = AttentionGeometry::new("attention_d512", &q, &k, &v, true).unwrap();
    let partitions = Partitions::new(50, 7).unwrap();
    let plan = plan_states(&geometry, &partitions, SCALE, Route::default()).unwrap();
    writer.add("states of 50 keys in 7".into(), &plan, &[&q, &k, &v]);

    let given = AttentionD512::new(SCALE)
        .partitions(7)
        .partials(&q, &k, &v)
        .unwrap();
    let tensors = [given.max(), given.denominator(), given.numerator()];
    let sizes = StateSizes {
        rows: 16,
        partitions: 7,
        dim: 512,
    };
    let starts = tensors.map(|t| t.layout().start_offset() as u64);
    let finish = states::finish(Target::Metal, sizes, starts, DType::BF16).unwrap();
    writer.add("finish of given states".into(), &finish, &tensors);
    let merge = states::merge(Target::Metal, sizes, starts).unwrap();
    writer.add("merge of given states".into(), &merge, &tensors);
    let log_sum_exp = states::log_sum_exp(Target::Metal, 16, 7, [starts[0], starts[1]]).unwrap();
    writer.add(
        "log_sum_exp of given states".into(),
        &log_sum_exp,
        &tensors[..2],
    );
    writer.finish();
}
