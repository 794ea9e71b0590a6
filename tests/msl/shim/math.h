// Math, common, integer and geometric functions: the host's, in float, rounded to the type. Vectors are taken by
// value, so that one in memory is loaded at once.
#pragma once
#include "limits.h"

namespace metal {
template <class A, class R = void> using if_vector = std::enable_if_t<is_vector<A>, R>;
template <class T> using if_scalar = std::enable_if_t<msl::is_scalar<T>>;
template <class T> using if_integer = std::enable_if_t<std::is_integral_v<T>>;
template <class A> using vec_of = vec<typename components<A>::element, components<A>::count>;

#define MSL_UNARY(name, expression)                                         \
  MSL_INLINE float name(float x) { return expression; }                     \
  MSL_INLINE half name(half h) {                                            \
    const float x = h;                                                      \
    return (half)(expression);                                              \
  }                                                                         \
  MSL_INLINE bfloat name(bfloat h) {                                        \
    const float x = h;                                                      \
    return (bfloat)(expression);                                            \
  }                                                                         \
  template <class A, class = if_vector<A>> MSL_INLINE vec_of<A> name(A a) { \
    vec_of<A> r;                                                            \
    for (int i = 0; i < components<A>::count; i++) r[i] = name(a[i]);       \
    return r;                                                               \
  }
// fast:: and precise:: are the same here: the harness does not model their errors.
#define MSL_UNARY_ALL(name, expression) \
  MSL_UNARY(name, expression)           \
  namespace precise {                   \
  MSL_UNARY(name, expression)           \
  }                                     \
  namespace fast {                      \
  MSL_UNARY(name, expression)           \
  }
MSL_UNARY_ALL(exp, __builtin_expf(x))
MSL_UNARY_ALL(exp2, __builtin_exp2f(x))
MSL_UNARY_ALL(exp10, __builtin_powf(10.0f, x))
MSL_UNARY_ALL(log, __builtin_logf(x))
MSL_UNARY_ALL(log2, __builtin_log2f(x))
MSL_UNARY_ALL(log10, __builtin_log10f(x))
MSL_UNARY_ALL(sqrt, __builtin_sqrtf(x))
MSL_UNARY_ALL(rsqrt, (float)(1.0 / __builtin_sqrt((double)x)))
MSL_UNARY_ALL(sin, __builtin_sinf(x))
MSL_UNARY_ALL(cos, __builtin_cosf(x))
MSL_UNARY_ALL(tan, __builtin_tanf(x))
MSL_UNARY_ALL(asin, __builtin_asinf(x))
MSL_UNARY_ALL(acos, __builtin_acosf(x))
MSL_UNARY_ALL(atan, __builtin_atanf(x))
MSL_UNARY_ALL(sinh, __builtin_sinhf(x))
MSL_UNARY_ALL(cosh, __builtin_coshf(x))
MSL_UNARY_ALL(tanh, __builtin_tanhf(x))
MSL_UNARY_ALL(asinh, __builtin_asinhf(x))
MSL_UNARY_ALL(acosh, __builtin_acoshf(x))
MSL_UNARY_ALL(atanh, __builtin_atanhf(x))
MSL_UNARY_ALL(floor, __builtin_floorf(x))
MSL_UNARY_ALL(ceil, __builtin_ceilf(x))
MSL_UNARY_ALL(trunc, __builtin_truncf(x))
MSL_UNARY_ALL(rint, __builtin_rintf(x))
MSL_UNARY_ALL(round, __builtin_roundf(x))
MSL_UNARY_ALL(fabs, __builtin_fabsf(x))
MSL_UNARY_ALL(fract, (x - __builtin_floorf(x)))
MSL_UNARY_ALL(saturate, __builtin_fminf(__builtin_fmaxf(x, 0.0f), 1.0f))
MSL_UNARY_ALL(sign, (x > 0 ? 1.0f : x < 0 ? -1.0f : 0.0f))
#undef MSL_UNARY_ALL
#undef MSL_UNARY
MSL_INLINE float sincos(float x, float &cosine) {
  cosine = __builtin_cosf(x);
  return __builtin_sinf(x);
}
MSL_INLINE bool isnan(float x) { return x != x; }
MSL_INLINE bool isinf(float x) { return __builtin_fabsf(x) == INFINITY; }
MSL_INLINE bool isfinite(float x) { return __builtin_fabsf(x) < INFINITY; }
MSL_INLINE bool signbit(float x) { return __builtin_signbitf(x); }

// ---------------------------------------------------------------- two operands
// Of a NaN and a number, min and max take the number.
template <class T> MSL_INLINE constexpr T scalar_min(T a, T b) {
  if constexpr (msl::is_float<T>) {
    if (a != a) return b;
    if (b != b) return a;
  }
  return b < a ? b : a;
}
template <class T> MSL_INLINE constexpr T scalar_max(T a, T b) {
  if constexpr (msl::is_float<T>) {
    if (a != a) return b;
    if (b != b) return a;
  }
  return a < b ? b : a;
}
MSL_INLINE float scalar_pow(float a, float b) { return __builtin_powf(a, b); }
MSL_INLINE float scalar_fmod(float a, float b) { return __builtin_fmodf(a, b); }
MSL_INLINE float scalar_atan2(float a, float b) { return __builtin_atan2f(a, b); }
MSL_INLINE float scalar_copysign(float a, float b) { return __builtin_copysignf(a, b); }
template <class T> MSL_INLINE T scalar_step(T edge, T x) { return x < edge ? T(0) : T(1); }
template <class T> MSL_INLINE T scalar_divide(T a, T b) { return T(a / b); }

template <class A, class B> struct common {
  typedef decltype(A() + B()) type;
};
template <class A> struct common<A, A> {
  typedef A type;
};
template <class A, class B> using common_t = typename common<A, B>::type;
template <class A, class B> using vec_of_either = vec_of<std::conditional_t<is_vector<A>, A, B>>;
template <class A, class B> using if_a_vector = std::enable_if_t<is_vector<A> || is_vector<B>>;
template <class A, class B> using if_scalars = std::enable_if_t<msl::is_scalar<A> && msl::is_scalar<B>>;
#define MSL_BINARY(name)                                                                                               \
  template <class A, class B, class = if_scalars<A, B>> MSL_INLINE constexpr common_t<A, B> name(A a, B b) {           \
    typedef common_t<A, B> T;                                                                                          \
    return (T)scalar_##name((T)a, (T)b);                                                                               \
  }                                                                                                                    \
  template <class A, class B, class = if_a_vector<A, B>, class = void> MSL_INLINE vec_of_either<A, B> name(A a, B b) { \
    typedef vec_of_either<A, B> V;                                                                                     \
    const V x(a), y(b);                                                                                                \
    V r;                                                                                                               \
    for (int i = 0; i < components<V>::count; i++) r[i] = scalar_##name(x[i], y[i]);                                   \
    return r;                                                                                                          \
  }
template <class T> MSL_INLINE constexpr T scalar_fmin(T a, T b) { return scalar_min(a, b); }
template <class T> MSL_INLINE constexpr T scalar_fmax(T a, T b) { return scalar_max(a, b); }
MSL_INLINE float scalar_powr(float a, float b) { return scalar_pow(a, b); }
MSL_BINARY(min)
MSL_BINARY(max)
MSL_BINARY(fmin)
MSL_BINARY(fmax)
MSL_BINARY(pow)
MSL_BINARY(powr)
MSL_BINARY(fmod)
MSL_BINARY(atan2)
MSL_BINARY(copysign)
MSL_BINARY(step)
MSL_BINARY(divide)
#undef MSL_BINARY

// ---------------------------------------------------------------- three operands
template <class A, class B, class C, class = if_scalar<A>> MSL_INLINE constexpr auto clamp(A x, B low, C high) {
  typedef common_t<common_t<A, B>, C> T;
  return scalar_min(scalar_max((T)x, (T)low), (T)high);
}
template <class A, class B, class C, class = if_vector<A>, class = void>
MSL_INLINE vec_of<A> clamp(A x, B low, C high) {
  return min(max(x, low), high);
}
MSL_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
MSL_INLINE half fma(half a, half b, half c) {
  return (half)((float)a * (float)b + (float)c);
} // a * b is exact in float
template <class A, class = if_vector<A>> MSL_INLINE vec_of<A> fma(A a, vec_of<A> b, vec_of<A> c) {
  vec_of<A> r;
  for (int i = 0; i < components<A>::count; i++) r[i] = fma(a[i], b[i], c[i]);
  return r;
}
template <class A, class B> MSL_INLINE auto mad(A a, B b, B c) { return a * b + c; }
template <class A, class B, class C> MSL_INLINE auto mix(A a, B b, C t) { return a + (b - a) * t; }
template <class T, class = if_scalar<T>> MSL_INLINE T select(T a, T b, bool c) { return c ? b : a; }
template <class T, int N> MSL_INLINE vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
  vec<T, N> r;
  for (int i = 0; i < N; i++) r[i] = c[i] ? b[i] : a[i];
  return r;
}
namespace precise {
using metal::atan2, metal::clamp, metal::divide, metal::fma, metal::fmax, metal::fmin, metal::fmod, metal::max,
    metal::min, metal::pow, metal::powr;
}
namespace fast {
using metal::atan2, metal::clamp, metal::divide, metal::fma, metal::fmax, metal::fmin, metal::fmod, metal::max,
    metal::min, metal::pow, metal::powr;
}

