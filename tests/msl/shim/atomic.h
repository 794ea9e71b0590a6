// Relaxed atomics. A threadgroup runs on one OS thread, so that plain loads and stores are atomic here; bounds and
// initialisation are checked as for any access, races are not.
#pragma once
#include "simd.h"

namespace metal {
enum memory_order { memory_order_relaxed };
template <class T> struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<bool> atomic_bool;
typedef atomic<float> atomic_float;

template <class T, class V> MSL_INLINE void atomic_store_explicit(volatile atomic<T> *a, V v, memory_order) {
  const T value = (T)v;
  msl_atomic_store(&a->value, &value, sizeof(T));
}
template <class T> MSL_INLINE T atomic_load_explicit(const volatile atomic<T> *a, memory_order) {
  T value;
  msl_atomic_load(&a->value, &value, sizeof(T));
  return value;
}
template <class T, class V> MSL_INLINE T atomic_exchange_explicit(volatile atomic<T> *a, V v, memory_order order) {
  const T old = atomic_load_explicit(a, order);
  atomic_store_explicit(a, v, order);
  return old;
}
#define MSL_ATOMIC(name, expression)                                                            \
  template <class T, class V>                                                                   \
  MSL_INLINE T atomic_fetch_##name##_explicit(volatile atomic<T> *a, V v, memory_order order) { \
    const T x = atomic_load_explicit(a, order), y = (T)v;                                       \
    atomic_store_explicit(a, T(expression), order);                                             \
    return x;                                                                                   \
  }
MSL_ATOMIC(add, x + y)
MSL_ATOMIC(sub, x - y)
MSL_ATOMIC(max, x < y ? y : x)
MSL_ATOMIC(min, y < x ? y : x)
MSL_ATOMIC(or, x | y)
MSL_ATOMIC(and, x &y)
MSL_ATOMIC(xor, x ^ y)
#undef MSL_ATOMIC
template <class T>
MSL_INLINE bool atomic_compare_exchange_weak_explicit(volatile atomic<T> *a, T *expected, T desired, memory_order order,
                                                      memory_order) {
  const T old = atomic_load_explicit(a, order);
  if (old == *expected) {
    atomic_store_explicit(a, desired, order);
    return true;
  }
  *expected = old;
  return false;
}
} // namespace metal
