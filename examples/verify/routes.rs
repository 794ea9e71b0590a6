//! The ways to compute attention on a device, the first of which is what the others are compared with.

use crate::measure::{Geometry, SCALE};
use candle::{bail, Device, Result, Tensor};
use gem::attention::gpu::{Route, Tiling};
use gem::attention::plan::Partitions;
use gem::attention::reference::{self, Visible};
use gem::attention::{CpuKernel, RotaryKeys};
use gem::AttentionD512;

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arm {
    /// Plain candle ops.
    Reference,
    Cpu(CpuKernel),
    Gpu(Route),
    /// Keys rebuilt from values.
    SharedKvCpu(CpuKernel),
    SharedKvGpu(Route),
}

/// What an arm attends to, on its device.
pub struct Inputs {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    /// From which `k` follows, where arms are to rebuild it.
    pub keys: Option<RotaryKeys>,
}

/// Every route of a GPU, the unfused baseline first, then those that can rebuild keys.
pub fn gpu_arms() -> Vec<Arm> {
    let fused = |tokens, heads, stage| {
        Route::Fused(Tiling {
            tokens,
            heads,
            stage,
        })
    };
    let routes = [
        Route::Staged,
        fused(4, 1, true),
        fused(4, 1, false),
        fused(8, 1, true),
        fused(8, 1, false),
        fused(4, 2, true),
        fused(4, 2, false),
        Route::Matrix,
    ];
    let shared = routes
        .into_iter()
        .filter(|route| matches!(route, Route::Fused(_)));
    let all = routes.into_iter().map(Arm::Gpu);
    all.chain(shared.map(Arm::SharedKvGpu)).collect()
}

fn route_name(route: Route) -> String {
    match route {
        Route::Staged => "staged".to_string(),
        Route::Matrix => "matrix".to_string(),
        Route::Fused(Tiling {
            tokens,
            heads,
            stage,
        }) => {
            let how = if stage { "staged" } else { "direct" };
            format!("fused-tile{tokens}-heads{heads}-{how}")
        }
    }
}

impl Arm {
    /// Those of a device, the baseline first.
    pub fn all(device: &Device) -> Vec<Self> {
        match device {
            Device::Cpu => {
                let kernels = CpuKernel::ALL.into_iter().filter(|k| k.is_available());
                std::iter::once(Self::Reference)
                    .chain(kernels.clone().map(Self::Cpu))
                    .chain(kernels.map(Self::SharedKvCpu))
                    .collect()
            }
            _ => gpu_arms(),
        }
    }

    pub fn name(self) -> String {
        match self {
            Self::Reference => "reference".to_string(),
            Self::Cpu(kernel) => format!("fused-{kernel:?}").to_lowercase(),
            Self::Gpu(route) => route_name(route),
            Self::SharedKvCpu(kernel) => format!("shared-kv-{kernel:?}").to_lowercase(),
            Self::SharedKvGpu(route) => route_name(route).replace("fused", "shared-kv"),
        }
    }

    /// Whether it rebuilds keys.
    pub fn shares_kv(self) -> bool {
        matches!(self, Self::SharedKvCpu(_) | Self::SharedKvGpu(_))
    }

    /// Whether it serves such a shape; the matrix route wants whole blocks of 8 keys and rows that see every key.
    pub fn serves(self, g: Geometry) -> bool {
        let rows = g.q_heads / g.kv_heads * g.q_len;
        let partitions = Partitions::default_count(g.kv_len, rows);
        self != Self::Gpu(Route::Matrix) || (g.q_len == 1 && g.kv_len.div_ceil(partitions) >= 8)
    }

    pub fn run(self, Inputs { q, k, v, keys }: &Inputs) -> Result<Tensor> {
        let op = AttentionD512::new(SCALE);
        let shared_kv = |op: AttentionD512| match keys {
            Some(keys) => op.forward_shared_kv(q, v, keys),
            None => bail!("{}: there are no keys to rebuild", self.name()),
        };
        match self {
            Self::SharedKvCpu(kernel) => shared_kv(op.cpu_kernel(kernel)),
            Self::SharedKvGpu(route) => shared_kv(op.route(route)),
            Self::Cpu(kernel) => op.cpu_kernel(kernel).forward(q, k, v),
            Self::Gpu(route) => op.route(route).forward(q, k, v),
            Self::Reference => {
                let visible = Visible::Causal {
                    first_query: k.dim(2)? - q.dim(2)?,
                    first_key: 0,
                    window: None,
                };
                reference::attention(q, k, v, SCALE, visible)
            }
        }
    }
}
