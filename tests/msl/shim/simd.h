// Barriers and SIMD-group functions. 32 lanes; the order of a reduction is not documented by Apple, here it is a
// balanced tree over the lanes that take part.
#pragma once
#include "math.h"

namespace metal {
enum class mem_flags : uint {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
};
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
MSL_INLINE void threadgroup_barrier(mem_flags flags, MSL_SITE) { msl_barrier((uint)flags, MSL_HERE); }
MSL_INLINE void simdgroup_barrier(mem_flags flags, MSL_SITE) { msl_simd_barrier((uint)flags, MSL_HERE); }
} // namespace metal

namespace msl {
template <class T> MSL_UNCHECKED inline void put(MslFiber *f, const T &v) {
  static_assert(sizeof(T) <= MSL_SLOT, "too large for a SIMD function");
  f->parity = f->group->generation & 1;
  __builtin_memcpy(f->group->slot[f->parity][f->lane], &v, sizeof(T));
}
template <class T> MSL_UNCHECKED inline T get(const MslFiber *f, uint32_t lane) {
  T v;
  __builtin_memcpy((void *)&v, f->group->slot[f->parity][lane], sizeof(T));
  return v;
}
MSL_UNCHECKED inline uint32_t lane() { return msl_self->lane; }

template <class T, class Op> MSL_UNCHECKED T reduce(T v, Op op, MslSite site) {
  MslFiber *f = msl_self;
  MslSimdgroup *sg = f->group;
  put(f, v);
  if (msl_arrive(MSL_REDUCTION, site)) {
    const uint32_t lanes = sg->took_part[f->lane];
    T a[MSL_SIMD];
    int n = 0;
    for (uint32_t m = lanes; m; m &= m - 1) a[n++] = get<T>(f, __builtin_ctz(m));
    for (int step = 1; step < n; step *= 2)
      for (int i = 0; i + step < n; i += 2 * step) a[i] = op(a[i], a[i + step]);
    for (uint32_t m = lanes; m; m &= m - 1) __builtin_memcpy(sg->result[__builtin_ctz(m)], &a[0], sizeof(T));
    msl_release();
  }
  T r;
  __builtin_memcpy((void *)&r, sg->result[f->lane], sizeof(T));
  return r;
}
// `inside`: false where MSL leaves the result undefined at the edge; the lane's own value comes back.
template <class T> MSL_UNCHECKED T shuffle(T v, uint32_t from, bool inside, MslSite site) {
  MslFiber *f = msl_self;
  put(f, v);
  if (msl_arrive(MSL_SHUFFLE, site)) msl_release();
  if (!inside) return v;
  if (from >= MSL_SIMD || !(f->group->took_part[f->lane] >> from & 1)) msl_absent_lane(from, site);
  return get<T>(f, from);
}
template <class T> MSL_UNCHECKED T scan(T v, bool inclusive, MslSite site) {
  MslFiber *f = msl_self;
  put(f, v);
  if (msl_arrive(MSL_SHUFFLE, site)) msl_release();
  T sum = T(0);
  for (uint32_t i = 0; i < f->lane + inclusive; i++)
    if (f->group->took_part[f->lane] >> i & 1) sum = T(sum + get<T>(f, i));
  return sum;
}
template <class T> MSL_UNCHECKED T first(T v, MslSite site) {
  MslFiber *f = msl_self;
  put(f, v);
  if (msl_arrive(MSL_SHUFFLE, site)) msl_release();
  return get<T>(f, __builtin_ctz(f->group->took_part[f->lane]));
}
} // namespace msl

namespace metal {
#define MSL_REDUCTION_OF(name, expression)                                   \
  template <class T> MSL_INLINE T name(T v, MSL_SITE) {                      \
    return msl::reduce(v, [](T a, T b) { return T(expression); }, MSL_HERE); \
  }
MSL_REDUCTION_OF(simd_sum, a + b)
MSL_REDUCTION_OF(simd_product, a *b)
MSL_REDUCTION_OF(simd_max, max(a, b))
MSL_REDUCTION_OF(simd_min, min(a, b))
MSL_REDUCTION_OF(simd_and, a &b)
MSL_REDUCTION_OF(simd_or, a | b)
MSL_REDUCTION_OF(simd_xor, a ^ b)
#undef MSL_REDUCTION_OF
MSL_INLINE bool simd_all(bool v, MSL_SITE) { return simd_and((uint)v, MSL_CALLER); }
MSL_INLINE bool simd_any(bool v, MSL_SITE) { return simd_or((uint)v, MSL_CALLER); }
template <class T> MSL_INLINE T simd_shuffle(T v, ushort lane, MSL_SITE) {
  return msl::shuffle(v, lane, true, MSL_HERE);
}
template <class T> MSL_INLINE T simd_broadcast(T v, ushort lane, MSL_SITE) {
  return msl::shuffle(v, lane, true, MSL_HERE);
}
template <class T> MSL_INLINE T simd_broadcast_first(T v, MSL_SITE) { return msl::first(v, MSL_HERE); }
template <class T> MSL_INLINE T simd_shuffle_xor(T v, ushort mask, MSL_SITE) {
  return msl::shuffle(v, msl::lane() ^ mask, true, MSL_HERE);
}
template <class T> MSL_INLINE T simd_shuffle_down(T v, ushort delta, MSL_SITE) {
  const uint from = msl::lane() + delta;
  return msl::shuffle(v, from, from < MSL_SIMD, MSL_HERE);
}
template <class T> MSL_INLINE T simd_shuffle_up(T v, ushort delta, MSL_SITE) {
  const uint lane = msl::lane();
  return msl::shuffle(v, lane - delta, lane >= delta, MSL_HERE);
}
template <class T> MSL_INLINE T simd_shuffle_rotate_down(T v, ushort delta, MSL_SITE) {
  return msl::shuffle(v, (msl::lane() + delta) % MSL_SIMD, true, MSL_HERE);
}
template <class T> MSL_INLINE T simd_shuffle_rotate_up(T v, ushort delta, MSL_SITE) {
  return msl::shuffle(v, (msl::lane() - delta) % MSL_SIMD, true, MSL_HERE);
}
template <class T> MSL_INLINE T simd_prefix_inclusive_sum(T v, MSL_SITE) { return msl::scan(v, true, MSL_HERE); }
template <class T> MSL_INLINE T simd_prefix_exclusive_sum(T v, MSL_SITE) { return msl::scan(v, false, MSL_HERE); }
MSL_INLINE bool simd_is_first() { return msl::lane() == 0; }
} // namespace metal
