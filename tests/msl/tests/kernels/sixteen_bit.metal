#include <metal_stdlib>
using namespace metal;

kernel void narrow(device const float *x [[buffer(0)]], device half *h [[buffer(1)]], device bfloat *b [[buffer(2)]],
                   uint i [[thread_position_in_grid]]) {
  h[i] = half(x[i]);
  b[i] = bfloat(x[i]);
}
