//! Runs the plans that Metal would be given on the text of the kernels, on the CPU.

use candle::{DType, Device, Tensor};
use gem::attention::gpu::{plan, Route};
use gem::attention::plan::Partitions;
use gem::attention::AttentionGeometry;
use gem::backend::plan::{Binding, Pass, Plan, Slot, Source, GEM_H};
use half::{bf16, f16};
use msl::{Buffer, Dispatch, Mode, Module, Stats};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

/// The kernels of a source, compiled once a process.
fn module(source: Source, mode: Mode) -> Arc<Module> {
    type Modules = HashMap<(Source, bool), Arc<Module>>;
    static MODULES: OnceLock<Mutex<Modules>> = OnceLock::new();
    let mut modules = MODULES.get_or_init(Default::default).lock().unwrap();
    let compiled = || Arc::new(compile(source, source.text(), &[], mode).unwrap());
    modules
        .entry((source, mode == Mode::Checked))
        .or_insert_with(compiled)
        .clone()
}

/// These kernels (all of them, if none is named) of `text`, which stands for the text of `source`.
pub fn compile(source: Source, text: &str, entries: &[&str], mode: Mode) -> msl::Result<Module> {
    Module::compile(&[("gem.h", GEM_H), (source.file(), text)], entries, mode)
}

/// The whole storage behind a tensor, whatever view of it the tensor is: plans carry the offsets.
fn storage(t: &Tensor) -> Buffer {
    let (storage, _) = t.storage_and_layout();
    match &*storage {
        candle::Storage::Cpu(candle::CpuStorage::F32(values)) => Buffer::new(values),
        candle::Storage::Cpu(candle::CpuStorage::F16(values)) => Buffer::new(values),
        candle::Storage::Cpu(candle::CpuStorage::BF16(values)) => Buffer::new(values),
        candle::Storage::Cpu(candle::CpuStorage::U8(values)) => Buffer::new(values),
        _ => panic!("{:?} on {:?}", t.dtype(), t.device()),
    }
}

/// One attention call on one route.
pub struct Call<'a> {
    pub qkv: [&'a Tensor; 3],
    pub scale: f32,
    pub partitions: usize,
    pub causal: bool,
    pub route: Route,
}

pub struct Outcome {
    /// `(batch, q_heads, q_len, 512)` in the dtype of q.
    pub out: Tensor,
    /// Of each pass.
    pub stats: Vec<Stats>,
}

impl Call<'_> {
    pub fn plan(&self) -> candle::Result<Plan> {
        let [q, k, v] = self.qkv;
        let geometry = AttentionGeometry::new("attention_d512", q, k, v, self.causal)?;
        let partitions = Partitions::new(geometry.kv_len, self.partitions)?;
        plan(&geometry, &partitions, self.scale, self.route)
    }

    pub fn run(&self, mode: Mode) -> msl::Result<Outcome> {
        self.outcome(run(&self.plan().unwrap(), &self.qkv, mode)?)
    }

    /// As [`run_plan`], on the inputs of this call.
    pub fn run_plan(
        &self,
        plan: &Plan,
        mode: Mode,
        modules: impl Fn(&Pass) -> Arc<Module>,
    ) -> msl::Result<Outcome> {
        self.outcome(run_plan(plan, &self.qkv, mode, modules)?)
    }

    fn outcome(&self, (mut outputs, stats): (Vec<Tensor>, Vec<Stats>)) -> msl::Result<Outcome> {
        let out = outputs.remove(0).reshape(self.qkv[0].shape()).unwrap();
        Ok(Outcome { out, stats })
    }
}

/// Runs every pass of a plan on the kernels of their sources, as [`run_plan`].
pub fn run(plan: &Plan, inputs: &[&Tensor], mode: Mode) -> msl::Result<(Vec<Tensor>, Vec<Stats>)> {
    run_plan(plan, inputs, mode, |pass| module(pass.source, mode))
}

