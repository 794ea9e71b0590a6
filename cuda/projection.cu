// The fused projection: Y[m, n] = X[m, k] W[n, k]^T, rows of W from several weights packed one after the other.
//
// Bitwise contract. An element of Y is one sum over k: lane l adds elements 8 l .. 8 l + 7 of every 256 in order, then the lanes are
// added by halves; every step is an explicit fma. Neither m, nor n, nor which columns share the call, nor where rows begin has a part
// in it.
//
// A warp owns 4 columns of Y, of up to ROWS rows, and streams their rows of W once. The rows of X are small and come from the
// cache. More rows than 8 are more blocks, which read W again, from the cache where it fits.

#include "gem.cuh"

#define EACH 8          // elements of a lane and step
#define WARPS 4
#define COLUMNS 4

// Elements at .. at + 7 of a row that ends before `end`; 0 from there on, and nothing is read there.
template <typename T>
__device__ __forceinline__ void load8(const T *row, uint at, uint end, bool aligned, float (&to)[EACH]) {
    if (at + EACH <= end && aligned) {
        alignas(16) T found[EACH];
#pragma unroll
        for (uint i = 0; i < sizeof(found) / 16; i++) {
            ((uint4 *)found)[i] = ((const uint4 *)(row + at))[i];
        }
#pragma unroll
        for (uint i = 0; i < EACH; i++) {
            to[i] = to_float(found[i]);
        }
        return;
    }
#pragma unroll
    for (uint i = 0; i < EACH; i++) {
        to[i] = at + i < end ? to_float(row[at + i]) : 0;
    }
}

template <typename X, typename W, uint ROWS>
__device__ void projection(const X *x, const W *w, float *y, const GemProjection &p) {
    const uint lane = threadIdx.x % GEM_LANES;
    const uint column = (blockIdx.x * WARPS + threadIdx.x / GEM_LANES) * COLUMNS;
    const uint row = blockIdx.y * ROWS;
    if (column >= p.n) {
        return;
    }
    const X *x_rows = x + p.x.start + row * p.x.row_stride;
    const W *w_rows = w + p.w.start + column * p.w.row_stride;
    const bool x_aligned = ((ulong)x_rows | p.x.row_stride * sizeof(X)) % 16 == 0;
    const bool w_aligned = ((ulong)w_rows | p.w.row_stride * sizeof(W)) % 16 == 0;
    float sum[ROWS][COLUMNS];
#pragma unroll
    for (uint r = 0; r < ROWS; r++) {
#pragma unroll
        for (uint c = 0; c < COLUMNS; c++) {
            sum[r][c] = 0;
        }
    }
#pragma unroll (ROWS == 1 ? 2 : 1)
    for (uint k = EACH * lane; k < p.k; k += EACH * GEM_LANES) {
        float weight[COLUMNS][EACH];
#pragma unroll
        for (uint c = 0; c < COLUMNS; c++) {
            // Columns past n, and rows past m, repeat the last one and are dropped: cheaper than a branch.
            load8(w_rows + min(c, p.n - column - 1) * p.w.row_stride, k, p.k, w_aligned, weight[c]);
        }
#pragma unroll
        for (uint r = 0; r < ROWS; r++) {
            float value[EACH];
            load8(x_rows + min(r, p.m - row - 1) * p.x.row_stride, k, p.k, x_aligned, value);
#pragma unroll
            for (uint c = 0; c < COLUMNS; c++) {
#pragma unroll
                for (uint i = 0; i < EACH; i++) {
                    sum[r][c] = fmaf(value[i], weight[c][i], sum[r][c]);
                }
            }
        }
    }
    float own = 0;
#pragma unroll
    for (uint r = 0; r < ROWS; r++) {
#pragma unroll
        for (uint c = 0; c < COLUMNS; c++) {
            float total = sum[r][c];
#pragma unroll
            for (uint offset = GEM_LANES / 2; offset > 0; offset /= 2) {
                total += __shfl_xor_sync(~0u, total, offset);
            }
            own = lane == r * COLUMNS + c ? total : own;
        }
    }
    const uint r = lane / COLUMNS, c = lane % COLUMNS;
    if (r < ROWS && row + r < p.m && column + c < p.n) {
        y[ulong(row + r) * p.n + column + c] = own;
    }
}

// Grid (blocks of WARPS x COLUMNS columns, blocks of ROWS rows), 32 x WARPS threads.
#define GEM_ROWS(x_type, w_type, name, rows)                                                                            \
    extern "C" __global__ void __launch_bounds__(WARPS *GEM_LANES) projection_##name##_rows##rows(                      \
        const x_type *x, const w_type *w, float *y, const __grid_constant__ GemProjection p) {                          \
        projection<x_type, w_type, rows>(x, w, y, p);                                                                   \
    }

#define GEM_PROJECTION(x_type, w_type, name)                                                                            \
    GEM_ROWS(x_type, w_type, name, 1)                                                                                   \
    GEM_ROWS(x_type, w_type, name, 2)                                                                                   \
    GEM_ROWS(x_type, w_type, name, 4)                                                                                   \
    GEM_ROWS(x_type, w_type, name, 8)

GEM_PROJECTION(float, float, f32)
GEM_PROJECTION(half, half, f16)
GEM_PROJECTION(bfloat, bfloat, bf16)
GEM_PROJECTION(float, half, f32_f16)
GEM_PROJECTION(float, bfloat, f32_bf16)
