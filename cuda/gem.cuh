// What nvcc needs to read metal/gem.h, and the few instructions that CUDA C++ has no words for.
#ifndef GEM_CUH
#define GEM_CUH

#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef unsigned char uchar;
typedef unsigned int uint;
typedef unsigned long ulong;
static_assert(sizeof(ulong) == 8, "gem.h wants a ulong of 8 bytes");

typedef __half half;
typedef __nv_bfloat16 bfloat;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bfloat x) { return __bfloat162float(x); }

// Four elements as they lie in memory.
template <typename T>
struct alignas(4 * sizeof(T)) vec4 {
    T x, y, z, w;
    __device__ operator float4() const { return make_float4(to_float(x), to_float(y), to_float(z), to_float(w)); }
};
typedef vec4<half> half4;
typedef vec4<bfloat> bfloat4;

// `device` is an address space there and the inside of the macro __device__ here.
#pragma push_macro("__device__")
#undef __device__
#define device
#define constant const
#define inline __attribute__((__device__)) __inline__
#include "../metal/gem.h"
#undef inline
#undef constant
#undef device
#pragma pop_macro("__device__")

__device__ __forceinline__ uint shared_address(const void *p) { return (uint)__cvta_generic_to_shared(p); }

__device__ __forceinline__ uint dynamic_shared_bytes() {
    uint bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

// Barriers in shared memory. A phase ends when as many threads have arrived as the barrier was made for, and the bytes that were
// announced have landed.
#if __CUDA_ARCH__ >= 900
#define GEM_BULK 1                      // whole rows are copied by the copy engine
#define GEM_LANDED_ARRIVALS 1           // one lane announces the bytes
#else
#define GEM_BULK 0
#define GEM_LANDED_ARRIVALS GEM_LANES   // every lane arrives once its own copies have landed
#endif

__device__ __forceinline__ void barrier_init(uint barrier, uint arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// By each thread that has made a barrier, before anyone else uses it: the copy engine does not see what threads see.
__device__ __forceinline__ void barriers_made() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(uint barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool barrier_passed(uint barrier, uint parity) {
    uint passed;
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(passed)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#else
    asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(passed)
                 : "r"(barrier), "r"(parity)
                 : "memory");
#endif
    return passed;
}

// Waits for the end of the phase of this parity: 0 for the first.
__device__ __forceinline__ void barrier_wait(uint barrier, uint parity) {
    while (!barrier_passed(barrier, parity)) {
    }
}

#if GEM_BULK
__device__ __forceinline__ void barrier_expect(uint barrier, uint bytes) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1; }" ::"r"(barrier), "r"(bytes) : "memory");
}

// One lane of a whole warp, and the compiler knows that it is one.
__device__ __forceinline__ bool elected() {
    uint is;
    asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p; }" : "=r"(is)::"memory");
    return is;
}

__device__ __forceinline__ void copy_row(uint to, const void *from, uint bytes, uint barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "r"(bytes), "r"(barrier)
                 : "memory");
}
#else
__device__ __forceinline__ void copy_16(uint to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void barrier_arrive_when_copied(uint barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
#endif

#endif