/// Runs every pass of a plan on the kernels that `modules` gives for it; checked passes run under two schedules, and must
/// write every byte of the outputs. Returns the outputs, flat, and what each pass did.
pub fn run_plan(
    plan: &Plan,
    inputs: &[&Tensor],
    mode: Mode,
    modules: impl Fn(&Pass) -> Arc<Module>,
) -> msl::Result<(Vec<Tensor>, Vec<Stats>)> {
    let inputs: Vec<Buffer> = inputs.iter().map(|t| storage(t)).collect();
    let uninitialised = |bytes: usize| Some(Buffer::uninitialised(bytes));
    let mut made = Made {
        scratch: plan
            .scratch
            .iter()
            .map(|&bytes| uninitialised(bytes as usize))
            .collect(),
        outputs: plan
            .outputs
            .iter()
            .map(|output| uninitialised(output.elements * output.dtype.size_in_bytes()))
            .collect(),
    };
    let mut stats = vec![];
    for pass in &plan.passes {
        // What the pass writes is lent to the dispatch and comes back after it.
        let written: Vec<Slot> = pass.buffers.iter().filter_map(|b| written(*b)).collect();
        let mut lent: Vec<Buffer> = written
            .iter()
            .map(|&slot| made.held(slot).take().unwrap())
            .collect();
        let mut lent_out = lent.iter_mut();
        let mut dispatch = Dispatch::new(pass.entry, pass.threadgroups, [pass.threads, 1, 1]);
        for (index, binding) in (0..).zip(&pass.buffers) {
            dispatch = match *binding {
                Binding::Read(Slot::Input(input)) => dispatch.input(index, &inputs[input]),
                Binding::Read(Slot::Scratch(slot)) => {
                    dispatch.input(index, made.scratch[slot].as_ref().unwrap())
                }
                Binding::Read(Slot::Output(slot)) => {
                    dispatch.input(index, made.outputs[slot].as_ref().unwrap())
                }
                Binding::Write(_) => dispatch.output(index, lent_out.next().unwrap()),
                Binding::Update(_) => dispatch.in_out(index, lent_out.next().unwrap()),
            };
        }
        dispatch = dispatch.bytes(pass.buffers.len() as u32, &pass.params);
        if pass.threadgroup_bytes > 0 {
            dispatch = dispatch.threadgroup_memory(pass.threadgroup_bytes);
        }
        let module = modules(pass);
        stats.push(match mode {
            Mode::Checked => module.run_all_schedules(&mut dispatch, &msl::SEEDS[..2])?,
            Mode::Fast => module.run(&mut dispatch)?,
        });
        for (&slot, buffer) in written.iter().zip(lent) {
            *made.held(slot) = Some(buffer);
        }
    }
    let outputs = plan.outputs.iter().zip(&made.outputs);
    let tensors = outputs.enumerate().map(|(i, (output, buffer))| {
        let buffer = buffer.as_ref().unwrap();
        if mode == Mode::Checked {
            assert_eq!(buffer.unwritten_bytes(), 0, "output {i}");
        }
        tensor(buffer, output.dtype)
    });
    Ok((tensors.collect(), stats))
}

fn written(binding: Binding) -> Option<Slot> {
    match binding {
        Binding::Read(_) => None,
        Binding::Write(slot) | Binding::Update(slot) => Some(slot),
    }
}

/// Buffers that the plan makes; each is there but while it is lent.
struct Made {
    scratch: Vec<Option<Buffer>>,
    outputs: Vec<Option<Buffer>>,
}

impl Made {
    fn held(&mut self, slot: Slot) -> &mut Option<Buffer> {
        match slot {
            Slot::Scratch(slot) => &mut self.scratch[slot],
            Slot::Output(slot) => &mut self.outputs[slot],
            Slot::Input(input) => panic!("a pass writes input {input}"),
        }
    }
}

fn tensor(buffer: &Buffer, dtype: DType) -> Tensor {
    fn flat<T: candle::WithDType + msl::Element>(buffer: &Buffer) -> candle::Result<Tensor> {
        let values = buffer.to_vec::<T>();
        let len = values.len();
        Tensor::from_vec(values, len, &Device::Cpu)
    }
    match dtype {
        DType::F16 => flat::<f16>(buffer),
        DType::BF16 => flat::<bf16>(buffer),
        DType::U8 => flat::<u8>(buffer),
        _ => flat::<f32>(buffer),
    }
    .unwrap()
}
