#include <metal_stdlib>
using namespace metal;
#include "params.h"

constant uint N [[function_constant(0)]];
constant bool HAS_N = is_function_constant_defined(N);
constant uint ADD = HAS_N ? N : 7;

template <typename T, int K>
kernel void reverse(device const T *x [[buffer(0)]], device float *y [[buffer(1)]], constant Params &p [[buffer(2)]],
                    threadgroup T *s [[threadgroup(0)]], uint3 t [[thread_position_in_threadgroup]],
                    uint2 g [[threadgroup_position_in_grid]]) {
  if (t.x < p.n) s[t.x] = x[t.x];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t.x < p.n) y[g.y * p.n + t.x] = s[p.n - 1 - t.x] * p.scale + float(ADD) + K + g.y;
}
#define REVERSE(T, K)                                                                                        \
  template [[host_name("reverse_" #T "_" #K)]] kernel void reverse<T, K>(device const T *, device float *,   \
                                                                         constant Params &, threadgroup T *, \
                                                                         uint3, uint2);
REVERSE(float, 100)
REVERSE(half, 200)
