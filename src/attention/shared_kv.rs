//! `attention_d512_shared_kv`: attention over values alone, from which the keys are rebuilt.

use crate::backend::no_code_for;
use candle::backend::BackendStorage;
use candle::{bail, CpuStorage, CudaStorage, CustomOp3, DType, Layout, MetalStorage};
use candle::{Device, Result, Shape, Storage, Tensor};
use half::{bf16, f16};

use super::store::Stored;
use super::{cpu, AttentionD512, AttentionGeometry, AttentionPartials, CpuKernel, Resulting};
use super::{RotaryKeys, HEAD_DIM};

const NAME: &str = "attention_d512_shared_kv";

/// [`attention_d512`](super::attention_d512) over a cache of values alone: `k = rotate(weight * v)`, the attention of Gemma 4's
/// full layers from half the bytes.
///
/// # Arguments
///
/// * `q` - Query tensor with shape `(batch, q_heads, q_len, 512)`, rotated.
/// * `v` - Value tensor with shape `(batch, kv_heads, kv_len, 512)`: the normalised output of the key projection.
/// * `keys` - The weight of the key norm, and the angles of the cached tokens.
/// * `softmax_scale` - What scores are multiplied by; 1.0 for Gemma 4. Finite.
///
/// Types, layouts and causality are those of `attention_d512`. Keys are rebuilt a tile at a time, once for all query heads of a KV
/// head, never as a whole. On the CPU, with f32 values, they have the bits of keys that were stored, and so has the result. With
/// half types keys are not rounded to the type, as stored ones would be; but on CUDA those of many query rows (a prompt) are.
///
/// # Errors
///
/// Everything that [`AttentionD512::check_shared_kv`] refuses, and a device that there is no code for. There is no backward
/// pass: training through `q`, `v` or the weight fails with candle's "backward not supported".
pub fn attention_d512_shared_kv(
    q: &Tensor,
    v: &Tensor,
    keys: &RotaryKeys,
    softmax_scale: f32,
) -> Result<Tensor> {
    AttentionD512::new(softmax_scale).forward_shared_kv(q, v, keys)
}

impl AttentionD512 {
    /// What [`AttentionD512::forward_shared_kv`] would run, or why it would not.
    ///
    /// # Errors
    ///
    /// As [`AttentionD512::check`], keys on another device, and cached tokens past the end of the rotary tables.
    pub fn check_shared_kv(
        &self,
        q: &Tensor,
        v: &Tensor,
        keys: &RotaryKeys,
    ) -> Result<AttentionGeometry> {
        self.check_settings(NAME)?;
        let geometry = AttentionGeometry::new_shared_kv(NAME, q, v, self.causal)?;
        if !keys.weight().device().same_device(q.device()) {
            bail!(
                "{NAME}: q, v and keys must be on one device, got q on {:?} and keys on {:?}",
                q.device().location(),
                keys.weight().device().location()
            );
        }
        keys.check(NAME, &geometry)?;
        let partitions = self.plan(&geometry)?;
        match q.device() {
            Device::Cpu => {}
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                let result = Resulting::Attention;
                super::cuda::planned(self, &geometry, Some(keys), device, &result)?;
            }
            _ => {
                super::gpu::plan_shared_kv(
                    &geometry,
                    keys,
                    &partitions,
                    self.softmax_scale,
                    self.route,
                )?;
            }
        }
        Ok(geometry)
    }

    /// As [`attention_d512_shared_kv`].
    pub fn forward_shared_kv(&self, q: &Tensor, v: &Tensor, keys: &RotaryKeys) -> Result<Tensor> {
        self.check_shared_kv(q, v, keys)?;
        self.apply_shared_kv(q, v, keys, Resulting::Attention)
    }

    /// As [`AttentionD512::partials`], with keys that are rebuilt: the states merge with those of other tokens.
    pub fn partials_shared_kv(
        &self,
        q: &Tensor,
        v: &Tensor,
        keys: &RotaryKeys,
    ) -> Result<AttentionPartials> {
        let g = self.check_shared_kv(q, v, keys)?;
        let partitions = self.states(NAME, &g)?;
        let packed = self.apply_shared_kv(q, v, keys, Resulting::Partials)?;
        AttentionPartials::unpack(&packed, [partitions, g.batch, g.q_heads, g.q_len, HEAD_DIM])
    }

    fn apply_shared_kv(
        &self,
        q: &Tensor,
        v: &Tensor,
        keys: &RotaryKeys,
        result: Resulting,
    ) -> Result<Tensor> {
        let op = SharedKv {
            settings: *self,
            keys: keys.clone(),
            result,
        };
        // The weight is an argument, so that it can't be trained in silence.
        q.apply_op3(v, keys.weight(), op)
    }
}

