//! The CPU executor: obeys a geometry.
//!
//! A task is a rectangle of y. Tasks share nothing that is written, and an element of y has the same bits in whatever
//! rectangle it is (see `body.rs`), so neither the number of threads nor the size of tasks shows in a result.

mod body;
#[cfg(target_arch = "x86_64")]
mod halves;
mod kernels;

use std::cell::RefCell;

use candle::{bail, CpuStorage, Result};
use half::{bf16, f16};
use rayon::prelude::*;

use body::Block;
use kernels::Kernels;

use super::geometry::{MatrixView, ProjectionGeometry};
use crate::cpu::isa::Order;
use crate::cpu::lines::Lines;
use crate::cpu::CpuKernel;
use crate::memory;

/// Bytes of weights, as f32, that a task reads: they stay in a second-level cache for all of its rows.
const TASK_BYTES: usize = 1 << 20;

/// Columns of a task are a multiple of this, which every tile of `body.rs` divides.
const COLUMN_STEP: usize = 24;

/// Rows of x of one task.
const TASK_ROWS: usize = 256;

/// Multiply-adds that one core does in the time that waking the others takes, about 30 us, and bytes that it reads.
const SERIAL_WORK: usize = 1 << 21;
const SERIAL_BYTES: usize = 1 << 20;

#[derive(Clone, Copy)]
pub(super) enum Elements<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

impl<'a> Elements<'a> {
    /// The storage behind `view`, once it is known to hold every row of it.
    fn new(op: &str, name: &str, storage: &'a CpuStorage, view: &MatrixView) -> Result<Self> {
        let (elements, len) = match storage {
            CpuStorage::F32(s) => (Self::F32(s), s.len()),
            CpuStorage::F16(s) => (Self::F16(s), s.len()),
            CpuStorage::BF16(s) => (Self::BF16(s), s.len()),
            _ => bail!(
                "{op}: {name} is stored as another type than its dtype {:?}",
                view.dtype
            ),
        };
        if view.end > len as u64 {
            bail!(
                "{op}: the storage of {name} holds {len} elements, its layout reaches to {}",
                view.end
            );
        }
        Ok(elements)
    }
}

/// Where tasks write; each to its own rectangle.
#[derive(Clone, Copy)]
struct Out(*mut f32);
// SAFETY: rectangles of different tasks do not overlap.
unsafe impl Send for Out {}
// SAFETY: as above.
unsafe impl Sync for Out {}

impl Out {
    fn at(self, offset: usize) -> *mut f32 {
        self.0.wrapping_add(offset)
    }
}

thread_local! {
    static SCRATCH: RefCell<Lines> = RefCell::new(Lines::zeros(0));
}

/// `(m, n)`, contiguous.
pub(super) fn forward(
    op: &str,
    g: &ProjectionGeometry,
    kernel: CpuKernel,
    x: &CpuStorage,
    w: &CpuStorage,
) -> Result<Vec<f32>> {
    let kernels = Kernels::new(kernel, op)?;
    let x = Elements::new(op, "xs", x, &g.x)?;
    let w = Elements::new(op, "the weight", w, &g.w)?;
    let weights = g.n.saturating_mul(g.k);
    let little = weights.saturating_mul(g.m) < SERIAL_WORK
        && weights.saturating_mul(g.w.dtype.size_in_bytes()) < SERIAL_BYTES;
    let serial = little || rayon::current_num_threads() == 1;
    let what = format_args!("the result of {} rows of {}", g.m, g.n);
    let mut y = memory::zeros::<f32>(op, what, g.m * g.n)?;
    let out = Out(y.as_mut_ptr());
    let order = match (x, w) {
        (Elements::F32(_), Elements::BF16(_)) => Order::Pairs {
            lanes: kernels.lanes,
        },
        _ => Order::Plain,
    };
    // Enough tasks for all threads, and weights that fit; neither shows in the result.
    let fit = TASK_BYTES / (4 * g.k);
    let share = g.n.div_ceil(4 * rayon::current_num_threads());
    let columns = fit.min(share).max(1).next_multiple_of(COLUMN_STEP);
    let row_blocks = g.m.div_ceil(TASK_ROWS);
    let tasks = row_blocks * g.n.div_ceil(columns);
    let run = |task: usize| {
        // The weights of neighbouring tasks are the same.
        let (column, row) = (task / row_blocks * columns, task % row_blocks * TASK_ROWS);
        let block = Block {
            x_start: g.x.row_start(row) as usize,
            x_stride: g.x.row_stride as usize,
            rows: TASK_ROWS.min(g.m - row),
            w_start: g.w.row_start(column) as usize,
            w_stride: g.w.row_stride as usize,
            columns: columns.min(g.n - column),
            k: g.k,
            order,
            y: out.at(row * g.n + column),
            y_stride: g.n,
        };
        SCRATCH.with_borrow_mut(|scratch| {
            let len = block.scratch_len();
            if scratch.len() < len {
                *scratch = Lines::zeros(len);
            }
            // SAFETY: y holds m rows of n, and tasks divide it into rectangles.
            unsafe { kernels.product(&block, x, w, scratch) }
        });
    };
    if serial {
        (0..tasks).for_each(run);
    } else {
        (0..tasks).into_par_iter().for_each(run);
    }
    Ok(y)
}
