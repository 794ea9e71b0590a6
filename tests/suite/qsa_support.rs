//! Inputs of the QSA tests, and results as bytes.

use crate::common::message;
use candle::{CpuStorage, DType, Device, Result, Storage, Tensor};
use gem::qsa::{qsa_prep, QsaChunk, QsaInputs, QsaNorms, QsaPrepared, QsaState};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Chunk lengths and first positions of the parity tests.
pub const TOKENS: [usize; 7] = [2, 3, 5, 517, 1029, 1983, 2048];
pub const POSITIONS: [usize; 8] = [0, 1, 1022, 2047, 2048, 2050, 4093, 6143];

/// Uniform in -2..2: one draw a value, so that a chunk of 2048 tokens is made quickly.
pub fn uniform(seed: u64, shape: impl Into<candle::Shape>) -> Result<Tensor> {
    let shape = shape.into();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let values: Vec<f32> = (0..shape.elem_count())
        .map(|_| 4.0 * rng.random::<f32>() - 2.0)
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu)
}

pub fn norms() -> Result<QsaNorms> {
    QsaNorms::new(
        &uniform(11, 256)?,
        &uniform(12, 256)?,
        &uniform(13, 128)?,
        &uniform(14, 128)?,
    )
}

/// A state that was left at `pos`, or the first one.
pub fn state_at(pos: usize) -> Result<QsaState> {
    match pos {
        0 => QsaState::start(&Device::Cpu),
        _ => QsaState::new(pos, &uniform(15, (3, 128))?, &uniform(16, 128)?),
    }
}

/// The projections of some tokens, and how their rows lie.
#[derive(Clone)]
pub struct Rows {
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub ik: Tensor,
    pub iq: Option<Tensor>,
}

impl Rows {
    /// Views of one buffer of 1664 columns.
    pub fn fused(seed: u64, tokens: usize) -> Result<Self> {
        let q = uniform(seed, (tokens, 24 * 512))?;
        Self::views(q, &uniform(seed + 1, (tokens, 1664))?)
    }

    /// k, v, ik, and iq where there are columns for it.
    pub fn views(q: Tensor, fused: &Tensor) -> Result<Self> {
        Ok(Self {
            q,
            k: fused.narrow(1, 0, 512)?,
            v: fused.narrow(1, 512, 512)?,
            ik: fused.narrow(1, 1024, 128)?,
            iq: match fused.dim(1)? {
                1152 => None,
                _ => Some(fused.narrow(1, 1152, 512)?),
            },
        })
    }

    fn map(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            q: f(&self.q)?,
            k: f(&self.k)?,
            v: f(&self.v)?,
            ik: f(&self.ik)?,
            iq: self.iq.as_ref().map(f).transpose()?,
        })
    }

    pub fn narrow(&self, first: usize, tokens: usize) -> Result<Self> {
        self.map(|t| t.narrow(0, first, tokens))
    }

    /// Tensors of their own.
    pub fn separate(&self) -> Result<Self> {
        self.map(|t| t.force_contiguous())
    }

    #[cfg(feature = "cuda")]
    pub fn on(&self, device: &Device) -> Result<Self> {
        // A view moves together with what it is a view of.
        self.map(|t| t.to_device(device))
    }

    pub fn q_as(&self, dtype: DType) -> Result<Self> {
        Ok(Self {
            q: self.q.to_dtype(dtype)?,
            ..self.clone()
        })
    }

    pub fn without_iq(&self) -> Self {
        Self {
            iq: None,
            ..self.clone()
        }
    }

    /// The same rows in one buffer of 1152 columns.
    pub fn in_1152(&self) -> Result<Self> {
        let fused = Tensor::cat(&[&self.k, &self.v, &self.ik], 1)?;
        Self::views(self.q.clone(), &fused)
    }

    /// What a reader of separate tensors sees in a fused buffer: the right first row, then the wrong ones.
    pub fn read_with_the_default_strides(&self) -> Result<Self> {
        let read = |t: &Tensor| {
            let (storage, layout) = t.storage_and_layout();
            let Storage::Cpu(CpuStorage::F32(values)) = &*storage else {
                panic!("not f32 on the CPU");
            };
            let shape = t.dims2()?;
            let from = layout.start_offset();
            Tensor::from_slice(&values[from..from + shape.0 * shape.1], shape, &Device::Cpu)
        };
        Ok(Self {
            q: self.q.clone(),
            k: read(&self.k)?,
            v: read(&self.v)?,
            ik: read(&self.ik)?,
            iq: self.iq.as_ref().map(read).transpose()?,
        })
    }

    pub fn inputs(&self) -> QsaInputs<'_> {
        QsaInputs {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            ik: &self.ik,
            iq: self.iq.as_ref(),
        }
    }

    pub fn tokens(&self) -> usize {
        self.q.dims()[0]
    }

    /// The op on all of the rows, from `state` on.
    pub fn prep(&self, state: &QsaState) -> Result<QsaPrepared> {
        let chunk = QsaChunk::new(state.pos(), self.tokens(), &Device::Cpu)?;
        qsa_prep(&self.inputs(), &norms()?, &chunk, state)
    }
}

/// The bytes of a tensor.
pub fn bytes(t: &Tensor) -> Vec<u8> {
    let t = t.flatten_all().unwrap();
    match t.dtype() {
        DType::U8 => t.to_vec1::<u8>().unwrap(),
        DType::F16 => t
            .to_vec1::<half::f16>()
            .unwrap()
            .iter()
            .flat_map(|x| x.to_ne_bytes())
            .collect(),
        _ => t
            .to_vec1::<f32>()
            .unwrap()
            .iter()
            .flat_map(|x| x.to_ne_bytes())
            .collect(),
    }
}

/// Every result by name, in the order of the executors.
pub fn results(out: &QsaPrepared) -> Vec<(&'static str, Tensor)> {
    let mut all = vec![
        ("qcur", out.qcur.clone()),
        ("kq", out.k.codes.clone()),
        ("ksc", out.k.scales.clone()),
        ("vq", out.v.codes.clone()),
        ("vsc", out.v.scales.clone()),
        ("pooled", out.pooled.clone()),
        ("tail and dead", out.state.packed().clone()),
    ];
    all.extend(out.qidx.clone().map(|qidx| ("qidx", qidx)));
    all
}

/// Names of the results whose bytes differ; the same results must be there.
pub fn differing(a: &QsaPrepared, b: &QsaPrepared) -> Vec<&'static str> {
    let (a, b) = (results(a), results(b));
    assert_eq!(a.len(), b.len());
    let pairs = a.into_iter().zip(b);
    pairs
        .filter(|((_, a), (_, b))| a.shape() != b.shape() || bytes(a) != bytes(b))
        .map(|((name, _), _)| name)
        .collect()
}

/// The text of a refusal.
pub fn refusal<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => "not refused".to_string(),
        Err(e) => message(e),
    }
}
