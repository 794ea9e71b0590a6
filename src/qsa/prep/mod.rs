//! From the projections of a chunk to what QSA attends with: norms, RoPE, 8-bit keys and values, pooled indexer keys.

mod carry;
mod codes;
mod cpu;
pub mod geometry;
pub mod gpu;

use crate::backend::no_code_for;
use candle::op::BackpropOp;
use candle::{bail, Error, Result, Storage, Tensor};

pub use carry::{QsaChunk, QsaNorms, QsaState, ROPE_THETA};
pub use codes::QsaCodes;
use geometry::{PrepGeometry, NAME};

/// The projections of a chunk of `T` tokens, rows of any stride: views of one fused buffer or tensors of their own.
#[derive(Debug, Clone, Copy)]
pub struct QsaInputs<'a> {
    /// `(T, 24 * 512)`, f32 or f16: for each head 256 rows of query, then 256 of gate, which is not read.
    pub q: &'a Tensor,
    /// `(T, 2 * 256)`, f32.
    pub k: &'a Tensor,
    /// `(T, 2 * 256)`, f32.
    pub v: &'a Tensor,
    /// `(T, 128)`, f32: the key head of the indexer.
    pub ik: &'a Tensor,
    /// `(T, 4 * 128)`, f32: the query heads of the indexer, where they are needed.
    pub iq: Option<&'a Tensor>,
}

/// What [`qsa_prep`] makes of a chunk of `T` tokens. Everything is contiguous and new; no input is written.
#[derive(Debug, Clone)]
pub struct QsaPrepared {
    /// Queries, `(T, 24, 256)`, in the dtype of q.
    pub qcur: Tensor,
    /// Queries of the indexer, f32 `(T, 4, 128)`: where there was an iq.
    pub qidx: Option<Tensor>,
    /// Keys: kq, ksc.
    pub k: QsaCodes,
    /// Values: vq, vsc.
    pub v: QsaCodes,
    /// f32 `(blocks + 1, 128)`: a row for each block that the chunk completes, then the dead row.
    pub pooled: Tensor,
    /// The block of row 0 of `pooled`: `pos0 / 4`.
    pub first_block: usize,
    /// For the next chunk: tail and dead.
    pub state: QsaState,
}

/// What QSA attends with, from the projections of one chunk. Token `t` has position `p = pos0 + t`.
///
/// ```text
/// rms(x, g) = x / sqrt(mean(x^2) + 1e-6) * g
/// R_p       = rotary embedding of the first 64 dimensions, pairs (i, i + 32), base 1e7
///
/// qcur[t, h] = R_p(rms(q[t, h], g_q))                 24 heads of 256
/// qidx[t, h] = R_p(rms(iq[t, h], g_iq))               4 heads of 128
/// k[t, h]    = Q8(R_p(rms(k[t, h], g_k)))             2 heads of 256; Q8: see QsaCodes
/// v[t, h]    = Q8(v[t, h])
/// pooled[b]  = R_{4b}(rms(mean(ik at 4b .. 4b + 3), g_ik))
/// dead       = R_0(rms(ik at 0, g_ik))
/// ```
///
/// # Arguments
///
/// * `inputs` - The projections, `(T, ..)`.
/// * `norms` - g_q, g_k, g_iq, g_ik.
/// * `chunk` - pos0 and T, and the rotary angles.
/// * `state` - What the chunk before left, or [`QsaState::start`]; its position must be pos0.
///
/// # Blocks across chunks
///
/// A block of 4 tokens is pooled by the chunk that holds its last token. The caller keeps one table of `(blocks + 1, 128)`
/// and lays each call's `pooled` over it from row [`first_block`](QsaPrepared::first_block) on; this replaces the dead row of the
/// call before and puts the new one behind the last complete block. Any split of the same tokens into chunks gives the same
/// bits in every result.
///
/// Sums have one order on every device, so the same bits everywhere, as far as a device rounds as IEEE 754 says. f32
/// throughout; a NaN, an infinity or squares past f32 make their row of q, k, iq or ik NaN, in v a NaN or infinity its group of 64.
///
/// # Errors
///
/// A shape, dtype or stride other than above, inputs on several devices or on one that there is no code for, a state that was
/// left at another position than pos0, and inputs that are tracked for a gradient: there is no backward pass.
///
/// ```
/// use candle::{DType, Device, Tensor};
/// use gem::qsa::{qsa_prep, QsaChunk, QsaInputs, QsaNorms, QsaState};
/// # fn main() -> candle::Result<()> {
/// let device = Device::Cpu;
/// let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &device);
/// let norms = QsaNorms::new(&ones(&[256])?, &ones(&[256])?, &ones(&[128])?, &ones(&[128])?)?;
/// let fused = ones(&[6, 1152])?; // k | v | ik
/// let inputs = QsaInputs {
///     q: &ones(&[6, 24 * 512])?,
///     k: &fused.narrow(1, 0, 512)?,
///     v: &fused.narrow(1, 512, 512)?,
///     ik: &fused.narrow(1, 1024, 128)?,
///     iq: None,
/// };
/// let chunk = QsaChunk::new(0, 6, &device)?;
/// let out = qsa_prep(&inputs, &norms, &chunk, &QsaState::start(&device)?)?;
/// assert_eq!(out.pooled.dims(), [2, 128]); // block 0, dead
/// assert_eq!(out.state.pos(), 6);
/// # Ok(())
/// # }
/// ```
pub fn qsa_prep(
    inputs: &QsaInputs,
    norms: &QsaNorms,
    chunk: &QsaChunk,
    state: &QsaState,
) -> Result<QsaPrepared> {
    let geometry = PrepGeometry::new(inputs, norms, chunk, state)?;
    // candle's custom ops give one tensor of one dtype; these are up to eight of three, so they are made by hand.
    let mut made = execute(&geometry, &operands(inputs, norms, chunk, state))?
        .into_iter()
        .zip(geometry.outputs())
        .map(|(made, (_, shape))| Tensor::from_storage(made, shape, BackpropOp::none(), false));
    let mut next = || {
        made.next()
            .ok_or_else(|| Error::Msg(format!("{NAME}: an output is missing")))
    };
    let qcur = next()?;
    let mut codes = || -> Result<QsaCodes> {
        Ok(QsaCodes {
            codes: next()?,
            scales: next()?,
        })
    };
    let (k, v) = (codes()?, codes()?);
    Ok(QsaPrepared {
        qcur,
        k,
        v,
        pooled: next()?,
        first_block: chunk.pos0() / geometry::BLOCK,
        state: QsaState::unpack(chunk.pos0() + chunk.tokens(), next()?),
        qidx: inputs.iq.map(|_| next()).transpose()?,
    })
}

