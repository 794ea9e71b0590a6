//! candle's own fused attention kernel for one query row, on Metal: an arm to compare with.
//!
//! candle launches it with a fixed number of threads and assumes how K and V lie; what does not fit would leave zeros or read
//! the wrong rows without a word. Here it is an error. Its kernel for several query rows reads past K and V unless their
//! number is a multiple of its tile, so it is not offered.

use candle::{bail, DType, Device, Result, Tensor};

const NAME: &str = "sdpa";

/// Those that candle has kernels for.
const HEAD_DIMS: [usize; 6] = [32, 64, 96, 128, 256, 512];

/// `softmax(q k^T * softmax_scale) v` by `candle_nn::ops::sdpa`, for one query row that sees every key.
///
/// # Arguments
///
/// * `q` - Query tensor with shape `(batch, q_heads, 1, head_dim)`, contiguous.
/// * `k`, `v` - `(batch, kv_heads, kv_len, head_dim)`, rows next to each other, heads as far apart in both as they like, batches
///   as far apart as `kv_heads` heads. The dtype of `q`: f32, f16 or bf16.
///
/// Returns `(batch, q_heads, 1, head_dim)` in the dtype of `q`.
///
/// # Errors
///
/// A device other than Metal, or a pipeline of it that can't run as many threads as candle launches; more than one query
/// row; shapes, dtypes or strides that the kernel does not expect; a head_dim that candle has no kernel for.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32) -> Result<Tensor> {
    check(q, k, v)?;
    check_device(q.device(), q.dtype(), q.dim(3)?)?;
    candle_nn::ops::sdpa(q, k, v, None, false, softmax_scale, 1.0)
}

/// Why candle's kernels can't run there.
///
/// # Errors
///
/// A device other than Metal, a pipeline of it that can't run as many threads as candle launches, a dtype or head_dim that candle
/// has no kernel for.
pub fn check_device(device: &Device, dtype: DType, head_dim: usize) -> Result<()> {
    if !HEAD_DIMS.contains(&head_dim) {
        bail!("{NAME}: candle has no kernel for head_dim {head_dim}, want one of {HEAD_DIMS:?}");
    }
    if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16) {
        bail!("{NAME}: candle has no kernel for dtype {dtype:?}, want F32, F16 or BF16");
    }
    match device {
        #[cfg(feature = "metal")]
        Device::Metal(device) => check_threads(device, dtype, head_dim),
        #[cfg(not(feature = "metal"))]
        Device::Metal(_) => bail!("{NAME}: not in this build, want the feature `metal`"),
        _ => bail!(
            "{NAME}: not on this device: candle's kernel is for Metal, got {:?}",
            device.location()
        ),
    }
}