#[cfg(feature = "metal")]
type PlanFn = fn(
    &AttentionGeometry,
    &RotaryKeys,
    &super::plan::Partitions,
    f32,
    super::gpu::Route,
) -> Result<crate::backend::plan::Plan>;

struct SharedKv {
    settings: AttentionD512,
    keys: RotaryKeys,
    result: Resulting,
}

impl SharedKv {
    fn geometry(
        &self,
        (q, q_l): (DType, &Layout),
        (v, v_l): (DType, &Layout),
    ) -> Result<AttentionGeometry> {
        let causal = self.settings.causal;
        let g = AttentionGeometry::shared_kv_from_layouts(NAME, (q_l, q), (v_l, v), causal)?;
        self.keys.check(NAME, &g)?;
        Ok(g)
    }
}

impl CustomOp3 for SharedKv {
    fn name(&self) -> &'static str {
        NAME
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_l: &Layout,
        v: &CpuStorage,
        v_l: &Layout,
        weight: &CpuStorage,
        weight_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let g = self.geometry((q.dtype(), q_l), (v.dtype(), v_l))?;
        let start = weight_l.start_offset();
        let weight = &weight.as_slice::<f32>()?[start..start + HEAD_DIM];
        let (rows, rows_l) = self.keys.tables().rows().storage_and_layout();
        let Storage::Cpu(rows) = &*rows else {
            bail!("{NAME}: the rotary tables are not on the CPU, q and v are");
        };
        let row = 2 * self.keys.tables().pairs();
        let start = rows_l.start_offset() + self.keys.start() * row;
        let call = cpu::Call::rebuilding(
            &g,
            self.settings.plan(&g)?,
            self.settings.softmax_scale,
            self.settings.cpu_kernel.unwrap_or_else(CpuKernel::best),
            [q, v],
            weight,
            &rows.as_slice::<f32>()?[start..start + g.kv_len * row],
        )?;
        if let Resulting::Partials = self.result {
            let packed = call.partials()?;
            let len = packed.len();
            return Ok((CpuStorage::F32(packed), Shape::from(len)));
        }
        let storage = match g.q.dtype {
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
        Err(no_code_for(NAME, "q and v", "CUDA"))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &CudaStorage,
        q_l: &Layout,
        v: &CudaStorage,
        v_l: &Layout,
        weight: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let g = self.geometry((q.dtype(), q_l), (v.dtype(), v_l))?;
        let (rows, _) = self.keys.tables().rows().storage_and_layout();
        let Storage::Cuda(rows) = &*rows else {
            bail!("{NAME}: the rotary tables are not on a CUDA device, q and v are");
        };
        let inputs = [q, v, weight, rows];
        let keys = Some(&self.keys);
        super::cuda::forward(&self.settings, &g, keys, q_l, &inputs, &self.result)
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
        Err(no_code_for(NAME, "q and v", "Metal"))
    }

    #[cfg(feature = "metal")]
    fn metal_fwd(
        &self,
        q: &MetalStorage,
        q_l: &Layout,
        v: &MetalStorage,
        v_l: &Layout,
        weight: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        let g = self.geometry((q.dtype(), q_l), (v.dtype(), v_l))?;
        let (rows, _) = self.keys.tables().rows().storage_and_layout();
        let Storage::Metal(rows) = &*rows else {
            bail!("{NAME}: the rotary tables are not on a Metal device, q and v are");
        };
        let partitions = self.settings.plan(&g)?;
        let (plan, shape): (PlanFn, _) = match self.result {
            Resulting::Attention => (super::gpu::plan_shared_kv, q_l.shape().clone()),
            Resulting::Partials => {
                let states = partitions.count() * g.batch * g.q_heads * g.q_len;
                let packed = Shape::from(states * (2 + HEAD_DIM));
                (super::gpu::plan_shared_kv_states, packed)
            }
        };
        let plan = plan(
            &g,
            &self.keys,
            &partitions,
            self.settings.softmax_scale,
            self.settings.route,
        )?;
        Ok((
            crate::backend::metal::run_one(&plan, &[q, v, weight, rows])?,
            shape,
        ))
    }
}
