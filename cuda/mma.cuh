// Products on the matrix units of half types, and how their operands get from shared memory to registers.
#ifndef GEM_MMA_CUH
#define GEM_MMA_CUH

#include "gem.cuh"

#define HALF_PITCH (GEM_DIM * 2 + 16)            // bytes from row to row in shared memory: eight rows fall into different banks

template <typename T>
struct Half;

template <>
struct Half<bfloat> {
    static constexpr float SCALE = 1;
    __device__ static uint pack(float a, float b) {
        const __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
        return *(const uint *)&both;
    }
    __device__ static float2 unpack(uint both) { return make_float2(__uint_as_float(both << 16), __uint_as_float(both & 0xffff0000)); }
    __device__ static void multiply(float (&sum)[4], const uint (&a)[4], uint b0, uint b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

template <>
struct Half<half> {
    // Weights are at most 1: the small ones must not fall out of the range of f16.
    static constexpr float SCALE = 4096;
    __device__ static uint pack(float a, float b) {
        const __half2 both = __floats2half2_rn(a, b);
        return *(const uint *)&both;
    }
    __device__ static float2 unpack(uint both) { return __half22float2(*(const __half2 *)&both); }
    __device__ static void multiply(float (&sum)[4], const uint (&a)[4], uint b0, uint b1) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
};

// 16 x 16 of rows that lie in shared memory; `address` is that of a lane's row.
__device__ __forceinline__ void load_matrices(uint (&a)[4], uint address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address));
}

__device__ __forceinline__ void load_transposed(uint (&a)[4], uint address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address));
}

#endif
