//! What a device was found to be able to launch, as plain data.

use serde::{Deserialize, Serialize};

/// What a plan takes of a device: says that it compiles and can be launched, nothing about speed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    /// [`Plan::digest`](super::plan::Plan::digest).
    pub plan: String,
    /// Of each scratch buffer.
    pub scratch_bytes: Vec<u64>,
    /// Of each pass, in order.
    pub pipelines: Vec<PipelineReceipt>,
}

/// What a pipeline takes, read from the pipeline itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PipelineReceipt {
    /// Name of the kernel.
    pub entry: String,
    /// [`Source::digest`](super::plan::Source::digest) of its text.
    pub source: String,
    /// Threads of a SIMD group.
    pub simd_width: usize,
    /// Most threads that this pipeline can run in a threadgroup on this device.
    pub max_threads_per_threadgroup: usize,
    /// Threads that the plan asks for.
    pub threads_per_threadgroup: usize,
    /// Threadgroups that the plan asks for.
    pub threadgroups: [u32; 3],
    /// Threadgroup memory that the text declares.
    pub static_threadgroup_bytes: usize,
    /// Threadgroup memory that the plan asks for.
    pub dynamic_threadgroup_bytes: usize,
    /// Threadgroup memory that the device has.
    pub device_threadgroup_bytes: usize,
}
