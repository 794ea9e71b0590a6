// numeric_limits and as_type. The name of the base is what MLX's kernels specialise for their own types.
#pragma once
#include "vector.h"

template <class T> struct _numeric_limits_impl;
#define MSL_INTEGER(t, lo, hi)                               \
  template <> struct _numeric_limits_impl<t> {               \
    static constexpr bool is_signed = (t)(-1) < (t)0;        \
    static constexpr int digits = 8 * sizeof(t) - is_signed; \
    static constexpr t min() { return lo; }                  \
    static constexpr t lowest() { return lo; }               \
    static constexpr t max() { return hi; }                  \
    static constexpr t infinity() { return 0; }              \
    static constexpr t epsilon() { return 0; }               \
  };
MSL_INTEGER(bool, false, true)
MSL_INTEGER(char, -128, 127)
MSL_INTEGER(signed char, -128, 127)
MSL_INTEGER(uchar, 0, 255)
MSL_INTEGER(short, -32768, 32767)
MSL_INTEGER(ushort, 0, 65535)
MSL_INTEGER(int, INT_MIN, INT_MAX)
MSL_INTEGER(uint, 0, UINT_MAX)
MSL_INTEGER(long, -0x7fffffffffffffffl - 1, 0x7fffffffffffffffl)
MSL_INTEGER(ulong, 0, 0xfffffffffffffffful)
#undef MSL_INTEGER
// Bit patterns, because a bfloat literal does not exist.
#define MSL_FLOAT(t, u, min_, max_, inf, nan, eps, denorm, digits_)                            \
  template <> struct _numeric_limits_impl<t> {                                                 \
    static constexpr bool is_signed = true;                                                    \
    static constexpr int digits = digits_;                                                     \
    static constexpr t of(u bits) { return __builtin_bit_cast(t, bits); }                      \
    static constexpr t min() { return of(min_); }                                              \
    static constexpr t max() { return of(max_); }                                              \
    static constexpr t lowest() { return of((u)((max_) | (u)((u)1 << (8 * sizeof(u) - 1)))); } \
    static constexpr t infinity() { return of(inf); }                                          \
    static constexpr t quiet_NaN() { return of(nan); }                                         \
    static constexpr t epsilon() { return of(eps); }                                           \
    static constexpr t denorm_min() { return of(denorm); }                                     \
  };
MSL_FLOAT(float, uint32_t, 0x00800000, 0x7f7fffff, 0x7f800000, 0x7fc00000, 0x34000000, 1, 24)
MSL_FLOAT(half, uint16_t, 0x0400, 0x7bff, 0x7c00, 0x7e00, 0x1400, 1, 11)
MSL_FLOAT(bfloat, uint16_t, 0x0080, 0x7f7f, 0x7f80, 0x7fc0, 0x3c00, 1, 8)
#undef MSL_FLOAT

// What Apple's library calls the types that SIMD functions take; MLX's kernels ask for it.
template <class T>
struct __is_valid_simdgroup_type
    : std::bool_constant<(std::is_arithmetic_v<T> && sizeof(T) <= 4) || std::is_same_v<T, half>> {};
template <class T, int N> struct __is_valid_simdgroup_type<metal::vec<T, N>> : __is_valid_simdgroup_type<T> {};

namespace metal {
template <class T> struct numeric_limits : _numeric_limits_impl<std::remove_cv_t<T>> {};
} // namespace metal
template <class T, class F> MSL_INLINE constexpr T as_type(const F &from) {
  static_assert(sizeof(T) == sizeof(F), "as_type: the sizes differ");
  T to{};
  __builtin_memcpy(&to, &from, sizeof(T));
  return to;
}
