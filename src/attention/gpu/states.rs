//! Plans for partial states: what a first pass ends with, and the ops on states that a caller has.

use super::{OP, THREADS};
use crate::attention::geometry::AttentionGeometry;
use crate::attention::plan::{Partitions, ScratchBytes};
use crate::attention::MOST_SCRATCH;
use crate::backend::limits::{check_grid, narrow};
use crate::backend::params::{type_number, GemStates};
use crate::backend::plan::{Binding, Output, Pass, Plan, Slot, Source, Target};
use candle::{bail, DType, Result};
use Binding::{Read, Write};

/// How many states, of which size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateSizes {
    /// Query rows: batch x heads x query length.
    pub rows: usize,
    /// States of each row.
    pub partitions: usize,
    /// Elements of a numerator.
    pub dim: usize,
}

impl StateSizes {
    fn params(&self, starts: [u64; 3], out: DType, given: bool) -> Result<GemStates> {
        let [max_start, denominator_start, numerator_start] = starts;
        Ok(GemStates {
            max_start,
            denominator_start,
            numerator_start,
            rows: narrow(OP, "batch * q_heads * q_len", self.rows)?,
            partitions: narrow(OP, "partitions", self.partitions)?,
            dim: narrow(OP, "dim", self.dim)?,
            out_type: type_number(out),
            given: given as u32,
            padding: 0,
        })
    }

    /// f32 elements of one state a row, or of all states, packed into one buffer.
    fn packed(&self, partitions: usize) -> Result<usize> {
        let elements = self
            .rows
            .checked_mul(partitions)
            .and_then(|states| states.checked_mul(2 + self.dim));
        match elements {
            Some(elements) => Ok(elements),
            None => bail!(
                "{OP}: states of {} rows of {} in {partitions} partitions pass 64 bits",
                self.rows,
                self.dim
            ),
        }
    }
}

/// The kernels on states of one backend: where they are, and how much of a row a threadgroup takes.
pub(super) struct StateKernels {
    source: Source,
    threads: u32,
    /// Dimensions of a threadgroup that merges; `None`: all of a row.
    merged: Option<u32>,
    /// Rows of a threadgroup that takes logarithms.
    logarithms: u32,
}

static METAL: StateKernels = StateKernels {
    source: Source::AttentionStates,
    threads: THREADS,
    merged: None,
    logarithms: THREADS,
};

static CUDA: StateKernels = StateKernels {
    source: Source::CudaStates,
    threads: 128,
    merged: Some(128),
    logarithms: 1,
};

impl StateKernels {
    pub(super) fn of(target: Target) -> &'static Self {
        match target {
            Target::Metal => &METAL,
            Target::Cuda => &CUDA,
        }
    }

    /// The grid of a merge.
    fn merging(&self, rows: u32, dim: u32) -> [u32; 3] {
        [rows, self.merged.map_or(1, |own| dim.div_ceil(own)), 1]
    }

    fn pass(
        &self,
        entry: &'static str,
        states: &[Binding],
        params: &GemStates,
        threadgroups: [u32; 3],
    ) -> Result<Pass> {
        let output = [Write(Slot::Output(0))];
        let pass = Pass {
            source: self.source,
            entry,
            buffers: states.iter().copied().chain(output).collect(),
            params: params.bytes(),
            threadgroups,
            threads: self.threads,
            threadgroup_bytes: 0,
        };
        check_grid(OP, &pass)?;
        Ok(pass)
    }
}

/// What becomes of the states that a first pass leaves in scratch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum After {
    /// They are merged and divided: attention, in this dtype.
    Finish(DType),
    /// They are the result.
    Pack,
}

impl After {
    /// Those that a first pass makes: merging with an empty state is the identity, so those are made only where somebody
    /// asks for them.
    pub(super) fn partitions(self, g: &AttentionGeometry, all: &Partitions) -> Result<Partitions> {
        match self {
            Self::Finish(_) => Partitions::new(g.kv_len, all.live()),
            Self::Pack => Ok(*all),
        }
    }
}

