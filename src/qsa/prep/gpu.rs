//! Which kernel a GPU runs for a geometry, and on which grid: the only place that knows.

use super::geometry::{PrepGeometry, RowsView};
use crate::backend::params::{GemMatrix, GemQsaPrep};
use crate::backend::plan::{Binding, Output, Pass, Plan, Slot, Source};
use candle::DType;
use Binding::{Read, Write};

const THREADS: u32 = 256;
/// Rows that a threadgroup pools: one a SIMD group.
const SIMD_GROUPS: usize = 8;

/// The one pass that makes everything. Its kernel has the row strides of k, v, ik and iq as constants, where they are those of
/// tensors of their own (512, 512, 128, 512) or of one fused buffer (1152 without iq, 1664 with it).
pub fn plan(g: &PrepGeometry) -> Plan {
    let entry = metal_entry(g);
    with_kernel(g, Source::QsaPrep, entry)
}

/// As [`plan`], for CUDA, where strides are parameters.
pub fn plan_cuda(g: &PrepGeometry) -> Plan {
    let entry = match g.q.dtype {
        DType::F16 => "qsa_prep_f16",
        _ => "qsa_prep_f32",
    };
    with_kernel(g, Source::CudaQsaPrep, entry)
}

fn metal_entry(g: &PrepGeometry) -> &'static str {
    let iq_stride = g.iq.as_ref().map(|iq| iq.row_stride);
    let strides = [g.k.row_stride, g.v.row_stride, g.ik.row_stride];
    let half = g.q.dtype == DType::F16;
    // Without iq nothing is read with its stride.
    match (strides, iq_stride) {
        ([512, 512, 128], None | Some(512)) if half => "qsa_prep_f16_separate",
        ([512, 512, 128], None | Some(512)) => "qsa_prep_f32_separate",
        ([1152, 1152, 1152], None) if half => "qsa_prep_f16_fused1152",
        ([1152, 1152, 1152], None) => "qsa_prep_f32_fused1152",
        ([1664, 1664, 1664], None | Some(1664)) if half => "qsa_prep_f16_fused1664",
        ([1664, 1664, 1664], None | Some(1664)) => "qsa_prep_f32_fused1664",
        _ if half => "qsa_prep_f16_strided",
        _ => "qsa_prep_f32_strided",
    }
}

fn with_kernel(g: &PrepGeometry, source: Source, entry: &'static str) -> Plan {
    // What there is no iq for is not touched, but a kernel's argument must be bound.
    let (iq, qidx, scratch) = match g.iq {
        Some(_) => (Slot::Input(7), Slot::Output(7), vec![]),
        None => (Slot::Input(3), Slot::Scratch(0), vec![16]),
    };
    let outputs = (0..7).map(Slot::Output).chain([qidx]).map(Write);
    let inputs = (0..7).map(Slot::Input).chain([iq]).map(Read);
    let pooling = (g.blocks() + 1).div_ceil(SIMD_GROUPS);
    let pass = Pass {
        source,
        entry,
        buffers: inputs.chain(outputs).collect(),
        params: params(g).bytes(),
        threadgroups: [(g.tokens + pooling) as u32, 1, 1],
        threads: THREADS,
        threadgroup_bytes: 0,
    };
    let output = |(dtype, shape): (DType, candle::Shape)| Output {
        dtype,
        elements: shape.elem_count(),
    };
    Plan {
        outputs: g.outputs().into_iter().map(output).collect(),
        scratch,
        passes: vec![pass],
    }
}

/// The geometry holds no more than 2^20 tokens, so that counts fit.
fn params(g: &PrepGeometry) -> GemQsaPrep {
    let rows = |view: &RowsView| GemMatrix {
        start: view.start,
        row_stride: view.row_stride,
    };
    GemQsaPrep {
        q: rows(&g.q),
        k: rows(&g.k),
        v: rows(&g.v),
        ik: rows(&g.ik),
        iq: rows(g.iq.as_ref().unwrap_or(&g.ik)),
        tokens: g.tokens as u32,
        phase: g.phase as u32,
        blocks: g.blocks() as u32,
        starts: g.starts as u32,
        indexer: g.iq.is_some() as u32,
        unused: 0,
    }
}
