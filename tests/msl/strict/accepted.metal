// What the check must let pass: the address spaces as Metal wants them.
#include <metal_stdlib>
using namespace metal;

struct Params {
  uint n;
  float scale;
};
constant bool SCALED [[function_constant(0)]];

METAL_FUNC float first(threadgroup const float *s) { return s[0]; }
METAL_FUNC float first(device const float *s) { return s[0]; }

template <typename T>
METAL_FUNC void copy(threadgroup T *to, device const T *from, uint n, uint t) {
  for (uint i = t; i < n; i += 32) to[i] = from[i];
}

template <typename T>
kernel void scale(device const T *x [[buffer(0)]], device T *y [[buffer(1)]], constant Params &p [[buffer(2)]],
                  threadgroup T *s [[threadgroup(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float total[1];
  copy(s, x, p.n, t);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0;
  thread float &mine = sum;
  mine += float(s[t]) * 0.5;
  if (SCALED) mine *= p.scale;
  if (t == 0) total[0] = simd_sum(mine);
  simdgroup_matrix<T, 8, 8> m;
  simdgroup_load(m, s, 8, ulong2(0, 0), true);
  simdgroup_store(m, y, 8);
  threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
  device const vec<T, 4> *rows = (device const vec<T, 4> *)x;
  y[t] = T(first(total) + float4(rows[t]).x);
}
#define SCALE(T) template [[host_name("scale_" #T)]] kernel void scale<T>(device const T *, device T *, constant Params &, threadgroup T *, uint);
SCALE(float)
SCALE(half)
SCALE(bfloat)
