//! Keys that are rebuilt from values, so that a cache need hold only one of the two.
//!
//! Where keys and values come from one projection, `v = rms(x)` and `k = rotate(w * v)` with the weight `w` of the key norm
//! and the angles of the token's position: everything but `v` is known beforehand.

use candle::{bail, DType, Device, Result, Tensor};

use super::geometry::{AttentionGeometry, HEAD_DIM};
use crate::memory;

const NAME: &str = "rotary tables";

/// Pairs `(i, i + 256)` of a head.
const PAIRS: usize = HEAD_DIM / 2;

/// Tables are filled up to whole vectors of pairs, with angles of 0.
const WHOLE: usize = 32;

/// Cosine and sine of `position * frequency`: in f64, rounded once, so that no position is lost.
pub(crate) fn cos_sin(position: usize, frequency: f64) -> (f32, f32) {
    let (sin, cos) = (position as f64 * frequency).sin_cos();
    (cos as f32, sin as f32)
}

/// Cosines and sines of the positions `0..positions`, of the pairs that turn alone; clones share their memory.
#[derive(Debug, Clone)]
pub struct RotaryTables {
    /// Radians a position, of the pairs up to the last that turns.
    frequencies: Vec<f64>,
    /// f32 `(positions, 2 * pairs)`: the cosines of a position, then its sines.
    rows: Tensor,
}

impl RotaryTables {
    /// Of pairs `(i, i + 256)` that turn by `frequencies[i]` radians a position; those past the end do not turn.
    ///
    /// # Errors
    ///
    /// More than 256 frequencies, one that is not finite, no position, or more positions than memory can be asked for.
    pub fn new(frequencies: &[f64], positions: usize, device: &Device) -> Result<Self> {
        if frequencies.len() > PAIRS {
            bail!(
                "rotary tables: got {} frequencies, want at most {PAIRS}, one a pair of a head of {HEAD_DIM}",
                frequencies.len()
            );
        }
        if let Some(i) = frequencies.iter().position(|f| !f.is_finite()) {
            bail!(
                "rotary tables: frequency {i} is {}, want a finite one",
                frequencies[i]
            );
        }
        if positions == 0 {
            bail!("rotary tables: got 0 positions, want at least 1");
        }
        let turning = frequencies.iter().rposition(|&f| f != 0.0);
        let frequencies = frequencies[..turning.map_or(0, |last| last + 1)].to_vec();
        let rows = rows(&frequencies, 0, positions, device)?;
        Ok(Self { frequencies, rows })
    }

    /// The same for the positions `0..positions`, at least as many as now: only the new ones are computed.
    pub fn extended(&self, positions: usize) -> Result<Self> {
        let held = self.positions();
        if positions < held {
            bail!(
                "rotary tables: got {positions} positions, want at least the {held} that are there"
            );
        }
        if positions == held {
            return Ok(self.clone());
        }
        let (device, row) = (self.rows.device(), self.rows.dims()[1]);
        let what = format_args!("{positions} positions of {} pairs", row / 2);
        memory::check(NAME, what, &[positions, row], 4, device)?;
        let new = rows(&self.frequencies, held, positions, device)?;
        Ok(Self {
            frequencies: self.frequencies.clone(),
            rows: Tensor::cat(&[&self.rows, &new], 0)?,
        })
    }

    /// The same on `device`.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        Ok(Self {
            frequencies: self.frequencies.clone(),
            rows: self.rows.to_device(device)?,
        })
    }

    /// Positions from 0 up that the tables reach to.
    pub fn positions(&self) -> usize {
        self.rows.dims()[0]
    }

    /// Pairs that they have angles for, the first of a head: those that turn, in whole vectors of 32.
    pub fn pairs(&self) -> usize {
        self.rows.dims()[1] / 2
    }

    /// Bytes of a position.
    pub fn row_bytes(frequencies: &[f64]) -> usize {
        2 * whole_pairs(frequencies) * DType::F32.size_in_bytes()
    }

    /// Whether they are the tables of these frequencies.
    pub fn are_of(&self, frequencies: &[f64]) -> bool {
        let (known, rest) = frequencies.split_at(self.frequencies.len().min(frequencies.len()));
        known == self.frequencies && rest.iter().all(|&f| f == 0.0)
    }

    /// Bytes that they take.
    pub fn bytes(&self) -> usize {
        self.rows.elem_count() * self.rows.dtype().size_in_bytes()
    }

    /// f32 `(positions, 2 * pairs)`: the cosines of a position, then its sines.
    pub fn rows(&self) -> &Tensor {
        &self.rows
    }
}

