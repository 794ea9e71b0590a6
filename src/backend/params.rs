//! The parameter structs of `metal/gem.h`, field for field: the header says what each is.
#![allow(missing_docs)]

use candle::DType;
use std::mem::{offset_of, size_of};

/// `GemRows`: where the rows of a tensor lie, in elements.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GemRows {
    pub start: u64,
    pub batch_stride: u64,
    pub head_stride: u64,
    pub row_stride: u64,
}

/// `GemAttention`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GemAttention {
    pub q: GemRows,
    pub k: GemRows,
    pub v: GemRows,
    pub batch: u32,
    pub q_heads: u32,
    pub kv_heads: u32,
    pub group: u32,
    pub q_len: u32,
    pub kv_len: u32,
    pub causal: u32,
    pub partitions: u32,
    pub partition_len: u32,
    pub q_type: u32,
    pub out_type: u32,
    pub softmax_scale: f32,
}

/// `GemStates`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GemStates {
    pub max_start: u64,
    pub denominator_start: u64,
    pub numerator_start: u64,
    pub rows: u32,
    pub partitions: u32,
    pub dim: u32,
    pub out_type: u32,
    pub given: u32,
    pub padding: u32,
}

const _: () = {
    assert!(size_of::<GemStates>() == 48);
    assert!(offset_of!(GemStates, rows) == 24);
    assert!(offset_of!(GemStates, padding) == 44);
};

/// `GemSharedKv`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GemSharedKv {
    pub attention: GemAttention,
    pub weight: u64,
    pub angles: u64,
    pub pairs: u32,
    pub unused: u32,
}

const _: () = {
    assert!(size_of::<GemSharedKv>() == 168);
    assert!(offset_of!(GemSharedKv, weight) == 144);
    assert!(offset_of!(GemSharedKv, angles) == 152);
    assert!(offset_of!(GemSharedKv, pairs) == 160);
    assert!(size_of::<GemRows>() == 32);
    assert!(size_of::<GemAttention>() == 144);
    assert!(offset_of!(GemAttention, k) == 32);
    assert!(offset_of!(GemAttention, v) == 64);
    assert!(offset_of!(GemAttention, batch) == 96);
    assert!(offset_of!(GemAttention, softmax_scale) == 140);
};

/// The number of an element type in `gem.h`.
pub fn type_number(dtype: DType) -> u32 {
    match dtype {
        DType::F16 => 1,
        DType::BF16 => 2,
        _ => 0,
    }
}

impl GemAttention {
    /// The bytes as the kernels read them.
    pub fn bytes(&self) -> Vec<u8> {
        let rows = |r: &GemRows| [r.start, r.batch_stride, r.head_stride, r.row_stride];
        let wide = [rows(&self.q), rows(&self.k), rows(&self.v)];
        let mut bytes: Vec<u8> = wide
            .iter()
            .flatten()
            .flat_map(|x| x.to_ne_bytes())
            .collect();
        let narrow = [
            self.batch,
            self.q_heads,
            self.kv_heads,
            self.group,
            self.q_len,
            self.kv_len,
            self.causal,
            self.partitions,
            self.partition_len,
            self.q_type,
            self.out_type,
            self.softmax_scale.to_bits(),
        ];
        bytes.extend(narrow.iter().flat_map(|x| x.to_ne_bytes()));
        bytes
    }
}

impl GemStates {
    /// The bytes as the kernels read them.
    pub fn bytes(&self) -> Vec<u8> {
        let wide = [self.max_start, self.denominator_start, self.numerator_start];
        let narrow = [
            self.rows,
            self.partitions,
            self.dim,
            self.out_type,
            self.given,
            self.padding,
        ];
        let wide = wide.iter().flat_map(|x| x.to_ne_bytes());
        wide.chain(narrow.iter().flat_map(|x| x.to_ne_bytes()))
            .collect()
    }
}

/// `GemMatrix`: where the rows of a matrix lie, in elements.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GemMatrix {
    pub start: u64,
    pub row_stride: u64,
}

/// `GemProjection`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GemProjection {
    pub x: GemMatrix,
    pub w: GemMatrix,
    pub m: u32,
    pub n: u32,
    pub k: u32,
    pub band: u32,
}

const _: () = {
    assert!(size_of::<GemMatrix>() == 16);
    assert!(size_of::<GemProjection>() == 48);
    assert!(offset_of!(GemProjection, w) == 16);
    assert!(offset_of!(GemProjection, m) == 32);
    assert!(offset_of!(GemProjection, band) == 44);
};

impl GemProjection {
    /// The bytes as the kernels read them.
    pub fn bytes(&self) -> Vec<u8> {
        let matrix = |m: &GemMatrix| [m.start, m.row_stride];
        let wide = [matrix(&self.x), matrix(&self.w)];
        let narrow = [self.m, self.n, self.k, self.band];
        let mut bytes: Vec<u8> = wide
            .iter()
            .flatten()
            .flat_map(|x| x.to_ne_bytes())
            .collect();
        bytes.extend(narrow.iter().flat_map(|x| x.to_ne_bytes()));
        bytes
    }
}

/// `GemQsaPrep`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GemQsaPrep {
    pub q: GemMatrix,
    pub k: GemMatrix,
    pub v: GemMatrix,
    pub ik: GemMatrix,
    pub iq: GemMatrix,
    pub tokens: u32,
    pub phase: u32,
    pub blocks: u32,
    pub starts: u32,
    pub indexer: u32,
    pub unused: u32,
}

const _: () = {
    assert!(size_of::<GemQsaPrep>() == 104);
    assert!(offset_of!(GemQsaPrep, iq) == 64);
    assert!(offset_of!(GemQsaPrep, tokens) == 80);
    assert!(offset_of!(GemQsaPrep, indexer) == 96);
};

impl GemQsaPrep {
    /// The bytes as the kernels read them.
    pub fn bytes(&self) -> Vec<u8> {
        let wide = [self.q, self.k, self.v, self.ik, self.iq].map(|m| [m.start, m.row_stride]);
        let narrow = [
            self.tokens,
            self.phase,
            self.blocks,
            self.starts,
            self.indexer,
            self.unused,
        ];
        let mut bytes: Vec<u8> = wide
            .iter()
            .flatten()
            .flat_map(|x| x.to_ne_bytes())
            .collect();
        bytes.extend(narrow.iter().flat_map(|x| x.to_ne_bytes()));
        bytes
    }
}

impl GemSharedKv {
    /// The bytes as the kernels read them.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.attention.bytes();
        bytes.extend(
            [self.weight, self.angles]
                .iter()
                .flat_map(|x| x.to_ne_bytes()),
        );
        bytes.extend(
            [self.pairs, self.unused]
                .iter()
                .flat_map(|x| x.to_ne_bytes()),
        );
        bytes
    }
}