/// A first pass that leaves states in three scratch buffers, and what comes after it.
pub(super) fn with_states(
    first: Pass,
    sizes: StateSizes,
    after: After,
    target: Target,
) -> Result<Plan> {
    let kernels = StateKernels::of(target);
    let out = match after {
        After::Finish(dtype) => dtype,
        After::Pack => DType::F32,
    };
    let params = sizes.params([0; 3], out, false)?;
    let states = [0, 1, 2].map(|slot| Read(Slot::Scratch(slot)));
    let (entry, elements, grid) = match after {
        After::Finish(_) => (
            "attention_states_finish",
            sizes.rows * sizes.dim,
            kernels.merging(params.rows, params.dim),
        ),
        After::Pack => (
            "attention_states_pack",
            sizes.packed(sizes.partitions)?,
            [narrow(OP, "states", sizes.rows * sizes.partitions)?, 1, 1],
        ),
    };
    let last = kernels.pass(entry, &states, &params, grid)?;
    check_grid(OP, &first)?;
    let scratch = ScratchBytes::new(sizes.rows as u64, sizes.partitions as u64, sizes.dim as u64)?;
    if scratch.total > MOST_SCRATCH {
        bail!(
            "{OP}: the states of {} query rows in {} partitions take {} bytes, want at most {MOST_SCRATCH} on a GPU: fewer partitions, or fewer rows at a time",
            sizes.rows,
            sizes.partitions,
            scratch.total
        );
    }
    Ok(Plan {
        outputs: vec![Output {
            dtype: out,
            elements,
        }],
        scratch: vec![scratch.maxima, scratch.denominators, scratch.numerators],
        passes: vec![first, last],
    })
}

/// Numerator over denominator of the states in inputs 0 to 2 (maxima, denominators, numerators), which start at `starts`.
pub fn finish(target: Target, sizes: StateSizes, starts: [u64; 3], out: DType) -> Result<Plan> {
    let params = sizes.params(starts, out, true)?;
    let output = Output {
        dtype: out,
        elements: sizes.rows * sizes.dim,
    };
    let grid = StateKernels::of(target).merging(params.rows, params.dim);
    on_given(target, "attention_states_finish", 3, &params, grid, output)
}

/// One state a row, packed as maxima, denominators, numerators. Inputs as [`finish`].
pub fn merge(target: Target, sizes: StateSizes, starts: [u64; 3]) -> Result<Plan> {
    let params = sizes.params(starts, DType::F32, true)?;
    let output = Output {
        dtype: DType::F32,
        elements: sizes.packed(1)?,
    };
    let grid = StateKernels::of(target).merging(params.rows, params.dim);
    on_given(target, "attention_states_merge", 3, &params, grid, output)
}

/// The logarithm of the sum of `exp(score)` of each row, from maxima and denominators.
pub fn log_sum_exp(
    target: Target,
    rows: usize,
    partitions: usize,
    [max, denominator]: [u64; 2],
) -> Result<Plan> {
    let sizes = StateSizes {
        rows,
        partitions,
        dim: 0,
    };
    let params = sizes.params([max, denominator, 0], DType::F32, true)?;
    let output = Output {
        dtype: DType::F32,
        elements: rows,
    };
    let grid = [
        params.rows.div_ceil(StateKernels::of(target).logarithms),
        1,
        1,
    ];
    on_given(
        target,
        "attention_states_log_sum_exp",
        2,
        &params,
        grid,
        output,
    )
}

fn on_given(
    target: Target,
    entry: &'static str,
    inputs: usize,
    params: &GemStates,
    grid: [u32; 3],
    output: Output,
) -> Result<Plan> {
    let states: Vec<Binding> = (0..inputs).map(|input| Read(Slot::Input(input))).collect();
    Ok(Plan {
        outputs: vec![output],
        scratch: vec![],
        passes: vec![StateKernels::of(target).pass(entry, &states, params, grid)?],
    })
}
