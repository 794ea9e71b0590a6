//! shim/abi.h, in Rust.

use std::ffi::{c_char, c_int, c_void};

use crate::Traffic;

pub const BUFFERS: usize = 31;

pub const UNBOUND: u32 = 0;
pub const INPUT: u32 = 1;
pub const OUTPUT: u32 = 2;
pub const IN_OUT: u32 = 3;

pub const MEM_NONE_ORDERS: u32 = 1;
pub const UNBOUND_READS: u32 = 2;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct RawBuffer {
    pub data: *mut u8,
    pub bytes: u64,
    pub initialised: *mut u64,
    pub first_bit: u64,
    pub role: u32,
    pub constant_space: u32,
}

#[repr(C)]
pub struct RawDispatch {
    pub entry: *const c_char,
    pub groups: [u32; 3],
    pub threads: [u32; 3],
    pub buffers: *mut RawBuffer,
    pub threadgroup_bytes: *const u32,
    pub seed: u64,
    pub tolerate: u32,
    pub max_threads: u32,
    pub max_threadgroup_bytes: u32,
    pub used_threadgroup_bytes: u32,
    pub error: *mut c_char,
    pub error_capacity: u64,
    pub barriers: u64,
    pub simd_barriers: u64,
    pub collectives: u64,
    pub matrix_multiplies: u64,
    pub traffic: [Traffic; BUFFERS],
    pub threadgroup_traffic: Traffic,
}

pub type Run = unsafe extern "C" fn(*mut RawDispatch) -> c_int;
pub type ClearConstants = unsafe extern "C" fn();
pub type SetConstant = unsafe extern "C" fn(u32, *const c_void, u32) -> c_int;
