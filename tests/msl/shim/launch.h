// What src/translate/emit.rs puts around the kernels: arguments are bound by their C++ type, which the translator
// need not parse.
#pragma once
#include "simd.h"

namespace msl {
template <class T> MSL_UNCHECKED inline T &threadgroup_variable(uint32_t id, const char *name) {
  return *(T *)msl_threadgroup_variable(id, sizeof(T), alignof(T), name);
}

template <class T> MSL_UNCHECKED inline T from_three(const uint32_t *v) {
  if constexpr (metal::components<T>::count == 1)
    return (T)v[0];
  else if constexpr (metal::components<T>::count == 2)
    return T(v[0], v[1]);
  else
    return T(v[0], v[1], v[2]);
}
template <class T> MSL_UNCHECKED inline T position(const MslContext *c, uint32_t kind, const MslFiber *f) {
  uint32_t v[3] = {};
  for (int i = 0; i < 3; i++) {
    switch (kind) {
    case MSL_ARG_THREAD_POSITION_IN_GRID: v[i] = c->group[i] * c->threads[i] + f->position[i]; break;
    case MSL_ARG_THREAD_POSITION_IN_THREADGROUP: v[i] = f->position[i]; break;
    case MSL_ARG_THREADGROUP_POSITION_IN_GRID: v[i] = c->group[i]; break;
    case MSL_ARG_THREADS_PER_THREADGROUP: v[i] = c->threads[i]; break;
    case MSL_ARG_THREADGROUPS_PER_GRID: v[i] = c->groups[i]; break;
    case MSL_ARG_THREADS_PER_GRID: v[i] = c->groups[i] * c->threads[i]; break;
    case MSL_ARG_THREAD_INDEX_IN_THREADGROUP: v[i] = f->tid; break;
    case MSL_ARG_SIMDGROUP_INDEX_IN_THREADGROUP: v[i] = f->simd; break;
    case MSL_ARG_THREAD_INDEX_IN_SIMDGROUP: v[i] = f->lane; break;
    case MSL_ARG_SIMDGROUPS_PER_THREADGROUP: v[i] = c->simdgroups; break;
    case MSL_ARG_THREADS_PER_SIMDGROUP: v[i] = MSL_SIMD; break;
    }
  }
  return from_three<T>(v);
}

MSL_UNCHECKED inline void *memory(const MslContext *c, const MslArg *a) {
  return a->kind == MSL_ARG_THREADGROUP ? c->threadgroup[a->index] : c->buffer[a->index];
}
template <class A> struct argument {
  static MSL_UNCHECKED A get(const MslContext *c, const MslArg *a, const MslFiber *f) {
    return position<std::remove_cv_t<A>>(c, a->kind, f);
  }
};
template <class T> struct argument<T *> {
  static MSL_UNCHECKED T *get(const MslContext *c, const MslArg *a, const MslFiber *) { return (T *)memory(c, a); }
};
template <class T> struct argument<T &> {
  static MSL_UNCHECKED T &get(const MslContext *c, const MslArg *a, const MslFiber *) { return *(T *)memory(c, a); }
};
template <class... A, size_t... I>
MSL_UNCHECKED inline void call(void (*kernel)(A...), std::integer_sequence<size_t, I...>, const MslContext *c,
                               const MslArg *a, const MslFiber *f) {
  kernel(argument<A>::get(c, a + I, f)...);
}
template <class... A>
MSL_UNCHECKED inline void call(void (*kernel)(A...), const MslContext *c, const MslArg *a, const MslFiber *f) {
  call(kernel, std::make_integer_sequence<size_t, sizeof...(A)>(), c, a, f);
}
} // namespace msl
