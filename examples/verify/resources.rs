//! Gate 2: what the kernels of each route take, and on a GPU whether its own pipelines can be launched with it.

use crate::measure::rotary_keys;
use crate::receipt::{Report, Settings};
use crate::routes::{gpu_arms, Arm};
use crate::Progress;
use anyhow::Result;
use candle::{DType, Device, Tensor};
use gem::attention::gpu;
use gem::attention::plan::Partitions;
use gem::attention::{AttentionGeometry, CpuKernel, HEAD_DIM};
use gem::backend::plan::Plan;
use gem::backend::receipt::PipelineReceipt;
use gem::projection::geometry::{MatrixView, ProjectionGeometry};
use gem::projection::gpu as projection;
use serde::{Deserialize, Serialize};

/// A production decode.
const KV_LEN: usize = 8192;
const Q_HEADS: usize = 32;
const KV_HEADS: usize = 4;
const HIDDEN: usize = 5376;
const DTYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

const MOST_THREADS: u32 = 1024;
const MOST_THREADGROUP_BYTES: u32 = 32_768;
const SIMD_WIDTH: usize = 32;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resources {
    /// What the CPU would run.
    cpu_kernel: String,
    plans: Vec<Planned>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Planned {
    task: String,
    dtype: String,
    digest: String,
    scratch_bytes: Vec<u64>,
    passes: Vec<PlannedPass>,
    /// Read from the pipelines of this device; none on a CPU.
    pipelines: Option<Vec<PipelineReceipt>>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PlannedPass {
    entry: String,
    threadgroups: [u32; 3],
    threads: u32,
    threadgroup_bytes: u32,
}

/// Something that a GPU would be asked to do.
#[derive(Debug, Clone, Copy)]
enum Task {
    Attention(Arm),
    /// q and k of a full layer in one product, for so many tokens.
    Projection(usize),
}

fn tasks() -> Vec<Task> {
    let projections = [1, 512].map(Task::Projection);
    let attention = gpu_arms().into_iter().map(Task::Attention);
    attention.chain(projections).collect()
}

impl Task {
    fn name(self) -> String {
        match self {
            Self::Attention(arm) => arm.name(),
            Self::Projection(tokens) => format!("projection-{tokens}"),
        }
    }

    /// Made from shapes alone, so the same on every machine.
    fn plan(self, dtype: DType) -> candle::Result<Plan> {
        let arm = match self {
            Self::Attention(arm) => arm,
            Self::Projection(tokens) => return projection::plan(&projected(tokens, dtype), None),
        };
        let made = |heads, len| Tensor::zeros((1, heads, len, HEAD_DIM), dtype, &Device::Cpu);
        // Strides of 0 would do, but not every kernel is launched the same way on them.
        let (q, kv) = (made(Q_HEADS, 1)?, made(KV_HEADS, KV_LEN)?);
        let geometry = AttentionGeometry::new("verify", &q, &kv, &kv, true)?;
        let count = Partitions::default_count(KV_LEN, geometry.rows_per_kv_head());
        let partitions = Partitions::new(KV_LEN, count)?;
        match arm {
            Arm::Gpu(route) => gpu::plan(&geometry, &partitions, 1.0, route),
            Arm::SharedKvGpu(route) => {
                let geometry = AttentionGeometry::new_shared_kv("verify", &q, &kv, true)?;
                let keys = rotary_keys(0, KV_LEN)?;
                gpu::plan_shared_kv(&geometry, &keys, &partitions, 1.0, route)
            }
            _ => candle::bail!("{} is no route of a GPU", arm.name()),
        }
    }
}

fn projected(tokens: usize, dtype: DType) -> ProjectionGeometry {
    let n = (Q_HEADS + KV_HEADS) * HEAD_DIM;
    let view = |rows: usize| MatrixView {
        dtype,
        start: 0,
        row_stride: HIDDEN as u64,
        end: (rows * HIDDEN) as u64,
    };
    ProjectionGeometry {
        m: tokens,
        k: HIDDEN,
        n,
        x: view(tokens),
        w: view(n),
    }
}

pub fn steps() -> u64 {
    (tasks().len() * DTYPES.len()) as u64
}

pub fn run(device: &Device, progress: &Progress) -> Result<Resources> {
    let mut plans = Vec::new();
    for dtype in DTYPES {
        for task in tasks() {
            progress.step(format!(
                "resources of {} in {}",
                task.name(),
                dtype.as_str()
            ));
            let plan = task.plan(dtype)?;
            plans.push(Planned {
                task: task.name(),
                dtype: dtype.as_str().to_string(),
                digest: plan.digest(),
                scratch_bytes: plan.scratch.clone(),
                passes: passes(&plan),
                pipelines: pipelines(&plan, device)?,
            });
        }
    }
    Ok(Resources {
        cpu_kernel: format!("{:?}", CpuKernel::best()),
        plans,
    })
}

fn passes(plan: &Plan) -> Vec<PlannedPass> {
    let pass = |pass: &gem::backend::plan::Pass| PlannedPass {
        entry: pass.entry.to_string(),
        threadgroups: pass.threadgroups,
        threads: pass.threads,
        threadgroup_bytes: pass.threadgroup_bytes,
    };
    plan.passes.iter().map(pass).collect()
}

fn pipelines(plan: &Plan, device: &Device) -> Result<Option<Vec<PipelineReceipt>>> {
    match device {
        #[cfg(feature = "metal")]
        Device::Metal(device) => Ok(Some(gem::backend::metal::receipt(plan, device)?.pipelines)),
        Device::Cpu => Ok(None),
        _ => anyhow::bail!(
            "no pipelines of {} can be made in this build",
            plan.passes[0].entry
        ),
    }
}

impl Report for Resources {
    const GATE: &'static str = "resources";

    fn refusals(&self, settings: &Settings) -> Vec<String> {
        let mut refusals = Vec::new();
        let mut planned = self.plans.iter();
        for dtype in DTYPES {
            for task in tasks() {
                let name = format!("{} in {}", task.name(), dtype.as_str());
                let found = planned
                    .next()
                    .filter(|p| p.task == task.name() && p.dtype == dtype.as_str());
                match (found, task.plan(dtype)) {
                    (None, _) => refusals.push(format!("{name} was not planned")),
                    (_, Err(e)) => refusals.push(format!("{name} has no plan: {e}")),
                    (Some(found), Ok(plan)) => refusals.extend(
                        found
                            .refusal(&plan, settings)
                            .map(|why| format!("{name} {why}")),
                    ),
                }
            }
        }
        if planned.next().is_some() {
            refusals.push("more was planned than there are tasks".to_string());
        }
        refusals
    }

    fn summary(&self) -> String {
        let all = || self.plans.iter().flat_map(|plan| &plan.passes);
        let pipelines = self
            .plans
            .iter()
            .flat_map(|plan| plan.pipelines.iter().flatten())
            .count();
        format!(
            "{} plans, up to {} threads and {} bytes a threadgroup; {}",
            self.plans.len(),
            all().map(|pass| pass.threads).max().unwrap_or(0),
            all().map(|pass| pass.threadgroup_bytes).max().unwrap_or(0),
            match pipelines {
                0 => format!("no GPU pipeline made; CPU kernel {}", self.cpu_kernel),
                n => format!("{n} pipelines can be launched"),
            }
        )
    }
}

impl Planned {
    fn refusal(&self, plan: &Plan, settings: &Settings) -> Option<String> {
        if self.digest != plan.digest() || self.scratch_bytes != plan.scratch {
            return Some("is another plan than this program makes".to_string());
        }
        let launch = |p: &PlannedPass| {
            (
                p.entry.clone(),
                p.threadgroups,
                p.threads,
                p.threadgroup_bytes,
            )
        };
        if !self
            .passes
            .iter()
            .map(launch)
            .eq(passes(plan).iter().map(launch))
        {
            return Some("is launched otherwise than planned".to_string());
        }
        for pass in &self.passes {
            if pass.threads > MOST_THREADS || pass.threadgroup_bytes > MOST_THREADGROUP_BYTES {
                return Some(format!(
                    "wants {} threads and {} bytes for {}, at most {MOST_THREADS} and {MOST_THREADGROUP_BYTES} are there",
                    pass.threads, pass.threadgroup_bytes, pass.entry
                ));
            }
        }
        match (&self.pipelines, settings.device.as_str()) {
            (None, "cpu") => None,
            (Some(_), "cpu") => Some("names pipelines, but a CPU has none".to_string()),
            (None, device) => Some(format!("names no pipelines of the {device} device")),
            (Some(pipelines), _) => {
                if pipelines.len() != self.passes.len() {
                    return Some(format!(
                        "names {} pipelines for {} passes",
                        pipelines.len(),
                        self.passes.len()
                    ));
                }
                self.passes
                    .iter()
                    .zip(pipelines)
                    .find_map(|(pass, pipeline)| launchable(pass, pipeline))
            }
        }
    }
}

fn launchable(pass: &PlannedPass, p: &PipelineReceipt) -> Option<String> {
    let bytes = p.static_threadgroup_bytes + p.dynamic_threadgroup_bytes;
    let fits = p.entry == pass.entry
        && p.simd_width == SIMD_WIDTH
        && p.threads_per_threadgroup == pass.threads as usize
        && p.threads_per_threadgroup <= p.max_threads_per_threadgroup
        && p.dynamic_threadgroup_bytes == pass.threadgroup_bytes as usize
        && bytes <= p.device_threadgroup_bytes;
    (!fits).then(|| format!("can't be launched as planned: {p:?}"))
}