fn whole_pairs(frequencies: &[f64]) -> usize {
    let turning = frequencies.iter().rposition(|&f| f != 0.0);
    turning.map_or(1, |last| last + 1).next_multiple_of(WHOLE)
}

fn rows(frequencies: &[f64], first: usize, end: usize, device: &Device) -> Result<Tensor> {
    let pairs = whole_pairs(frequencies);
    let what = format_args!("{end} positions of {pairs} pairs");
    let len = memory::addressable(NAME, what, &[end - first, 2 * pairs], 4)?;
    // The largest angle is at the last position.
    let last = end.saturating_sub(1) as f64;
    if let Some(i) = frequencies.iter().position(|f| !(last * f).is_finite()) {
        bail!(
            "rotary tables: frequency {i} is {:e}, which at position {last} turns by more than f64 holds",
            frequencies[i]
        );
    }
    let mut rows = memory::zeros::<f32>(NAME, what, len)?;
    for (position, row) in (first..end).zip(rows.chunks_exact_mut(2 * pairs)) {
        let (cos, sin) = row.split_at_mut(pairs);
        cos.fill(1.0);
        for ((cos, sin), &frequency) in cos.iter_mut().zip(sin).zip(frequencies) {
            (*cos, *sin) = cos_sin(position, frequency);
        }
    }
    Tensor::from_vec(rows, (end - first, 2 * pairs), device)
}

/// How the keys of a layer follow from its values: `k = rotate(weight * v)`.
///
/// ```
/// use candle::{DType, Device, Tensor};
/// use gem::attention::{RotaryKeys, RotaryTables};
/// # fn main() -> candle::Result<()> {
/// // Gemma 4: 64 of 256 pairs turn, the exponent runs over the whole head.
/// let frequencies: Vec<f64> = (0..64).map(|i| 1e6f64.powf(-2.0 * i as f64 / 512.0)).collect();
/// let tables = RotaryTables::new(&frequencies, 1024, &Device::Cpu)?;
/// let keys = RotaryKeys::new(&Tensor::ones(512, DType::F32, &Device::Cpu)?, &tables)?;
///
/// let q = Tensor::ones((1, 8, 1, 512), DType::F32, &Device::Cpu)?;
/// let v = Tensor::ones((1, 2, 40, 512), DType::BF16, &Device::Cpu)?;
/// let out = gem::attention_d512_shared_kv(&q, &v, &keys.at(100), 1.0)?; // cached token t is at position 100 + t
/// assert_eq!(out.dims(), [1, 8, 1, 512]);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct RotaryKeys {
    weight: Tensor,
    tables: RotaryTables,
    start: usize,
}

impl RotaryKeys {
    /// `weight`: that of the key norm, f32 `(512)`, on the device of the tables. Cached token 0 is at position 0.
    pub fn new(weight: &Tensor, tables: &RotaryTables) -> Result<Self> {
        if weight.dims() != [HEAD_DIM] || weight.dtype() != DType::F32 {
            bail!(
                "rotary keys: the weight is {:?} {:?}, want [{HEAD_DIM}] F32",
                weight.dims(),
                weight.dtype()
            );
        }
        if !weight.device().same_device(tables.rows.device()) {
            bail!(
                "rotary keys: the weight is on {:?} and the tables on {:?}, want one device",
                weight.device().location(),
                tables.rows.device().location()
            );
        }
        Ok(Self {
            weight: weight.contiguous()?,
            tables: tables.clone(),
            start: 0,
        })
    }

    /// The same with cached token 0 at position `start`, as in a cache whose first tokens were dropped.
    pub fn at(&self, start: usize) -> Self {
        Self {
            start,
            ..self.clone()
        }
    }

    /// Position of cached token 0.
    pub fn start(&self) -> usize {
        self.start
    }

    /// `(512)`, f32.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The angles.
    pub fn tables(&self) -> &RotaryTables {
        &self.tables
    }

    /// Fails unless the tables reach to every token of the geometry.
    pub(super) fn check(&self, op: &str, g: &AttentionGeometry) -> Result<()> {
        let positions = self.tables.positions();
        match self.start.checked_add(g.kv_len) {
            Some(end) if end <= positions => Ok(()),
            _ => bail!(
                "{op}: {} cached tokens from position {} on reach past the rotary tables, which have {positions} positions",
                g.kv_len,
                self.start
            ),
        }
    }
}
