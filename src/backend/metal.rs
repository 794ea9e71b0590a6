//! Runs any [`Plan`] on Metal; the only file that names it.

use super::plan::{Binding, Output, Pass, Plan, Slot, Source};
use super::receipt::{PipelineReceipt, Receipt};
use candle::backend::BackendStorage;
use candle::{bail, DType, MetalDevice, MetalError, MetalStorage, Result};
use candle_metal_kernels::metal::{Buffer, ComputePipeline, Library};
use candle_metal_kernels::MetalKernelError;
use objc2_metal::{
    MTLCompileOptions, MTLComputePipelineState, MTLDevice, MTLLanguageVersion,
    MTLMathFloatingPointFunctions, MTLMathMode, MTLSize,
};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

/// Every kernel is written for SIMD groups of 32.
const SIMD_WIDTH: usize = 32;

/// Encodes the passes of `plan` on the device of its inputs and returns its outputs.
///
/// # Errors
///
/// A kernel that does not compile, or a pipeline that this device can't launch as planned; nothing is encoded then.
pub fn run(plan: &Plan, inputs: &[&MetalStorage]) -> Result<Vec<MetalStorage>> {
    let Some(first) = inputs.first() else {
        bail!("metal: a plan without inputs has no device")
    };
    let device = first.device();
    let pipelines = plan
        .passes
        .iter()
        .map(|pass| pipeline(device, pass))
        .collect::<Result<Vec<_>>>()?;
    // Allocate before encoding: the encoder holds the lock that a zeroed allocation takes.
    let scratch = plan
        .scratch
        .iter()
        .map(|&bytes| scratch_buffer(device, bytes))
        .collect::<Result<Vec<_>>>()?;
    let outputs = plan
        .outputs
        .iter()
        .map(|output| {
            device
                .new_buffer_builder()
                .with_size_for(output.elements, output.dtype)
                .with_label("gem_output")
                .build()
        })
        .collect::<Result<Vec<_>>>()?;
    let guard = device.command_encoder()?;
    let encoder = guard.as_ref();
    for (pass, pipeline) in plan.passes.iter().zip(&pipelines) {
        // Nothing without the feature `metal-debug-labels`.
        candle_metal_kernels::debug_group!(encoder, "{}", pass.entry);
        encoder.set_compute_pipeline_state(pipeline);
        for (index, binding) in pass.buffers.iter().enumerate() {
            let held: Option<&Buffer> = match binding.slot() {
                Slot::Input(index) => inputs.get(index).map(|storage| storage.buffer()),
                Slot::Output(index) => outputs.get(index).map(|buffer| &**buffer),
                Slot::Scratch(index) => scratch.get(index).map(|buffer| &**buffer),
            };
            let Some(buffer) = held else {
                bail!(
                    "metal: {} binds {:?}, which the plan lacks",
                    pass.entry,
                    binding.slot()
                )
            };
            // Encoders are concurrent and buffers untracked: what a pass writes must be bound as written, or the next
            // pass does not wait for it.
            match binding {
                Binding::Read(_) => encoder.set_input_buffer(index, Some(buffer), 0),
                Binding::Write(_) | Binding::Update(_) => {
                    encoder.set_output_buffer(index, Some(buffer), 0)
                }
            }
        }
        encoder.set_bytes_directly(
            pass.buffers.len(),
            pass.params.len(),
            pass.params.as_ptr().cast(),
        );
        if pass.threadgroup_bytes > 0 {
            encoder.set_threadgroup_memory_length(0, pass.threadgroup_bytes as usize);
        }
        encoder.dispatch_thread_groups(size(pass.threadgroups), size([pass.threads, 1, 1]));
    }
    let storage = |(buffer, output): (Arc<Buffer>, &Output)| {
        MetalStorage::new(buffer, device.clone(), output.elements, output.dtype)
    };
    Ok(outputs
        .into_iter()
        .zip(&plan.outputs)
        .map(storage)
        .collect())
}

/// [`run`] of a plan with one output.
pub fn run_one(plan: &Plan, inputs: &[&MetalStorage]) -> Result<MetalStorage> {
    match <[MetalStorage; 1]>::try_from(run(plan, inputs)?) {
        Ok([output]) => Ok(output),
        Err(outputs) => bail!("metal: a plan has {} outputs, want one", outputs.len()),
    }
}

/// The pipelines of `plan` on `device`, each checked to be launchable. Errors as [`run`].
pub fn receipt(plan: &Plan, device: &MetalDevice) -> Result<Receipt> {
    let measured = |pass: &Pass| {
        let pipeline = pipeline(device, pass)?;
        let limits = Limits::of(device, &pipeline);
        Ok(PipelineReceipt {
            entry: pass.entry.to_string(),
            source: pass.source.digest(),
            simd_width: limits.simd_width,
            max_threads_per_threadgroup: limits.threads,
            threads_per_threadgroup: pass.threads as usize,
            threadgroups: pass.threadgroups,
            static_threadgroup_bytes: limits.static_bytes,
            dynamic_threadgroup_bytes: pass.threadgroup_bytes as usize,
            device_threadgroup_bytes: limits.device_bytes,
        })
    };
    Ok(Receipt {
        plan: plan.digest(),
        scratch_bytes: plan.scratch.clone(),
        pipelines: plan.passes.iter().map(measured).collect::<Result<_>>()?,
    })
}

