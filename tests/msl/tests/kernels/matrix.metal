#include <metal_stdlib>
using namespace metal;

// c = 1 + a b^T for a and b of 8 rows and 24 columns, b through threadgroup memory.
template <typename T>
kernel void multiply(device const T *a [[buffer(0)]], device const T *b [[buffer(1)]], device float *c [[buffer(2)]],
                     threadgroup T *s [[threadgroup(0)]], uint t [[thread_index_in_threadgroup]]) {
  for (uint i = t; i < 8 * 24; i += 32) s[i] = b[i];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_matrix<T, 8, 8> left, right;
  simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8>(1.0f);
  for (uint i = 0; i < 24; i += 8) {
    simdgroup_load(left, a + i, 24);
    simdgroup_load(right, s, 24, ulong2(i, 0), true);
    simdgroup_multiply_accumulate(sum, left, right, sum);
  }
  simdgroup_store(sum, c, 8);
}
#define MULTIPLY(T)                                                                                                 \
  template [[host_name("multiply_" #T)]] kernel void multiply<T>(device const T *, device const T *, device float *, \
                                                                 threadgroup T *, uint);
MULTIPLY(float)
MULTIPLY(half)
MULTIPLY(bfloat)