/// What every executor reads, in order: q, k, v, ik, norms, angles, state, and iq where there is one.
pub fn operands<'a>(
    inputs: &QsaInputs<'a>,
    norms: &'a QsaNorms,
    chunk: &'a QsaChunk,
    state: &'a QsaState,
) -> Vec<&'a Tensor> {
    let held = [norms.packed(), chunk.angles(), state.packed()];
    let QsaInputs { q, k, v, ik, iq } = *inputs;
    [q, k, v, ik].into_iter().chain(held).chain(iq).collect()
}

fn execute(geometry: &PrepGeometry, operands: &[&Tensor]) -> Result<Vec<Storage>> {
    let guards: Vec<_> = operands.iter().map(|t| t.storage_and_layout().0).collect();
    let storages: Vec<&Storage> = guards.iter().map(|guard| &**guard).collect();
    match storages.first() {
        Some(Storage::Cpu(_)) => cpu::run(geometry, &storages),
        #[cfg(feature = "metal")]
        Some(Storage::Metal(_)) => on_metal(geometry, &storages),
        #[cfg(not(feature = "metal"))]
        Some(Storage::Metal(_)) => Err(no_code_for(NAME, "the inputs", "Metal")),
        #[cfg(feature = "cuda")]
        Some(Storage::Cuda(_)) => on_cuda(geometry, &storages),
        #[cfg(not(feature = "cuda"))]
        Some(Storage::Cuda(_)) => Err(no_code_for(NAME, "the inputs", "CUDA")),
        None => bail!("{NAME}: a call without inputs"),
    }
}

#[cfg(feature = "metal")]
fn on_metal(geometry: &PrepGeometry, storages: &[&Storage]) -> Result<Vec<Storage>> {
    let storages = storages
        .iter()
        .map(|storage| match storage {
            Storage::Metal(storage) => Ok(storage),
            _ => bail!("{NAME}: an input is not on the Metal device of the others"),
        })
        .collect::<Result<Vec<_>>>()?;
    let made = crate::backend::metal::run(&gpu::plan(geometry), &storages)?;
    Ok(made.into_iter().map(Storage::Metal).collect())
}

#[cfg(feature = "cuda")]
fn on_cuda(geometry: &PrepGeometry, storages: &[&Storage]) -> Result<Vec<Storage>> {
    let storages = storages
        .iter()
        .map(|storage| match storage {
            Storage::Cuda(storage) => Ok(storage),
            _ => bail!("{NAME}: an input is not on the CUDA device of the others"),
        })
        .collect::<Result<Vec<_>>>()?;
    let made = crate::backend::cuda::run(&gpu::plan_cuda(geometry), &storages)?;
    Ok(made.into_iter().map(Storage::Cuda).collect())
}
