// What Metal's compiler refuses and g++ cannot: controls.sh wants an error on every marked line, and on no other.
#include <metal_stdlib>
using namespace metal;

METAL_FUNC float of_threadgroup(threadgroup const float *s) { return s[0]; }
METAL_FUNC float of_device(device const float *s) { return s[0]; }
METAL_FUNC float without_space(const float *s) { return s[0]; }

kernel void k(device const float *x [[buffer(0)]], device float *y [[buffer(1)]], constant uint &n [[buffer(2)]],
              threadgroup float *s [[threadgroup(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float fixed[4];
  float local = 0;
  y[0] = of_threadgroup(x); // refused
  y[1] = of_device(s); // refused
  y[2] = of_device(fixed); // refused
  y[3] = of_device(&local); // refused
  y[4] = without_space(x); // refused
  const float *p = x; // refused
  device float *q = s; // refused
  device float *r = (device float *)s; // refused
  n = 1; // refused
  x[t] = 1; // refused
  y[5] = of_threadgroup(s) + of_device(x) + without_space(&local);
}
