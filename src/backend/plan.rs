//! What a GPU is asked to do, as plain data: an executor encodes it, a test prints it, the harness of the tests runs it.

use candle::DType;
use sha2::{Digest, Sha256};

/// One or more kernel launches in order, with the scratch that they share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// What comes out. Not zeroed either: the passes write every element.
    pub outputs: Vec<Output>,
    /// Bytes of each scratch buffer. Not zeroed: the passes write every element that they read.
    pub scratch: Vec<u64>,
    /// In order; a later pass sees what an earlier one wrote.
    pub passes: Vec<Pass>,
}

impl Plan {
    /// SHA-256 of the plan and of the sources that it names, in hex: what a receipt binds. The same plan has the same digest
    /// in every process.
    pub fn digest(&self) -> String {
        // Everything in a plan is plain data, so its debug form says all of it.
        let mut hash = Sha256::new().chain_update(format!("{self:?}"));
        for source in Source::METAL.into_iter().chain(Source::CUDA) {
            if self.passes.iter().any(|pass| pass.source == source) {
                hash.update(source.whole());
            }
        }
        hex(hash.finalize().as_slice())
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A result, contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Output {
    /// Element type.
    pub dtype: DType,
    /// How many.
    pub elements: usize,
}

/// One launch of one kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pass {
    /// Which source text holds the kernel.
    pub source: Source,
    /// Name of the kernel in it.
    pub entry: &'static str,
    /// Buffer `n` of the kernel is `buffers[n]`; the parameters follow as the next one.
    pub buffers: Vec<Binding>,
    /// Bytes of the parameter struct.
    pub params: Vec<u8>,
    /// Threadgroups of the grid.
    pub threadgroups: [u32; 3],
    /// Threads of a threadgroup, in its first dimension: whole SIMD groups of 32.
    pub threads: u32,
    /// Dynamic threadgroup memory in bytes, a multiple of 16; 0 for none.
    pub threadgroup_bytes: u32,
}

/// A buffer of a pass, and what the pass does with it. Passes are ordered by what they read and write, so a buffer that is
/// written must say so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Binding {
    /// Only read.
    Read(Slot),
    /// Nothing that it held is read.
    Write(Slot),
    /// Read and written in place.
    Update(Slot),
}

impl Binding {
    /// Where the buffer comes from.
    pub fn slot(self) -> Slot {
        match self {
            Self::Read(slot) | Self::Write(slot) | Self::Update(slot) => slot,
        }
    }
}

/// Where a buffer comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// A tensor given to the op, by argument; whole storage, the parameters hold its offsets.
    Input(usize),
    /// A result of the plan.
    Output(usize),
    /// A scratch buffer of the plan.
    Scratch(usize),
}

/// Whose kernels a plan names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Those of `metal/`.
    Metal,
    /// Those of `cuda/`.
    Cuda,
}

/// A file of `metal/` or `cuda/`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Source {
    /// The fused first pass.
    AttentionD512,
    /// What is done with partial states.
    AttentionStates,
    /// The first pass on the matrix units.
    AttentionMatrix,
    /// The first pass that rebuilds keys from values.
    AttentionSharedKv,
    /// The unfused baseline.
    AttentionStaged,
    /// The fused projection.
    Projection,
    /// Norms, RoPE, 8-bit keys and values and pooled indexer keys of QSA.
    QsaPrep,
    /// For CUDA: the fused first pass.
    CudaD512,
    /// For CUDA: the first pass on the matrix units.
    CudaMatrix,
    /// For CUDA: the first pass of many query rows on the matrix units.
    CudaTiled,
    /// For CUDA: what is done with partial states.
    CudaStates,
    /// For CUDA: the fused projection.
    CudaProjection,
    /// For CUDA: what [`Source::QsaPrep`] is for.
    CudaQsaPrep,
}

/// The header that every source includes.
pub const GEM_H: &str = include_str!("../../metal/gem.h");

impl Source {
    /// Every file of `metal/` but the header.
    pub const METAL: [Self; 7] = [
        Self::AttentionD512,
        Self::AttentionStates,
        Self::AttentionMatrix,
        Self::AttentionSharedKv,
        Self::AttentionStaged,
        Self::Projection,
        Self::QsaPrep,
    ];

    /// Every file of `cuda/` but the headers.
    pub const CUDA: [Self; 6] = [
        Self::CudaD512,
        Self::CudaMatrix,
        Self::CudaTiled,
        Self::CudaStates,
        Self::CudaProjection,
        Self::CudaQsaPrep,
    ];

    /// Its name.
    pub fn file(self) -> &'static str {
        match self {
            Self::AttentionD512 => "attention_d512.metal",
            Self::AttentionStates => "attention_states.metal",
            Self::AttentionMatrix => "attention_matrix.metal",
            Self::AttentionSharedKv => "attention_shared_kv.metal",
            Self::AttentionStaged => "attention_staged.metal",
            Self::Projection => "projection.metal",
            Self::QsaPrep => "qsa_prep.metal",
            Self::CudaD512 => "attention_d512.cu",
            Self::CudaMatrix => "attention_matrix.cu",
            Self::CudaTiled => "attention_tiled.cu",
            Self::CudaStates => "attention_states.cu",
            Self::CudaProjection => "projection.cu",
            Self::CudaQsaPrep => "qsa_prep.cu",
        }
    }

    /// SHA-256 of all that is compiled for it, in hex.
    pub fn digest(self) -> String {
        hex(Sha256::new()
            .chain_update(self.whole())
            .finalize()
            .as_slice())
    }

    /// Its text with its headers in their places.
    pub fn whole(self) -> String {
        let headers = [
            (
                "#include \"states.cuh\"",
                include_str!("../../cuda/states.cuh"),
            ),
            ("#include \"ring.cuh\"", include_str!("../../cuda/ring.cuh")),
            ("#include \"mma.cuh\"", include_str!("../../cuda/mma.cuh")),
            ("#include \"gem.cuh\"", include_str!("../../cuda/gem.cuh")),
            ("#include \"../metal/gem.h\"", GEM_H),
            ("#include \"gem.h\"", GEM_H),
        ];
        let text = self.text().to_string();
        headers
            .into_iter()
            .fold(text, |text, (line, header)| text.replace(line, header))
    }

    /// Its text.
    pub fn text(self) -> &'static str {
        match self {
            Self::AttentionD512 => include_str!("../../metal/attention_d512.metal"),
            Self::AttentionStates => include_str!("../../metal/attention_states.metal"),
            Self::AttentionMatrix => include_str!("../../metal/attention_matrix.metal"),
            Self::AttentionSharedKv => include_str!("../../metal/attention_shared_kv.metal"),
            Self::AttentionStaged => include_str!("../../metal/attention_staged.metal"),
            Self::Projection => include_str!("../../metal/projection.metal"),
            Self::QsaPrep => include_str!("../../metal/qsa_prep.metal"),
            Self::CudaD512 => include_str!("../../cuda/attention_d512.cu"),
            Self::CudaMatrix => include_str!("../../cuda/attention_matrix.cu"),
            Self::CudaTiled => include_str!("../../cuda/attention_tiled.cu"),
            Self::CudaStates => include_str!("../../cuda/attention_states.cu"),
            Self::CudaProjection => include_str!("../../cuda/projection.cu"),
            Self::CudaQsaPrep => include_str!("../../cuda/qsa_prep.cu"),
        }
    }
}