/// What a pipeline can be launched with.
struct Limits {
    simd_width: usize,
    threads: usize,
    static_bytes: usize,
    device_bytes: usize,
}

impl Limits {
    fn of(device: &MetalDevice, pipeline: &ComputePipeline) -> Self {
        let raw = pipeline.as_ref();
        Self {
            simd_width: raw.threadExecutionWidth(),
            threads: raw.maxTotalThreadsPerThreadgroup(),
            static_bytes: raw.staticThreadgroupMemoryLength(),
            device_bytes: device.metal_device().as_ref().maxThreadgroupMemoryLength(),
        }
    }

    /// Metal drops a launch that is too large without a word and leaves the output as it was, so it is refused here.
    fn check(&self, pass: &Pass) -> Result<()> {
        let entry = pass.entry;
        if self.simd_width != SIMD_WIDTH {
            bail!(
                "metal: {entry} runs in SIMD groups of {}, want {SIMD_WIDTH}",
                self.simd_width
            );
        }
        if pass.threads as usize > self.threads {
            bail!(
                "metal: {entry} can run {} threads in a threadgroup on this device, want {}",
                self.threads,
                pass.threads
            );
        }
        let bytes = self.static_bytes + pass.threadgroup_bytes as usize;
        if bytes > self.device_bytes {
            bail!(
                "metal: {entry} needs {bytes} bytes of threadgroup memory ({} static), this device has {}",
                self.static_bytes,
                self.device_bytes
            );
        }
        Ok(())
    }
}

fn scratch_buffer(device: &MetalDevice, bytes: u64) -> Result<Arc<Buffer>> {
    let elements = usize::try_from(bytes.div_ceil(4))?;
    device
        .new_buffer_builder()
        .with_size_for(elements, DType::F32)
        .with_label("gem_scratch")
        .build()
}

fn size([width, height, depth]: [u32; 3]) -> MTLSize {
    MTLSize {
        width: width as usize,
        height: height as usize,
        depth: depth as usize,
    }
}

/// Libraries and pipelines by the registry id of their device.
#[derive(Default)]
struct Cache {
    libraries: HashMap<(u64, Source), Library>,
    pipelines: HashMap<(u64, &'static str), ComputePipeline>,
}

fn cache() -> &'static Mutex<Cache> {
    static CACHE: OnceLock<Mutex<Cache>> = OnceLock::new();
    CACHE.get_or_init(Default::default)
}

/// The checked pipeline of a pass, compiled on first use.
fn pipeline(device: &MetalDevice, pass: &Pass) -> Result<ComputePipeline> {
    let failed = |e: MetalKernelError| candle::Error::from(MetalError::from(e));
    let id = device.registry_id();
    let mut cache = cache().lock().map_err(MetalError::from)?;
    let pipeline = match cache.pipelines.get(&(id, pass.entry)) {
        Some(pipeline) => pipeline.clone(),
        None => {
            let library = match cache.libraries.get(&(id, pass.source)) {
                Some(library) => library.clone(),
                None => {
                    let library = device
                        .new_library_with_source(&pass.source.whole(), Some(&compile_options()))
                        .map_err(failed)?;
                    cache.libraries.insert((id, pass.source), library.clone());
                    library
                }
            };
            let function = library.get_function(pass.entry, None).map_err(failed)?;
            let pipeline = device
                .new_compute_pipeline_state_with_function(&function)
                .map_err(failed)?;
            cache.pipelines.insert((id, pass.entry), pipeline.clone());
            pipeline
        }
    };
    // The same pipeline may be planned with more threads or memory than the last time.
    Limits::of(device, &pipeline).check(pass)?;
    Ok(pipeline)
}

/// IEEE arithmetic: under fast math the compiler may assume that there is no NaN to pass on.
fn compile_options() -> objc2::rc::Retained<MTLCompileOptions> {
    let options = MTLCompileOptions::new();
    // bfloat came with 3.1.
    options.setLanguageVersion(MTLLanguageVersion::Version3_1);
    if objc2::available!(macos = 15.0, ios = 18.0) {
        options.setMathMode(MTLMathMode::Safe);
        // Fast by default even then: less accurate, and nothing promised about NaN.
        options.setMathFloatingPointFunctions(MTLMathFloatingPointFunctions::Precise);
    } else {
        #[allow(deprecated)]
        options.setFastMathEnabled(false);
    }
    options
}
