//! The three ops on states, on every device.

use super::{check_state, finish_row, merge_row, NAME};
use crate::attention::store::Stored;
use crate::memory;
#[cfg(any(feature = "metal", feature = "cuda"))]
use crate::{
    attention::gpu::states::{self, StateSizes},
    backend::plan::Target,
};
use candle::{bail, CpuStorage, CustomOp2, CustomOp3, DType, Layout, Result, Shape};
use half::{bf16, f16};
use rayon::prelude::*;
#[cfg(feature = "cuda")]
use {crate::backend::cuda, candle::CudaStorage};
#[cfg(feature = "metal")]
use {crate::backend::metal, candle::MetalStorage};

/// The three tensors as slices, states checked.
struct States<'a> {
    max: &'a [f32],
    denominator: &'a [f32],
    numerator: &'a [f32],
    rows: usize,
    dim: usize,
}

impl<'a> States<'a> {
    fn new(
        (max, max_l): (&'a CpuStorage, &Layout),
        (denominator, den_l): (&'a CpuStorage, &Layout),
        numerator: Option<(&'a CpuStorage, &Layout)>,
    ) -> Result<Self> {
        let rows = max_l.dims()[1..].iter().product();
        let states = Self {
            max: contiguous(max, max_l)?,
            denominator: contiguous(denominator, den_l)?,
            numerator: match numerator {
                Some((s, l)) => contiguous(s, l)?,
                None => &[],
            },
            rows,
            dim: numerator.map_or(0, |(_, l)| l.dims()[4]),
        };
        for (i, (max, denominator)) in states.max.iter().zip(states.denominator).enumerate() {
            let numerator = &states.numerator[i * states.dim..(i + 1) * states.dim];
            check_state(*max, *denominator, numerator)?;
        }
        Ok(states)
    }

    fn row(&self, row: usize) -> impl Iterator<Item = (f32, f32, &'a [f32])> + Clone + '_ {
        (row..self.max.len()).step_by(self.rows).map(|i| {
            let numerator = &self.numerator[i * self.dim..(i + 1) * self.dim];
            (self.max[i], self.denominator[i], numerator)
        })
    }
}

fn contiguous<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [f32]> {
    let (start, end) = offsets(layout)?;
    Ok(&storage.as_slice::<f32>()?[start..end])
}

fn offsets(layout: &Layout) -> Result<(usize, usize)> {
    match layout.contiguous_offsets() {
        Some(offsets) => Ok(offsets),
        None => bail!(
            "attention_partials: want contiguous states, got strides {:?}",
            layout.stride()
        ),
    }
}

/// What a plan for given states asks for: their sizes, and where each tensor begins.
#[cfg(any(feature = "metal", feature = "cuda"))]
fn given<const N: usize>(layouts: [&Layout; N], dim: usize) -> Result<(StateSizes, [u64; N])> {
    let (partitions, rows) = match layouts[0].dims() {
        [partitions, rows @ ..] => (*partitions, rows.iter().product()),
        [] => (0, 0),
    };
    let mut starts = [0; N];
    for (start, layout) in starts.iter_mut().zip(layouts) {
        *start = offsets(layout)?.0 as u64;
    }
    let sizes = StateSizes {
        rows,
        partitions,
        dim,
    };
    Ok((sizes, starts))
}

pub(super) struct MergeStates;

impl CustomOp3 for MergeStates {
    fn name(&self) -> &'static str {
        "attention_partials_merge"
    }

    fn cpu_fwd(
        &self,
        max: &CpuStorage,
        max_l: &Layout,
        denominator: &CpuStorage,
        den_l: &Layout,
        numerator: &CpuStorage,
        num_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let states = States::new((max, max_l), (denominator, den_l), Some((numerator, num_l)))?;
        let rows = states.rows;
        let what = format_args!("the merged states of {rows} rows");
        let mut packed = memory::zeros::<f32>(NAME, what, rows * (2 + states.dim))?;
        let (maxima, rest) = packed.split_at_mut(rows);
        let (denominators, numerators) = rest.split_at_mut(rows);
        maxima
            .par_iter_mut()
            .zip(denominators)
            .zip(numerators.par_chunks_mut(states.dim))
            .enumerate()
            .try_for_each(|(row, ((max, denominator), out))| {
                (*max, *denominator) = merge_row(states.row(row), out);
                // Sums of states in range can leave it.
                check_state(*max, *denominator, out)
            })?;
        let len = packed.len();
        Ok((CpuStorage::F32(packed), Shape::from(len)))
    }

    #[cfg(feature = "metal")]
    fn metal_fwd(
        &self,
        max: &MetalStorage,
        max_l: &Layout,
        denominator: &MetalStorage,
        den_l: &Layout,
        numerator: &MetalStorage,
        num_l: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        let (sizes, starts) = given([max_l, den_l, num_l], num_l.dims()[4])?;
        let plan = states::merge(Target::Metal, sizes, starts)?;
        let out = metal::run_one(&plan, &[max, denominator, numerator])?;
        Ok((out, Shape::from(sizes.rows * (2 + sizes.dim))))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        max: &CudaStorage,
        max_l: &Layout,
        denominator: &CudaStorage,
        den_l: &Layout,
        numerator: &CudaStorage,
        num_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (sizes, starts) = given([max_l, den_l, num_l], num_l.dims()[4])?;
        let plan = states::merge(Target::Cuda, sizes, starts)?;
        let out = cuda::run_one(&plan, &[max, denominator, numerator])?;
        Ok((out, Shape::from(sizes.rows * (2 + sizes.dim))))
    }
}

pub(super) struct FinishStates {
    pub dtype: DType,
}

impl CustomOp3 for FinishStates {
    fn name(&self) -> &'static str {
        "attention_partials_finish"
    }

    fn cpu_fwd(
        &self,
        max: &CpuStorage,
        max_l: &Layout,
        denominator: &CpuStorage,
        den_l: &Layout,
        numerator: &CpuStorage,
        num_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let states = States::new((max, max_l), (denominator, den_l), Some((numerator, num_l)))?;
        let storage = match self.dtype {
            DType::F16 => finish_all::<f16>(&states)?,
            DType::BF16 => finish_all::<bf16>(&states)?,
            _ => finish_all::<f32>(&states)?,
        };
        Ok((storage, Shape::from(&num_l.dims()[1..])))
    }

    #[cfg(feature = "metal")]
    fn metal_fwd(
        &self,
        max: &MetalStorage,
        max_l: &Layout,
        denominator: &MetalStorage,
        den_l: &Layout,
        numerator: &MetalStorage,
        num_l: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        let (sizes, starts) = given([max_l, den_l, num_l], num_l.dims()[4])?;
        let plan = states::finish(Target::Metal, sizes, starts, self.dtype)?;
        let out = metal::run_one(&plan, &[max, denominator, numerator])?;
        Ok((out, Shape::from(&num_l.dims()[1..])))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        max: &CudaStorage,
        max_l: &Layout,
        denominator: &CudaStorage,
        den_l: &Layout,
        numerator: &CudaStorage,
        num_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (sizes, starts) = given([max_l, den_l, num_l], num_l.dims()[4])?;
        let plan = states::finish(Target::Cuda, sizes, starts, self.dtype)?;
        let out = cuda::run_one(&plan, &[max, denominator, numerator])?;
        Ok((out, Shape::from(&num_l.dims()[1..])))
    }
}

fn finish_all<E: Stored>(states: &States) -> Result<CpuStorage> {
    let what = format_args!("{} rows of {}", states.rows, states.dim);
    let mut out = memory::zeros::<E>(NAME, what, states.rows * states.dim)?;
    out.par_chunks_mut(states.dim)
        .enumerate()
        .try_for_each(|(row, out)| {
            let mut finite = true;
            E::fill(out, |wide| {
                let denominator = finish_row(states.row(row), wide);
                finite = denominator.is_finite() && wide.iter().all(|x| x.is_finite());
            });
            match finite {
                true => Ok(()),
                false => bail!(
                    "attention_partials: the states of row {row} add up past the range of f32"
                ),
            }
        })?;
    Ok(E::into_storage(out))
}

pub(super) struct LogSumExp;

impl CustomOp2 for LogSumExp {
    fn name(&self) -> &'static str {
        "attention_partials_log_sum_exp"
    }

    fn cpu_fwd(
        &self,
        max: &CpuStorage,
        max_l: &Layout,
        denominator: &CpuStorage,
        den_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let states = States::new((max, max_l), (denominator, den_l), None)?;
        let lse = (0..states.rows).map(|row| match merge_row(states.row(row), &mut []) {
            (_, 0.0) => Ok(f32::NEG_INFINITY),
            (max, denominator) if denominator.is_finite() => Ok(max + denominator.ln()),
            _ => bail!("attention_partials: the states of row {row} add up past the range of f32"),
        });
        let lse = lse.collect::<Result<_>>()?;
        Ok((CpuStorage::F32(lse), Shape::from(&max_l.dims()[1..])))
    }

    #[cfg(feature = "metal")]
    fn metal_fwd(
        &self,
        max: &MetalStorage,
        max_l: &Layout,
        denominator: &MetalStorage,
        den_l: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        let (sizes, starts) = given([max_l, den_l], 0)?;
        let plan = states::log_sum_exp(Target::Metal, sizes.rows, sizes.partitions, starts)?;
        let out = metal::run_one(&plan, &[max, denominator])?;
        Ok((out, Shape::from(&max_l.dims()[1..])))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        max: &CudaStorage,
        max_l: &Layout,
        denominator: &CudaStorage,
        den_l: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        let (sizes, starts) = given([max_l, den_l], 0)?;
        let plan = states::log_sum_exp(Target::Cuda, sizes.rows, sizes.partitions, starts)?;
        let out = cuda::run_one(&plan, &[max, denominator])?;
        Ok((out, Shape::from(&max_l.dims()[1..])))
    }
}
