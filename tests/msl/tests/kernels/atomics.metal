#include <metal_stdlib>
using namespace metal;

// The largest sum of thread indices over all threadgroups.
kernel void largest_sum(device atomic_uint *n [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup atomic_uint s[1];
  if (t == 0) atomic_store_explicit(&s[0], 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&s[0], t, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t == 0) atomic_fetch_max_explicit(n, atomic_load_explicit(&s[0], memory_order_relaxed), memory_order_relaxed);
}