fn check(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<()> {
    let (batch, q_heads, q_len, head_dim) = q.dims4()?;
    let (_, kv_heads, kv_len, _) = k.dims4()?;
    if q_len != 1 {
        bail!("{NAME}: q has {q_len} rows, want 1");
    }
    if k.dims() != [batch, kv_heads, kv_len, head_dim] || v.dims() != k.dims() {
        bail!(
            "{NAME}: k is {:?} and v {:?}, want both ({batch}, kv_heads, kv_len, {head_dim}) to fit q {:?}",
            k.dims(),
            v.dims(),
            q.dims()
        );
    }
    if batch == 0
        || kv_heads == 0
        || kv_len == 0
        || !q_heads.is_multiple_of(kv_heads)
        || q_heads == 0
    {
        bail!("{NAME}: {q_heads} query heads on {kv_heads} heads of {kv_len} keys in a batch of {batch}, want at least one of each, and a multiple");
    }
    for (name, t) in [("k", k), ("v", v)] {
        if t.dtype() != q.dtype() {
            bail!(
                "{NAME}: {name} has dtype {:?}, want that of q, {:?}",
                t.dtype(),
                q.dtype()
            );
        }
    }
    if !q.is_contiguous() {
        bail!("{NAME}: q has strides {:?}, want contiguous", q.stride());
    }
    for (name, t) in [("k", k), ("v", v)] {
        let stride = t.stride();
        let rows = stride[3] == 1 && stride[2] == head_dim;
        let batches = batch == 1 || stride[0] == kv_heads * stride[1];
        if !rows || !batches {
            bail!("{NAME}: {name} of shape {:?} has strides {stride:?}, want neighbouring rows, and batches {kv_heads} heads apart", t.dims());
        }
    }
    Ok(())
}

/// Metal drops a launch of more threads than the pipeline can run and leaves the output as it was. candle does not look.
#[cfg(feature = "metal")]
fn check_threads(device: &candle::MetalDevice, dtype: DType, head_dim: usize) -> Result<()> {
    use candle_metal_kernels::metal::{ConstantValues, Value};
    use candle_metal_kernels::source::Source;
    for (entry, threads, masked) in launches(dtype, head_dim) {
        // As candle asks for it, so that the pipeline is made once.
        let constants = masked.then(|| ConstantValues::new(vec![(20, Value::Bool(false))]));
        let pipeline = device
            .kernels()
            .load_pipeline_with_constants(
                device.metal_device(),
                Source::Sdpa,
                entry.clone(),
                constants,
            )
            .map_err(|e| candle::Error::from(candle::MetalError::from(e)))?;
        let most = pipeline.max_total_threads_per_threadgroup();
        if threads > most {
            bail!("{NAME}: candle launches {entry} with {threads} threads, this device can run {most}");
        }
    }
    Ok(())
}

/// Kernels that candle launches (the first alone below 1,024 keys, else the other two), with how many threads, and whether they
/// take the constant for masks.
#[cfg(any(feature = "metal", test))]
fn launches(dtype: DType, head_dim: usize) -> [(String, usize, bool); 3] {
    let name = match dtype {
        DType::F16 => "float16_t",
        DType::BF16 => "bfloat16_t",
        _ => "float",
    };
    let entry = |kind: &str| format!("sdpa_vector_{kind}{name}_{head_dim}");
    [
        (entry(""), 1024, true),
        (entry("2pass_1_"), 256, true),
        (entry("2pass_2_"), 1024, false),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(q: &Tensor, k: &Tensor, v: &Tensor) -> String {
        let backtrace = |e: candle::Error| e.to_string().lines().next().map(str::to_string);
        match attention(q, k, v, 1.0) {
            Ok(_) => "not refused".to_string(),
            Err(e) => backtrace(e).unwrap_or_default(),
        }
    }

    #[test]
    fn what_candles_kernel_would_get_wrong_is_refused_before_the_device_is_asked() -> Result<()> {
        let zeros = |dims: [usize; 4]| Tensor::zeros(&dims, DType::F32, &Device::Cpu);
        let (q, kv) = (zeros([2, 8, 1, 512])?, zeros([2, 2, 9, 512])?);
        insta::assert_snapshot!(refusal(&q, &kv, &kv), @"sdpa: not on this device: candle's kernel is for Metal, got Cpu");
        insta::assert_snapshot!(refusal(&zeros([2, 8, 3, 512])?, &kv, &kv), @"sdpa: q has 3 rows, want 1");
        insta::assert_snapshot!(refusal(&q, &kv, &zeros([2, 2, 8, 512])?), @"sdpa: k is [2, 2, 9, 512] and v [2, 2, 8, 512], want both (2, kv_heads, kv_len, 512) to fit q [2, 8, 1, 512]");
        insta::assert_snapshot!(refusal(&zeros([2, 7, 1, 512])?, &kv, &kv), @"sdpa: 7 query heads on 2 heads of 9 keys in a batch of 2, want at least one of each, and a multiple");
        let narrow = zeros([2, 2, 9, 80])?;
        insta::assert_snapshot!(refusal(&zeros([2, 8, 1, 80])?, &narrow, &narrow), @"sdpa: candle has no kernel for head_dim 80, want one of [32, 64, 96, 128, 256, 512]");
        insta::assert_snapshot!(refusal(&q, &kv, &kv.to_dtype(DType::F16)?), @"sdpa: v has dtype F16, want that of q, F32");
        let ids = |t: &Tensor| t.to_dtype(DType::U32);
        insta::assert_snapshot!(refusal(&ids(&q)?, &ids(&kv)?, &ids(&kv)?), @"sdpa: candle has no kernel for dtype U32, want F32, F16 or BF16");
        let spread = zeros([2, 2, 9, 1024])?.narrow(3, 0, 512)?;
        insta::assert_snapshot!(refusal(&q, &spread, &kv), @"sdpa: k of shape [2, 2, 9, 512] has strides [18432, 9216, 1024, 1], want neighbouring rows, and batches 2 heads apart");
        // What a cache hands out: batches further apart than its heads.
        let cache = zeros([2, 4, 9, 512])?.narrow(1, 0, 2)?;
        insta::assert_snapshot!(refusal(&q, &kv, &cache), @"sdpa: v of shape [2, 2, 9, 512] has strides [18432, 4608, 512, 1], want neighbouring rows, and batches 2 heads apart");
        insta::assert_snapshot!(refusal(&zeros([2, 8, 2, 512])?.narrow(2, 0, 1)?, &kv, &kv), @"sdpa: q has strides [8192, 1024, 512, 1], want contiguous");
        Ok(())
    }

    /// As candle 0.11.1 does in `call_sdpa_vector` and `call_sdpa_vector_2pass`.
    #[test]
    fn the_launches_that_are_checked_are_those_of_candle() {
        let launch = |entry: &str, threads, masked| (entry.to_string(), threads, masked);
        assert_eq!(
            launches(DType::F32, 256),
            [
                launch("sdpa_vector_float_256", 1024, true),
                launch("sdpa_vector_2pass_1_float_256", 256, true),
                launch("sdpa_vector_2pass_2_float_256", 1024, false)
            ]
        );
    }
}
