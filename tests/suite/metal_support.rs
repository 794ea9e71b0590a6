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
        self.run_plan(&self.plan().unwrap(), mode, |pass| {
            module(pass.source, mode)
        })
    }

    /// Runs every pass of a plan on the kernels that `modules` gives for it; checked passes run under two schedules.
    pub fn run_plan(
        &self,
        plan: &Plan,
        mode: Mode,
        modules: impl Fn(&Pass) -> Arc<Module>,
    ) -> msl::Result<Outcome> {
        let q = self.qkv[0];
        let inputs = self.qkv.map(storage);
        let mut scratch: Vec<_> = plan
            .scratch
            .iter()
            .map(|&bytes| Some(Buffer::uninitialised(bytes as usize)))
            .collect();
        let mut output = Some(Buffer::uninitialised(
            q.elem_count() * q.dtype().size_in_bytes(),
        ));
        let mut stats = vec![];
        for pass in &plan.passes {
            // What the pass writes is lent to the dispatch and comes back after it.
            let written: Vec<Slot> = pass.buffers.iter().filter_map(|b| written(*b)).collect();
            let mut lent: Vec<Buffer> = written
                .iter()
                .map(|&slot| held(slot, &mut scratch, &mut output).take().unwrap())
                .collect();
            let mut lent_out = lent.iter_mut();
            let mut dispatch = Dispatch::new(pass.entry, pass.threadgroups, [pass.threads, 1, 1]);
            for (index, binding) in (0..).zip(&pass.buffers) {
                dispatch = match *binding {
                    Binding::Read(Slot::Input(input)) => dispatch.input(index, &inputs[input]),
                    Binding::Read(Slot::Scratch(slot)) => {
                        dispatch.input(index, scratch[slot].as_ref().unwrap())
                    }
                    Binding::Read(Slot::Output) => dispatch.input(index, output.as_ref().unwrap()),
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
                *held(slot, &mut scratch, &mut output) = Some(buffer);
            }
        }
        let output = output.unwrap();
        if mode == Mode::Checked {
            assert_eq!(output.unwritten_bytes(), 0, "{:?}", self.route);
        }
        Ok(Outcome {
            out: tensor(&output, q),
            stats,
        })
    }
}

fn written(binding: Binding) -> Option<Slot> {
    match binding {
        Binding::Read(_) => None,
        Binding::Write(slot) | Binding::Update(slot) => Some(slot),
    }
}

fn held<'a>(
    slot: Slot,
    scratch: &'a mut [Option<Buffer>],
    output: &'a mut Option<Buffer>,
) -> &'a mut Option<Buffer> {
    match slot {
        Slot::Scratch(slot) => &mut scratch[slot],
        Slot::Output => output,
        Slot::Input(input) => panic!("a pass writes input {input}"),
    }
}

fn tensor(buffer: &Buffer, like: &Tensor) -> Tensor {
    let dims = like.dims();
    match like.dtype() {
        DType::F16 => Tensor::from_vec(buffer.to_vec::<f16>(), dims, &Device::Cpu),
        DType::BF16 => Tensor::from_vec(buffer.to_vec::<bf16>(), dims, &Device::Cpu),
        _ => Tensor::from_vec(buffer.to_vec::<f32>(), dims, &Device::Cpu),
    }
    .unwrap()
}
