//! Attention at head_dim 512, and the plain-op reference it is compared with.
//!
//! ```text
//! softmax(q k^T * softmax_scale) v
//! ```
//!
//! exact, in one pass over the cache: each K and V row is read once for all query heads of its KV head, scores never
//! reach memory. The sequence is cut into partitions, each yields a [partial state](AttentionPartials) in f32, and the
//! states merge in a fixed order: results repeat bit for bit with any number of threads.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod geometry;
pub mod gpu;
mod keys;
pub mod partial;
pub mod plan;
pub mod reference;
pub mod sdpa;
mod shared_kv;
mod store;

use candle::{bail, CpuStorage, CudaStorage, CustomOp3, DType, Layout, MetalStorage};
use candle::{Device, Result, Shape, Tensor};
use half::{bf16, f16};

use crate::backend::no_code_for;
pub use crate::cpu::CpuKernel;
pub use geometry::{AttentionGeometry, HEAD_DIM};
pub(crate) use keys::cos_sin;
pub use keys::{RotaryKeys, RotaryTables};
pub use partial::AttentionPartials;
use plan::{Partitions, ScratchBytes};
pub use shared_kv::attention_d512_shared_kv;
use store::Stored;

const NAME: &str = "attention_d512";

/// Bytes of partial states that one call may hold at a time: 4 GiB.
const MOST_SCRATCH: u64 = 1 << 32;

/// Partitions whose states can be asked for: more than a cache has use for, and each costs memory.
const MOST_STATES: usize = 65_535;

/// `softmax(q k^T * softmax_scale) v` for head_dim 512, exact, one read of each K/V row per KV head.
///
/// # Arguments
///
/// * `q` - Query tensor with shape `(batch, q_heads, q_len, 512)`.
/// * `k` - Key tensor with shape `(batch, kv_heads, kv_len, 512)`.
/// * `v` - Value tensor with shape `(batch, kv_heads, kv_len, 512)`.
/// * `softmax_scale` - What scores are multiplied by; 1.0 for Gemma 4, often `1 / sqrt(512)` elsewhere. Finite.
///
/// `q_heads` is a multiple of `kv_heads`; query head `h` reads KV head `h / (q_heads / kv_heads)`. Each of the three may
/// be f32, f16 or bf16, and have any strides and start offset as long as the last dimension is contiguous: transposed
/// and narrowed views of a cache need no copy, and what lies beyond them is never read into a result (on a GPU k and v share a
/// dtype, and starts and strides are multiples of 4 elements). Attention is
/// causal, aligned at the end: query row `i` sees keys `0..=kv_len - q_len + i`. See [`AttentionD512`] for the rest.
///
/// The resulting tensor has dimensions `(batch, q_heads, q_len, 512)` and the dtype of `q`, rounded once from f32.
///
/// # Errors
///
/// Everything that [`AttentionD512::check`] refuses (no key at all, fewer keys than query rows, a shape, dtype or stride
/// that does not fit), and a device that there is no code for. There is no backward pass: training through it fails with
/// candle's "backward not supported". As softmax does, a NaN or a score of
/// +infinity makes the row NaN, and one of -infinity does not count unless all of them are, which makes it NaN too; scores and sums of `p v` past the
/// range of f32 are infinite.
///
/// ```
/// use candle::{DType, Device, Tensor};
/// # fn main() -> candle::Result<()> {
/// let q = Tensor::ones((1, 8, 1, 512), DType::F32, &Device::Cpu)?;
/// let k = Tensor::ones((1, 2, 40, 512), DType::BF16, &Device::Cpu)?;
/// let v = Tensor::ones((1, 2, 40, 512), DType::BF16, &Device::Cpu)?;
/// let out = gem::attention_d512(&q, &k, &v, 1.0)?;
/// assert_eq!(out.dims(), [1, 8, 1, 512]);
/// # Ok(())
/// # }
/// ```
pub fn attention_d512(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32) -> Result<Tensor> {
    AttentionD512::new(softmax_scale).forward(q, k, v)
}

/// [`attention_d512`] with every choice open.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionD512 {
    softmax_scale: f32,
    causal: bool,
    partitions: Option<usize>,
    cpu_kernel: Option<CpuKernel>,
    route: gpu::Route,
}

