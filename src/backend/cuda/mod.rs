//! Runs any [`Plan`] for CUDA on an NVIDIA GPU; only this module names it.

mod gemm;

pub use gemm::gemm;

use super::plan::{Binding, Output, Pass, Plan, Slot, Source};
use crate::attention::gpu::cuda::Chip;
use candle::backend::BackendStorage;
use candle::cuda_backend::cudarc::driver::sys::{
    CUdevice_attribute, CUdeviceptr, CUfunction_attribute,
};
use candle::cuda_backend::cudarc::driver::{
    result, CudaFunction, CudaModule, CudaSlice, CudaStream, DevicePtr, DevicePtrMut,
};
use candle::cuda_backend::cudarc::nvrtc::Ptx;
use candle::cuda_backend::{CudaStorageSlice, WrapErr};
use candle::{bail, CudaDevice, CudaStorage, DType, Result};
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, OnceLock};

/// The machine code of a source.
fn image(source: Source) -> Result<&'static [u8]> {
    Ok(match source {
        Source::CudaD512 => include_bytes!(concat!(env!("OUT_DIR"), "/attention_d512.fatbin")),
        Source::CudaMatrix => include_bytes!(concat!(env!("OUT_DIR"), "/attention_matrix.fatbin")),
        Source::CudaTiled => include_bytes!(concat!(env!("OUT_DIR"), "/attention_tiled.fatbin")),
        Source::CudaStates => include_bytes!(concat!(env!("OUT_DIR"), "/attention_states.fatbin")),
        Source::CudaProjection => include_bytes!(concat!(env!("OUT_DIR"), "/projection.fatbin")),
        Source::CudaQsaPrep => include_bytes!(concat!(env!("OUT_DIR"), "/qsa_prep.fatbin")),
        other => bail!("cuda: {} is no source for CUDA", other.file()),
    })
}

/// What plans have to know of this device.
pub fn chip(device: &CudaDevice) -> Result<Chip> {
    use CUdevice_attribute::{
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as SHARED,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS,
    };
    let stream = device.cuda_stream();
    let read = |attribute| -> Result<u32> {
        let value = stream.context().attribute(attribute).w()?;
        Ok(u32::try_from(value)?)
    };
    Ok(Chip {
        multiprocessors: read(MULTIPROCESSORS)?,
        shared_bytes: read(SHARED)?,
    })
}

/// Launches the passes of `plan` on candle's stream of the device of its inputs, and returns its outputs.
///
/// # Errors
///
/// A plan for another backend, or one that this device can't launch; nothing is launched then.
pub fn run(plan: &Plan, inputs: &[&CudaStorage]) -> Result<Vec<CudaStorage>> {
    let Some(first) = inputs.first() else {
        bail!("cuda: a plan without inputs has no device")
    };
    let device = first.device();
    let stream = device.cuda_stream();
    let functions = plan
        .passes
        .iter()
        .map(|pass| function(&stream, pass))
        .collect::<Result<Vec<_>>>()?;
    let mut scratch = plan
        .scratch
        .iter()
        // Not initialised: passes write what they read.
        .map(|&bytes| unsafe { device.alloc::<u8>(usize::try_from(bytes)?) })
        .collect::<Result<Vec<_>>>()?;
    let mut outputs = plan
        .outputs
        .iter()
        .map(|output| allocate(device, output))
        .collect::<Result<Vec<_>>>()?;
    for (pass, function) in plan.passes.iter().zip(&functions) {
        launch(&stream, pass, function, inputs, &mut scratch, &mut outputs)?;
    }
    let storage = |slice| CudaStorage {
        slice,
        device: device.clone(),
    };
    Ok(outputs.into_iter().map(storage).collect())
}

/// [`run`] of a plan with one output.
pub fn run_one(plan: &Plan, inputs: &[&CudaStorage]) -> Result<CudaStorage> {
    match <[CudaStorage; 1]>::try_from(run(plan, inputs)?) {
        Ok([output]) => Ok(output),
        Err(outputs) => bail!("cuda: a plan has {} outputs, want one", outputs.len()),
    }
}

/// An output, not initialised: passes write every element.
fn allocate(device: &CudaDevice, output: &Output) -> Result<CudaStorageSlice> {
    let n = output.elements;
    Ok(unsafe {
        match output.dtype {
            DType::F32 => CudaStorageSlice::F32(device.alloc(n)?),
            DType::F16 => CudaStorageSlice::F16(device.alloc(n)?),
            DType::BF16 => CudaStorageSlice::BF16(device.alloc(n)?),
            DType::U8 => CudaStorageSlice::U8(device.alloc(n)?),
            other => bail!("cuda: a plan puts out {other:?}, want f32, f16, bf16 or u8"),
        }
    })
}

