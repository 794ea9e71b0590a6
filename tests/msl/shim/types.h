// Scalars, constants and traits.
#pragma once
#include <type_traits>
#include <utility>

// The compiler must not leave a call in the way: a report names the line of the innermost inlined caller that is
// not in these headers.
#define MSL_INLINE inline __attribute__((always_inline))
// For code that touches the harness's own memory only.
#if defined(__clang__)
#define MSL_UNCHECKED __attribute__((no_sanitize("thread")))
#else
#define MSL_UNCHECKED __attribute__((no_sanitize_thread))
#endif

#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define HUGE_VALF (__builtin_huge_valf())
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX ((half)65504.0f)
#define INT_MAX 0x7fffffff
#define INT_MIN (-0x7fffffff - 1)
#define UINT_MAX 0xffffffffu
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_1_PI_F 0.31830988618379067154f
#define M_2_SQRTPI_F 1.12837916709551257390f
#define M_SQRT2_F 1.41421356237309504880f
#define M_SQRT1_2_F 0.70710678118654752440f
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;

#if defined(__clang__)
typedef __bf16 bfloat;
#else
// g++ 12 has no arithmetic on __bf16. Rounds to nearest even after every operation.
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  template <class T, class = std::enable_if_t<std::is_arithmetic_v<T> || std::is_same_v<T, half>>>
  MSL_INLINE constexpr bfloat(T v) : bits(round(float(v))) {}
  static MSL_INLINE constexpr uint16_t round(float f) {
    const uint32_t u = __builtin_bit_cast(uint32_t, f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);
    return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
  }
  MSL_INLINE constexpr operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
  MSL_INLINE constexpr bfloat operator-() const { return bfloat(-float(*this)); }
#define MSL_BFLOAT(op)                                                                                        \
  friend MSL_INLINE constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat(float(a) op float(b)); } \
  template <class T, class = std::enable_if_t<std::is_integral_v<T>>>                                         \
  friend MSL_INLINE constexpr bfloat operator op(bfloat a, T b) {                                             \
    return bfloat(float(a) op float(b));                                                                      \
  }                                                                                                           \
  template <class T, class = std::enable_if_t<std::is_integral_v<T>>>                                         \
  friend MSL_INLINE constexpr bfloat operator op(T a, bfloat b) {                                             \
    return bfloat(float(a) op float(b));                                                                      \
  }                                                                                                           \
  friend MSL_INLINE constexpr float operator op(bfloat a, float b) { return float(a) op b; }                  \
  friend MSL_INLINE constexpr float operator op(float a, bfloat b) { return a op float(b); }                  \
  template <class T> MSL_INLINE constexpr bfloat &operator op##=(T b) {                                       \
    return *this = bfloat(float(*this) op float(b));                                                          \
  }
  MSL_BFLOAT(+)
  MSL_BFLOAT(-)
  MSL_BFLOAT(*)
  MSL_BFLOAT(/)
#undef MSL_BFLOAT
};
#endif

namespace msl {
template <class T>
inline constexpr bool is_float = std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
template <class T> inline constexpr bool is_scalar = std::is_arithmetic_v<T> || is_float<T>;
} // namespace msl

namespace metal {
using std::bool_constant, std::conditional, std::conditional_t, std::decay, std::decay_t, std::declval, std::enable_if,
    std::enable_if_t;
using std::false_type, std::integral_constant, std::is_convertible, std::is_convertible_v, std::is_integral,
    std::is_integral_v;
using std::is_pointer, std::is_pointer_v, std::is_same, std::is_same_v, std::is_signed, std::is_signed_v,
    std::is_unsigned, std::is_unsigned_v;
using std::is_void, std::is_void_v, std::make_signed_t, std::make_unsigned_t, std::remove_const_t, std::remove_cv,
    std::remove_cv_t;
using std::remove_pointer_t, std::remove_reference, std::remove_reference_t, std::true_type;
template <class T> struct is_floating_point : bool_constant<msl::is_float<remove_cv_t<T>>> {};
template <class T> inline constexpr bool is_floating_point_v = is_floating_point<T>::value;
template <class T> struct is_arithmetic : bool_constant<msl::is_scalar<remove_cv_t<T>>> {};
template <class T> inline constexpr bool is_arithmetic_v = is_arithmetic<T>::value;
using ::bfloat, ::half, ::uchar, ::uint, ::ulong, ::ushort;
} // namespace metal
