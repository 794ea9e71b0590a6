// What the text of metal/*.metal needs of the Metal Standard Library, for nvcc. The translator has taken away attributes and address
// spaces and marked functions as device code.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __half half;
typedef __nv_bfloat16 bfloat;

namespace metal {

__device__ inline float as_float(float x) { return x; }
__device__ inline float as_float(half x) { return __half2float(x); }
__device__ inline float as_float(bfloat x) { return __bfloat162float(x); }

template <typename T, int N>
struct vec;

template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
    T x, y, z, w;
    vec() = default;
    __device__ vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
    __device__ explicit vec(float a) : x(T(a)), y(T(a)), z(T(a)), w(T(a)) {}
    template <typename U>
    __device__ explicit vec(const vec<U, 4> &v) : x(T(as_float(v.x))), y(T(as_float(v.y))), z(T(as_float(v.z))), w(T(as_float(v.w))) {}
    __device__ vec &operator*=(float a) { return *this = vec(x * a, y * a, z * a, w * a); }
};

typedef vec<float, 4> vec_float4;
typedef vec<half, 4> vec_half4;
typedef vec<bfloat, 4> vec_bfloat4;

__device__ inline vec_float4 operator+(vec_float4 a, vec_float4 b) { return vec_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ inline vec_float4 operator*(vec_float4 a, vec_float4 b) { return vec_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }
__device__ inline vec_float4 operator-(vec_float4 a) { return vec_float4(-a.x, -a.y, -a.z, -a.w); }
__device__ inline float dot(vec_float4 a, vec_float4 b) { return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w; }
__device__ inline vec_float4 fma(vec_float4 a, vec_float4 b, vec_float4 c) {
    return vec_float4(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y), fmaf(a.z, b.z, c.z), fmaf(a.w, b.w, c.w));
}

struct vec_uint3 {
    uint x, y, z;
};
struct vec_ulong2 {
    ulong x, y;
    __device__ vec_ulong2(ulong a, ulong b) : x(a), y(b) {}
};

enum class mem_flags { mem_none, mem_device, mem_threadgroup };
__device__ inline void threadgroup_barrier(mem_flags) { __syncthreads(); }
__device__ inline void simdgroup_barrier(mem_flags) { __syncwarp(); }

__device__ inline float simd_shuffle(float x, ushort lane) { return __shfl_sync(~0u, x, lane); }
__device__ inline float simd_shuffle_xor(float x, ushort mask) { return __shfl_xor_sync(~0u, x, mask); }
template <typename F>
__device__ inline float over_lanes(float x, F f) {
    for (uint offset = 16; offset > 0; offset /= 2) {
        x = f(x, __shfl_xor_sync(~0u, x, offset));
    }
    return x;
}
__device__ inline float simd_sum(float x) {
    return over_lanes(x, [](float a, float b) { return a + b; });
}
__device__ inline float simd_max(float x) {
    return over_lanes(x, [](float a, float b) { return fmaxf(a, b); });
}
__device__ inline float simd_min(float x) {
    return over_lanes(x, [](float a, float b) { return fminf(a, b); });
}

// A lane has two neighbours of a row: row lane / 4, columns 2 (lane % 4) and that + 1.
template <typename T, int R, int C>
struct simdgroup_matrix {
    T own[2];
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

__device__ inline uint matrix_lane() { return threadIdx.x % 32; }

template <typename T, int R, int C>
__device__ inline simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
    return {{value, value}};
}

template <typename T>
__device__ inline void simdgroup_load(
    simdgroup_matrix<T, 8, 8> &m, const T *from, ulong stride, vec_ulong2 origin = vec_ulong2(0, 0), bool transposed = false) {
    const uint row = matrix_lane() / 4;
    for (uint i = 0; i < 2; i++) {
        const uint column = 2 * (matrix_lane() % 4) + i;
        const ulong r = origin.y + (transposed ? column : row);
        const ulong c = origin.x + (transposed ? row : column);
        m.own[i] = from[r * stride + c];
    }
}

template <typename T>
__device__ inline void simdgroup_store(const simdgroup_matrix<T, 8, 8> &m, T *to, ulong stride) {
    for (uint i = 0; i < 2; i++) {
        to[matrix_lane() / 4 * stride + 2 * (matrix_lane() % 4) + i] = m.own[i];
    }
}

template <typename D, typename A, typename B>
__device__ inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a,
                                                     const simdgroup_matrix<B, 8, 8> &b, simdgroup_matrix<D, 8, 8> c) {
    for (uint k = 0; k < 8; k++) {
        const float x = __shfl_sync(~0u, as_float(a.own[k % 2]), matrix_lane() / 4 * 4 + k / 2);
        for (uint i = 0; i < 2; i++) {
            c.own[i] += x * __shfl_sync(~0u, as_float(b.own[i]), 4 * k + matrix_lane() % 4);
        }
    }
    d = c;
}

template <typename D, typename A, typename B>
__device__ inline void simdgroup_multiply(
    simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a, const simdgroup_matrix<B, 8, 8> &b) {
    simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)));
}

}  // namespace metal

// CUDA has vectors of these names, which are no classes with arithmetic.
#define float4 metal::vec_float4
#define half4 metal::vec_half4
#define bfloat4 metal::vec_bfloat4
#define uint3 metal::vec_uint3
#define ulong2 metal::vec_ulong2