/// All buffers are used on this one stream, in the order of the launches.
fn launch(
    stream: &Arc<CudaStream>,
    pass: &Pass,
    function: &CudaFunction,
    inputs: &[&CudaStorage],
    scratch: &mut [CudaSlice<u8>],
    outputs: &mut [CudaStorageSlice],
) -> Result<()> {
    let mut addresses = Vec::with_capacity(pass.buffers.len());
    for binding in &pass.buffers {
        let lacks = || {
            candle::Error::Msg(format!(
                "cuda: {} binds {:?}, which the plan lacks",
                pass.entry,
                binding.slot()
            ))
        };
        let written = !matches!(binding, Binding::Read(_));
        addresses.push(match binding.slot() {
            Slot::Input(i) => read_address(&inputs.get(i).ok_or_else(lacks)?.slice, stream)?,
            Slot::Output(i) => {
                let output = outputs.get_mut(i).ok_or_else(lacks)?;
                if written {
                    write_address(output, stream)?
                } else {
                    read_address(output, stream)?
                }
            }
            Slot::Scratch(i) => {
                let buffer = scratch.get_mut(i).ok_or_else(lacks)?;
                if written {
                    buffer.device_ptr_mut(stream).0
                } else {
                    buffer.device_ptr(stream).0
                }
            }
        });
    }
    // As 64-bit words, since the structs hold such.
    let mut params: Vec<u64> = pass
        .params
        .chunks(8)
        .map(|bytes| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            u64::from_ne_bytes(word)
        })
        .collect();
    let mut arguments: Vec<*mut c_void> = addresses
        .iter_mut()
        .map(|address: &mut CUdeviceptr| (address as *mut CUdeviceptr).cast())
        .collect();
    arguments.push(params.as_mut_ptr().cast());
    let [x, y, z] = pass.threadgroups;
    stream.context().bind_to_thread().w()?;
    // The arguments are those of the kernel: a buffer each, then the parameter struct. All buffers outlive the launch on this stream.
    unsafe {
        result::launch_kernel(
            function.cu_function(),
            (x, y, z),
            (pass.threads, 1, 1),
            pass.threadgroup_bytes,
            stream.cu_stream(),
            &mut arguments,
        )
    }
    .w()
}

fn read_address(slice: &CudaStorageSlice, stream: &CudaStream) -> Result<CUdeviceptr> {
    Ok(match slice {
        CudaStorageSlice::F32(s) => s.device_ptr(stream).0,
        CudaStorageSlice::F16(s) => s.device_ptr(stream).0,
        CudaStorageSlice::BF16(s) => s.device_ptr(stream).0,
        CudaStorageSlice::U8(s) => s.device_ptr(stream).0,
        _ => bail!("cuda: a kernel is given a type that none reads"),
    })
}

fn write_address(slice: &mut CudaStorageSlice, stream: &CudaStream) -> Result<CUdeviceptr> {
    Ok(match slice {
        CudaStorageSlice::F32(s) => s.device_ptr_mut(stream).0,
        CudaStorageSlice::F16(s) => s.device_ptr_mut(stream).0,
        CudaStorageSlice::BF16(s) => s.device_ptr_mut(stream).0,
        CudaStorageSlice::U8(s) => s.device_ptr_mut(stream).0,
        _ => bail!("cuda: a kernel is given a type that none writes"),
    })
}

/// Modules and functions by the address of their context.
#[derive(Default)]
struct Cache {
    modules: HashMap<(usize, Source), Arc<CudaModule>>,
    functions: HashMap<(usize, &'static str), CudaFunction>,
}

/// The checked kernel of a pass, loaded on first use.
fn function(stream: &CudaStream, pass: &Pass) -> Result<CudaFunction> {
    static CACHE: OnceLock<Mutex<Cache>> = OnceLock::new();
    let cache = CACHE.get_or_init(Default::default);
    let Ok(mut cache) = cache.lock() else {
        bail!("cuda: another thread failed while it loaded a kernel")
    };
    let context = stream.context();
    let id = context.cu_ctx() as usize;
    let function = match cache.functions.get(&(id, pass.entry)) {
        Some(function) => function.clone(),
        None => {
            let module = match cache.modules.get(&(id, pass.source)) {
                Some(module) => module.clone(),
                None => {
                    let code = Ptx::from_binary(image(pass.source)?.to_vec());
                    let module = context.load_module(code).w()?;
                    cache.modules.insert((id, pass.source), module.clone());
                    module
                }
            };
            let function = module.load_function(pass.entry).w()?;
            cache.functions.insert((id, pass.entry), function.clone());
            function
        }
    };
    check(&function, pass)?;
    Ok(function)
}

/// A launch that is too large fails with a number; here it is refused with the reason.
fn check(function: &CudaFunction, pass: &Pass) -> Result<()> {
    use CUfunction_attribute::{
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as DYNAMIC,
        CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK as THREADS,
    };
    let entry = pass.entry;
    let threads = function.get_attribute(THREADS).w()?;
    if pass.threads > threads as u32 {
        bail!(
            "cuda: {entry} can run {threads} threads in a block on this device, want {}",
            pass.threads
        );
    }
    let allowed = function.get_attribute(DYNAMIC).w()?;
    if pass.threadgroup_bytes > allowed as u32 {
        let bytes = i32::try_from(pass.threadgroup_bytes)?;
        if let Err(why) = function.set_attribute(DYNAMIC, bytes) {
            bail!("cuda: {entry} needs {bytes} bytes of shared memory, which this device has not: {why}");
        }
    }
    Ok(())
}
