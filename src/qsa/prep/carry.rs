//! What a call needs besides the rows of its chunk: norm weights, positions, and what the chunk before left.

use super::geometry::{refuse_tracked, BLOCK, HEAD_DIM, INDEX_DIM, MOST_TOKENS, NAME, ROPE_DIM};
use crate::memory;
use candle::{bail, DType, Device, Result, Tensor};

/// Base of the rotary frequencies.
pub const ROPE_THETA: f64 = 1e7;

/// Positions from here on are not exact in f64.
const MOST_POSITIONS: usize = 1 << 53;

/// The weights of the four norms, as they multiply: 1 more than what is stored where a checkpoint stores the distance from 1.
#[derive(Debug, Clone)]
pub struct QsaNorms {
    /// q, k, iq, ik; f32.
    packed: Tensor,
}

impl QsaNorms {
    /// From `g_q`, `g_k` of shape `(256)` and `g_iq`, `g_ik` of shape `(128)`, in f32, f16 or bf16.
    ///
    /// # Errors
    ///
    /// Another shape or dtype, several devices, or a weight that is tracked for a gradient.
    pub fn new(g_q: &Tensor, g_k: &Tensor, g_iq: &Tensor, g_ik: &Tensor) -> Result<Self> {
        let mut wide = vec![];
        for (name, weight, len) in [
            ("g_q", g_q, HEAD_DIM),
            ("g_k", g_k, HEAD_DIM),
            ("g_iq", g_iq, INDEX_DIM),
            ("g_ik", g_ik, INDEX_DIM),
        ] {
            if !matches!(weight.dtype(), DType::F32 | DType::F16 | DType::BF16) {
                bail!(
                    "{NAME}: {name} has dtype {:?}, want f32, f16 or bf16",
                    weight.dtype()
                );
            }
            check_shape(name, weight, &[len])?;
            check_device(name, weight, "g_q", g_q)?;
            refuse_tracked(name, weight)?;
            wide.push(weight.to_dtype(DType::F32)?);
        }
        Ok(Self {
            packed: Tensor::cat(&wide, 0)?,
        })
    }

    /// The four one after the other, as executors read them: q, k, iq, ik; f32 `(768)`.
    pub fn packed(&self) -> &Tensor {
        &self.packed
    }
}

/// The positions `pos0 .. pos0 + tokens` and their rotary angles: made once a chunk, used by every layer.
///
/// Angles are computed in f64 and their cosines and sines rounded once to f32, on the host for every device: rounded to f32, an
/// angle at position 65,536 would be off by up to 2e-3 of a radian.
#[derive(Debug, Clone)]
pub struct QsaChunk {
    pos0: usize,
    tokens: usize,
    angles: Tensor,
}

impl QsaChunk {
    /// For inputs on `device`.
    ///
    /// # Errors
    ///
    /// No token, more than [`MOST_TOKENS`], or positions past 2^53.
    pub fn new(pos0: usize, tokens: usize, device: &Device) -> Result<Self> {
        if tokens == 0 {
            bail!("{NAME}: got a chunk of 0 tokens, want at least 1");
        }
        if tokens > MOST_TOKENS {
            bail!("{NAME}: got a chunk of {tokens} tokens, want at most {MOST_TOKENS}");
        }
        let end = match pos0.checked_add(tokens) {
            Some(end) if end <= MOST_POSITIONS => end,
            _ => bail!(
                "{NAME}: {tokens} tokens from position {pos0} on pass position {MOST_POSITIONS}"
            ),
        };
        let pairs = ROPE_DIM / 2;
        let frequencies: Vec<f64> = (0..pairs)
            .map(|i| ROPE_THETA.powf(-2.0 * i as f64 / ROPE_DIM as f64))
            .collect();
        // A block that the chunk completes may have begun before it.
        let first = pos0 - pos0 % BLOCK;
        let mut angles = memory::zeros(NAME, "angles", (end - first) * ROPE_DIM)?;
        for (position, row) in (first..end).zip(angles.chunks_exact_mut(ROPE_DIM)) {
            let (cosines, sines) = row.split_at_mut(pairs);
            for ((cos, sin), frequency) in cosines.iter_mut().zip(sines).zip(&frequencies) {
                let (s, c) = (position as f64 * frequency).sin_cos();
                (*cos, *sin) = (c as f32, s as f32);
            }
        }
        Ok(Self {
            pos0,
            tokens,
            angles: Tensor::from_vec(angles, (end - first, ROPE_DIM), device)?,
        })
    }

