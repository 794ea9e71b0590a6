//! Products that cuBLAS does better than a kernel here would.

use crate::projection::geometry::{MatrixView, ProjectionGeometry};
use candle::backend::BackendStorage;
use candle::cuda_backend::cudarc::cublas::{result::gemm_ex, sys};
use candle::cuda_backend::cudarc::driver::DevicePtrMut;
use candle::cuda_backend::{CudaStorageSlice, WrapErr};
use candle::{bail, CudaStorage, DType, Result};
use std::ffi::c_void;

/// `y = x w^T` with sums and results in f32, of x and w in one dtype, on candle's stream.
///
/// # Errors
///
/// Sizes or strides past the 32 bits that cuBLAS takes, or what cuBLAS itself refuses.
pub fn gemm(
    op: &str,
    g: &ProjectionGeometry,
    x: &CudaStorage,
    w: &CudaStorage,
) -> Result<CudaStorage> {
    let narrow = |what: &str, n: u64| match i32::try_from(n) {
        Ok(n) => Ok(n),
        Err(_) => bail!("{op}: {what} is {n}, want less than 2^31 for cuBLAS"),
    };
    let (m, n, k) = (
        narrow("rows of xs", g.m as u64)?,
        narrow("weight rows", g.n as u64)?,
        narrow("the hidden size", g.k as u64)?,
    );
    // Of a single row it has to be one that could be.
    let stride = |view: &MatrixView| view.row_stride.max(g.k as u64);
    let (x_stride, w_stride) = (
        narrow("the row stride of xs", stride(&g.x))?,
        narrow("the row stride of the weight", stride(&g.w))?,
    );
    let dtype = match g.w.dtype {
        DType::F16 => sys::cudaDataType::CUDA_R_16F,
        DType::BF16 => sys::cudaDataType::CUDA_R_16BF,
        _ => sys::cudaDataType::CUDA_R_32F,
    };
    let device = x.device().clone();
    let stream = device.cuda_stream();
    let element = g.w.dtype.size_in_bytes() as u64;
    // Not initialised: every element is written.
    let mut y = unsafe { device.alloc::<f32>(g.m * g.n)? };
    let x_at = super::read_address(&x.slice, &stream)? + g.x.start * element;
    let w_at = super::read_address(&w.slice, &stream)? + g.w.start * element;
    let (y_at, written) = y.device_ptr_mut(&stream);
    let (one, zero) = (1f32, 0f32);
    // The geometry was checked against the storages; cuBLAS reads rows m, n of k elements each. Its matrices are stored by columns, so
    // this is y^T = w x^T.
    unsafe {
        gemm_ex(
            *device.cublas_handle().handle(),
            sys::cublasOperation_t::CUBLAS_OP_T,
            sys::cublasOperation_t::CUBLAS_OP_N,
            n,
            m,
            k,
            (&raw const one).cast(),
            w_at as *const c_void,
            dtype,
            w_stride,
            x_at as *const c_void,
            dtype,
            x_stride,
            (&raw const zero).cast(),
            y_at as *mut c_void,
            sys::cudaDataType::CUDA_R_32F,
            n,
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
        )
    }
    .w()?;
    drop(written);
    Ok(CudaStorage {
        slice: CudaStorageSlice::F32(y),
        device,
    })
}
