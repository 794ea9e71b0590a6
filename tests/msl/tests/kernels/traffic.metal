#include <metal_stdlib>
using namespace metal;

kernel void traffic(device const float *x [[buffer(0)]], device const half *h [[buffer(1)]], device float *y [[buffer(2)]],
                    constant uint &n [[buffer(3)]], uint t [[thread_index_in_threadgroup]],
                    uint g [[threadgroup_position_in_grid]]) {
  threadgroup float s[64];
  s[t] = x[t];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float sum = 0;
  for (uint i = 0; i < n; i++) sum += s[i] * float(h[(t + i) % 128]);
  y[g * 64 + t] = simd_sum(sum);
}