impl AttentionD512 {
    /// Causal, with the partitions that the shape calls for and the fastest kernel that the CPU has.
    pub fn new(softmax_scale: f32) -> Self {
        Self {
            softmax_scale,
            causal: true,
            partitions: None,
            cpu_kernel: None,
            route: gpu::Route::default(),
        }
    }

    /// With `false`, every query row sees every key: what a prefix shared by several query rows needs.
    pub fn causal(self, causal: bool) -> Self {
        Self { causal, ..self }
    }

    /// Cuts the keys into this many contiguous partitions, any number from 1 up. Results differ within rounding.
    pub fn partitions(self, partitions: usize) -> Self {
        Self {
            partitions: Some(partitions),
            ..self
        }
    }

    /// Runs this kernel on the CPU and no other; an error if the CPU cannot.
    pub fn cpu_kernel(self, kernel: CpuKernel) -> Self {
        Self {
            cpu_kernel: Some(kernel),
            ..self
        }
    }

    /// Runs these kernels on a GPU; an error if the shape has no use for them.
    pub fn route(self, route: gpu::Route) -> Self {
        Self { route, ..self }
    }

    /// What [`AttentionD512::forward`] would run, or why it would not.
    ///
    /// # Errors
    ///
    /// Names the tensor, what it got and what it wants: for a scale that is not finite, 0 partitions, inputs on several
    /// devices, shapes other than those of [`attention_d512`], empty inputs, query heads that are no multiple of the KV
    /// heads, more causal query rows than keys, a dtype other than f32, f16 and bf16, a last dimension that is not
    /// contiguous, offsets or scratch past 64 bits. On a GPU also for K and V of different dtypes, on Metal starts and strides that
    /// are no multiples of 4 elements, a route that the shape has no use for, more than 4 GiB of partial states, and sizes past what a
    /// launch takes.
    pub fn check(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<AttentionGeometry> {
        self.check_settings(NAME)?;
        let geometry = AttentionGeometry::new(NAME, q, k, v, self.causal)?;
        let partitions = self.plan(&geometry)?;
        match q.device() {
            Device::Cpu => {}
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                cuda::planned(self, &geometry, None, device, &Resulting::Attention)?;
            }
            _ => {
                gpu::plan(&geometry, &partitions, self.softmax_scale, self.route)?;
            }
        }
        Ok(geometry)
    }

    /// As [`attention_d512`].
    pub fn forward(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        self.check(q, k, v)?;
        q.apply_op3(
            k,
            v,
            Op {
                settings: *self,
                result: Resulting::Attention,
            },
        )
    }