    /// Position of the first token.
    pub fn pos0(&self) -> usize {
        self.pos0
    }

    /// How many tokens.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// As executors read them: a row for each position from `pos0 - pos0 % 4` on, 32 cosines and 32 sines; f32.
    pub fn angles(&self) -> &Tensor {
        &self.angles
    }
}

/// What a chunk leaves for the next one: its end, the raw indexer keys of the unfinished block, and the dead row.
#[derive(Debug, Clone)]
pub struct QsaState {
    pos: usize,
    /// Three rows of tail, one of dead; f32.
    packed: Tensor,
}

impl QsaState {
    /// The state of a sequence without a token.
    pub fn start(device: &Device) -> Result<Self> {
        Ok(Self::unpack(
            0,
            Tensor::zeros((BLOCK, INDEX_DIM), DType::F32, device)?,
        ))
    }

    /// A state that was kept elsewhere: `pos` is the position of the next token, `tail` has shape `(3, 128)`, `dead` `(128)`.
    ///
    /// # Errors
    ///
    /// Another shape, a dtype other than f32, several devices, or a tensor that is tracked for a gradient.
    pub fn new(pos: usize, tail: &Tensor, dead: &Tensor) -> Result<Self> {
        for (name, t, shape) in [
            ("tail", tail, &[BLOCK - 1, INDEX_DIM] as &[usize]),
            ("dead", dead, &[INDEX_DIM]),
        ] {
            if t.dtype() != DType::F32 {
                bail!("{NAME}: {name} has dtype {:?}, want f32", t.dtype());
            }
            check_shape(name, t, shape)?;
            refuse_tracked(name, t)?;
        }
        check_device("dead", dead, "tail", tail)?;
        let packed = Tensor::cat(&[tail, &dead.unsqueeze(0)?], 0)?;
        Ok(Self::unpack(pos, packed))
    }

    pub(super) fn unpack(pos: usize, packed: Tensor) -> Self {
        Self { pos, packed }
    }

    /// Position of the next token.
    pub fn pos(&self) -> usize {
        self.pos
    }

    /// f32 `(3, 128)`: slot `p % 4` holds ik of position `p` of the unfinished block, the others hold 0.
    pub fn tail(&self) -> Result<Tensor> {
        self.packed.narrow(0, 0, BLOCK - 1)
    }

    /// f32 `(128)`: the normed ik of position 0, turned by the angles of position 0.
    pub fn dead(&self) -> Result<Tensor> {
        self.packed.get(BLOCK - 1)
    }

    /// As executors read it: the three slots of the tail, then dead; f32 `(4, 128)`.
    pub fn packed(&self) -> &Tensor {
        &self.packed
    }
}

fn check_shape(name: &str, t: &Tensor, want: &[usize]) -> Result<()> {
    if t.dims() != want {
        bail!("{NAME}: {name} has shape {:?}, want {want:?}", t.dims());
    }
    Ok(())
}

fn check_device(name: &str, t: &Tensor, other: &str, first: &Tensor) -> Result<()> {
    if !t.device().same_device(first.device()) {
        bail!(
            "{NAME}: {other} and {name} must be on one device, got {:?} and {:?}",
            first.device().location(),
            t.device().location()
        );
    }
    Ok(())
}