// ---------------------------------------------------------------- the rest
template <class T, class = if_scalar<T>> MSL_INLINE constexpr T abs(T x) {
  if constexpr (std::is_unsigned_v<T>)
    return x;
  else
    return x < T(0) ? T(-x) : x;
}
template <class A, class = if_vector<A>, class = void> MSL_INLINE vec_of<A> abs(A a) {
  vec_of<A> r;
  for (int i = 0; i < components<A>::count; i++) r[i] = abs(a[i]);
  return r;
}
template <class A, class B, class = if_vector<A>> MSL_INLINE typename components<A>::element dot(A a, B b) {
  typename components<A>::element s = a[0] * b[0];
  for (int i = 1; i < components<A>::count; i++) s += a[i] * b[i];
  return s;
}
template <class A, class = if_vector<A>> MSL_INLINE auto length_squared(A a) { return dot(a, a); }
template <class A, class = if_vector<A>> MSL_INLINE auto length(A a) { return sqrt(dot(a, a)); }
MSL_INLINE bool any(bool b) { return b; }
MSL_INLINE bool all(bool b) { return b; }
template <int N> MSL_INLINE bool any(const vec<bool, N> &a) {
  bool r = false;
  for (int i = 0; i < N; i++) r |= a[i];
  return r;
}
template <int N> MSL_INLINE bool all(const vec<bool, N> &a) {
  bool r = true;
  for (int i = 0; i < N; i++) r &= a[i];
  return r;
}
template <class T, class = if_integer<T>> MSL_INLINE constexpr T popcount(T x) {
  return (T)__builtin_popcountll(std::make_unsigned_t<T>(x));
}
template <class T, class = if_integer<T>> MSL_INLINE constexpr T clz(T x) {
  const auto u = std::make_unsigned_t<T>(x);
  return u == 0 ? T(8 * sizeof(T)) : T(__builtin_clzll(u) - (64 - 8 * (int)sizeof(T)));
}
template <class T, class = if_integer<T>> MSL_INLINE constexpr T ctz(T x) {
  const auto u = std::make_unsigned_t<T>(x);
  return u == 0 ? T(8 * sizeof(T)) : T(__builtin_ctzll(u));
}
MSL_INLINE uint mulhi(uint a, uint b) { return uint((uint64_t)a * b >> 32); }
template <class T> MSL_INLINE T rotate(T x, T n) {
  typedef std::make_unsigned_t<T> U;
  const unsigned width = 8 * sizeof(T), k = unsigned(n) % width;
  return k ? T((U(x) << k) | (U(x) >> (width - k))) : x;
}
template <class T> MSL_INLINE constexpr T extract_bits(T x, uint offset, uint bits) {
  typedef std::make_unsigned_t<T> U;
  if (bits == 0) return 0;
  const int width = 8 * sizeof(T);
  return T(T(U(x) << (width - offset - bits)) >> (width - bits));
}
template <class T, size_t N> struct array {
  T data[N];
  MSL_INLINE T &operator[](size_t i) { return data[i]; }
  MSL_INLINE const T &operator[](size_t i) const { return data[i]; }
};
} // namespace metal