    /// The un-normalised states instead of their quotient: merge them with those of other keys, or finish them.
    ///
    /// A row whose scores are all -infinity has the states of one that saw no key, and [finishes](AttentionPartials::finish) as 0, not
    /// as the NaN of [`AttentionD512::forward`]. One state per partition and query row, so `4 * 514` bytes times `partitions * batch * q_heads * q_len`. Errors as
    /// [`AttentionD512::check`].
    pub fn partials(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<AttentionPartials> {
        let g = self.check(q, k, v)?;
        let partitions = self.states(NAME, &g)?;
        let packed = q.apply_op3(
            k,
            v,
            Op {
                settings: *self,
                result: Resulting::Partials,
            },
        )?;
        AttentionPartials::unpack(&packed, [partitions, g.batch, g.q_heads, g.q_len, HEAD_DIM])
    }

    /// Partitions, if their states can be asked for.
    fn states(&self, op: &str, g: &AttentionGeometry) -> Result<usize> {
        let partitions = self.plan(g)?.count();
        if partitions > MOST_STATES {
            bail!("{op}: got {partitions} partitions, want at most {MOST_STATES} where their states are kept");
        }
        Ok(partitions)
    }

    fn check_settings(&self, op: &str) -> Result<()> {
        if !self.softmax_scale.is_finite() {
            bail!(
                "{op}: got a softmax_scale of {}, want a finite one",
                self.softmax_scale
            );
        }
        Ok(())
    }

    fn plan(&self, g: &AttentionGeometry) -> Result<Partitions> {
        let count = match self.partitions {
            Some(count) => count,
            None => Partitions::default_count(g.kv_len, g.rows_per_kv_head()),
        };
        let rows = (g.batch * g.q_heads * g.q_len) as u64;
        ScratchBytes::new(rows, count as u64, HEAD_DIM as u64)?;
        let partitions = Partitions::new(g.kv_len, count)?;
        // The rows of a tile are in the making together, in every partition that has a key.
        let tile = g.rows_per_kv_head().min(plan::ROW_TILE) as u64;
        let together = ScratchBytes::new(tile, partitions.live() as u64, HEAD_DIM as u64)?.total;
        if together > MOST_SCRATCH {
            bail!(
                "{NAME}: got {count} partitions, whose states of {tile} rows take {together} bytes, want at most {MOST_SCRATCH}"
            );
        }
        Ok(partitions)
    }
}

#[cfg(feature = "metal")]
type PlanFn =
    fn(&AttentionGeometry, &Partitions, f32, gpu::Route) -> Result<crate::backend::plan::Plan>;

enum Resulting {
    Attention,
    Partials,
}

struct Op {
    settings: AttentionD512,
    result: Resulting,
}

impl CustomOp3 for Op {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_l: &Layout,
        k: &CpuStorage,
        k_l: &Layout,
        v: &CpuStorage,
        v_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let dtype = |s: &CpuStorage| candle::backend::BackendStorage::dtype(s);
        let geometry = AttentionGeometry::from_layouts(
            NAME,
            (q_l, dtype(q)),
            (k_l, dtype(k)),
            (v_l, dtype(v)),
            self.settings.causal,
        )?;
        let call = cpu::Call::new(
            &geometry,
            self.settings.plan(&geometry)?,
            self.settings.softmax_scale,
            self.settings.cpu_kernel.unwrap_or_else(CpuKernel::best),
            [q, k, v],
        )?;
        if let Resulting::Partials = self.result {
            let packed = call.partials()?;
            let len = packed.len();
            return Ok((CpuStorage::F32(packed), Shape::from(len)));
        }
        let storage = match geometry.q.dtype {
            DType::F16 => f16::into_storage(call.forward()?),
            DType::BF16 => bf16::into_storage(call.forward()?),
            _ => f32::into_storage(call.forward()?),
        };
        Ok((storage, q_l.shape().clone()))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        Err(no_code_for(NAME, "q, k and v", "CUDA"))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_l: &Layout,
        k: &CudaStorage,
        k_l: &Layout,
        v: &CudaStorage,
        v_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        use candle::backend::BackendStorage;
        let inputs = [(q_l, q.dtype()), (k_l, k.dtype()), (v_l, v.dtype())];
        let [q_in, k_in, v_in] = inputs;
        let geometry =
            AttentionGeometry::from_layouts(NAME, q_in, k_in, v_in, self.settings.causal)?;
        let inputs = [q, k, v];
        cuda::forward(&self.settings, &geometry, None, q_l, &inputs, &self.result)
    }

    #[cfg(not(feature = "metal"))]
    fn metal_fwd(
        &self,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        Err(no_code_for(NAME, "q, k and v", "Metal"))
    }

    #[cfg(feature = "metal")]
    fn metal_fwd(
        &self,
        q: &MetalStorage,
        q_l: &Layout,
        k: &MetalStorage,
        k_l: &Layout,
        v: &MetalStorage,
        v_l: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        use candle::backend::BackendStorage;
        let inputs = [(q_l, q.dtype()), (k_l, k.dtype()), (v_l, v.dtype())];
        let [q_in, k_in, v_in] = inputs;
        let geometry =
            AttentionGeometry::from_layouts(NAME, q_in, k_in, v_in, self.settings.causal)?;
        let partitions = self.settings.plan(&geometry)?;
        let (plan, shape): (PlanFn, _) = match self.result {
            Resulting::Attention => (gpu::plan, q_l.shape().clone()),
            Resulting::Partials => {
                let states =
                    partitions.count() * geometry.batch * geometry.q_heads * geometry.q_len;
                (gpu::plan_states, Shape::from(states * (2 + HEAD_DIM)))
            }
        };
        let plan = plan(
            &geometry,
            &partitions,
            self.settings.softmax_scale,
            self.settings.route,
        )?;
        Ok((crate::backend::metal::run_one(&plan, &[q, k, v])?, shape))
    }
}
