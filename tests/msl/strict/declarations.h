// Declarations only, for clang's C++ for OpenCL: Metal's library with its address spaces, so that a pointer of the
// wrong space finds no function. Nothing here is ever run.
#pragma once
#pragma OPENCL EXTENSION __cl_clang_function_pointers : enable
#pragma OPENCL EXTENSION __cl_clang_bitfields : enable
#pragma OPENCL EXTENSION __cl_clang_variadic_functions : enable
#pragma OPENCL EXTENSION cl_khr_fp16 : enable

#define METAL_FUNC inline __attribute__((always_inline))
#define INFINITY (__builtin_inff())
#define NAN (__builtin_nanf(""))
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX ((half)65504.0f)
#define INT_MAX 0x7fffffff
#define INT_MIN (-0x7fffffff - 1)
#define UINT_MAX 0xffffffffu
#define M_PI_F 3.14159265358979323846f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.69314718055994530942f
typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef signed char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
typedef __bf16 bfloat;

// ---------------------------------------------------------------- traits
namespace metal {
template <class T, T v> struct integral_constant {
  static constexpr __constant T value = v;
  typedef T value_type;
  constexpr operator T() const { return v; }
};
template <bool B> using bool_constant = integral_constant<bool, B>;
typedef bool_constant<true> true_type;
typedef bool_constant<false> false_type;
template <bool B, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> {
  typedef T type;
};
template <bool B, class T = void> using enable_if_t = typename enable_if<B, T>::type;
template <bool B, class T, class F> struct conditional {
  typedef T type;
};
template <class T, class F> struct conditional<false, T, F> {
  typedef F type;
};
template <bool B, class T, class F> using conditional_t = typename conditional<B, T, F>::type;
template <class T, class U> inline constexpr __constant bool is_same_v = __is_same(T, U);
template <class T, class U> struct is_same : bool_constant<__is_same(T, U)> {};
template <class T> using remove_cv_t = __remove_cv(T);
template <class T> using remove_reference_t = __remove_reference_t(T);
template <class T> using make_unsigned_t = __make_unsigned(T);
template <class T> using make_signed_t = __make_signed(T);
template <class T>
inline constexpr __constant bool is_floating_point_v =
    __is_same(T, float) || __is_same(T, half) || __is_same(T, bfloat);
template <class T> struct is_floating_point : bool_constant<is_floating_point_v<T>> {};
template <class T> inline constexpr __constant bool is_integral_v = __is_integral(T);
template <class T> struct is_integral : bool_constant<__is_integral(T)> {};

// ---------------------------------------------------------------- vectors
template <class T, int N> struct vector {
  typedef T type __attribute__((ext_vector_type(N)));
};
template <class T> struct vector<T, 1> {
  typedef T type;
};
// The language has no vectors of bool.
template <> struct vector<bool, 2> {
  typedef char type __attribute__((ext_vector_type(2)));
};
template <> struct vector<bool, 3> {
  typedef char type __attribute__((ext_vector_type(3)));
};
template <> struct vector<bool, 4> {
  typedef char type __attribute__((ext_vector_type(4)));
};
template <class T, int N> using vec = typename vector<T, N>::type;
// float4(a, b): the translator spells constructors so.
template <class V, class... A> V make(A... a);
template <class T, int C, int R> struct matrix {
  vec<T, R> columns[C];
#define MSL_INDEX(space)                    \
  space vec<T, R> &operator[](int i) space; \
  const space vec<T, R> &operator[](int i) const space;
  MSL_INDEX(__private)
  MSL_INDEX(__local)
  MSL_INDEX(__global)
#undef MSL_INDEX
};
template <class T, int C, int R> vec<T, R> operator*(matrix<T, C, R>, vec<T, C>);
} // namespace metal
#define MSL_MAKE(type) metal::make<type>
#define MSL_VECTORS(t)                 \
  typedef metal::vec<t, 2> t##2;       \
  typedef metal::vec<t, 3> t##3;       \
  typedef metal::vec<t, 4> t##4;       \
  struct packed_##t##2 { t x, y; };    \
  struct packed_##t##3 { t x, y, z; }; \
  struct packed_##t##4 { t x, y, z, w; };
MSL_VECTORS(bool)
MSL_VECTORS(char)
MSL_VECTORS(uchar)
MSL_VECTORS(short)
MSL_VECTORS(ushort)
MSL_VECTORS(int)
MSL_VECTORS(uint)
MSL_VECTORS(long)
MSL_VECTORS(ulong)
MSL_VECTORS(float)
MSL_VECTORS(half)
MSL_VECTORS(bfloat)
#undef MSL_VECTORS
typedef metal::matrix<float, 4, 4> float4x4;
typedef metal::matrix<half, 4, 4> half4x4;
typedef metal::matrix<bfloat, 4, 4> bfloat4x4;

template <class T> struct _numeric_limits_impl;
#define MSL_LIMITS(t, largest)                        \
  template <> struct _numeric_limits_impl<t> {        \
    static constexpr t max() { return largest; }      \
    static constexpr t min() { return -largest; }     \
    static constexpr t lowest() { return -largest; }  \
    static constexpr t infinity() { return largest; } \
    static constexpr t epsilon() { return 0; }        \
    static constexpr t quiet_NaN() { return 0; }      \
  };
MSL_LIMITS(float, 3e38f)
MSL_LIMITS(half, (half)65504.0f)
MSL_LIMITS(bfloat, (bfloat)3e38f)
MSL_LIMITS(char, 127)
MSL_LIMITS(uchar, 255)
MSL_LIMITS(short, 32767)
MSL_LIMITS(ushort, 65535)
MSL_LIMITS(int, INT_MAX)
MSL_LIMITS(uint, UINT_MAX)
MSL_LIMITS(long, 0x7fffffffffffffffl)
MSL_LIMITS(ulong, 0xfffffffffffffffful)
#undef MSL_LIMITS
template <class T> struct __is_valid_simdgroup_type : metal::true_type {};
template <class T, class F> constexpr T as_type(F from) { return __builtin_bit_cast(T, from); }

// ---------------------------------------------------------------- functions
namespace metal {
template <class T> struct numeric_limits : _numeric_limits_impl<T> {};

#define MSL_1(name) template <class T> T name(T);
#define MSL_2(name)                \
  template <class T> T name(T, T); \
  template <class T, class U, class = enable_if_t<!__is_same(T, U)>> decltype(T() + U()) name(T, U);
#define MSL_FLOAT_FUNCTIONS                                                                                       \
  MSL_1(exp)                                                                                                      \
  MSL_1(exp2) MSL_1(exp10) MSL_1(log) MSL_1(log2) MSL_1(log10) MSL_1(sqrt) MSL_1(rsqrt) MSL_1(sin) MSL_1(cos)     \
      MSL_1(tan) MSL_1(asin) MSL_1(acos) MSL_1(atan) MSL_1(sinh) MSL_1(cosh) MSL_1(tanh) MSL_1(floor) MSL_1(ceil) \
          MSL_1(trunc) MSL_1(rint) MSL_1(round) MSL_1(fabs) MSL_1(fract) MSL_1(saturate) MSL_2(min) MSL_2(max)    \
              MSL_2(fmin) MSL_2(fmax) MSL_2(pow) MSL_2(powr) MSL_2(fmod) MSL_2(atan2)                             \
                  MSL_2(divide) template <class T, class A, class B>                                              \
                  T clamp(T, A, B);                                                                               \
  template <class T> T fma(T, T, T);                                                                              \
  template <class T> T sincos(T, __private T &);
MSL_FLOAT_FUNCTIONS
namespace precise {
MSL_FLOAT_FUNCTIONS
}
namespace fast {
MSL_FLOAT_FUNCTIONS
}
MSL_1(sign)
MSL_1(abs) MSL_1(popcount) MSL_1(clz) MSL_1(ctz) MSL_2(step) MSL_2(copysign) template <class T>
bool isnan(T);
template <class T> bool isinf(T);
template <class T> bool isfinite(T);
template <class T> T mad(T, T, T);
template <class T, class U, class V> T mix(T, U, V);
template <class T, class U> T select(T, T, U);
template <class T> struct element {
  typedef T type;
};
template <class T, int N> struct element<T __attribute__((ext_vector_type(N)))> {
  typedef T type;
};
template <class T> typename element<T>::type dot(T, T);
template <class T> typename element<T>::type length(T);
template <class T> bool any(T);
template <class T> bool all(T);
template <class T> T extract_bits(T, uint, uint);
template <class T> T rotate(T, T);
uint mulhi(uint, uint);

enum class mem_flags : uint { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(uint(a) | uint(b)); }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);
MSL_1(simd_sum)
MSL_1(simd_product) MSL_1(simd_max) MSL_1(simd_min) MSL_1(simd_and) MSL_1(simd_or) MSL_1(simd_xor)
    MSL_1(simd_broadcast_first) MSL_1(simd_prefix_inclusive_sum) MSL_1(simd_prefix_exclusive_sum) template <class T>
    T simd_shuffle(T, ushort);
template <class T> T simd_broadcast(T, ushort);
template <class T> T simd_shuffle_xor(T, ushort);
template <class T> T simd_shuffle_down(T, ushort);
template <class T> T simd_shuffle_up(T, ushort);
template <class T> T simd_shuffle_rotate_down(T, ushort);
template <class T> T simd_shuffle_rotate_up(T, ushort);
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();

template <class T, int Rows, int Columns = Rows> struct simdgroup_matrix {
  vec<T, 2> mine;
  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T);
  __private vec<T, 2> &thread_elements();
  const __private vec<T, 2> &thread_elements() const;
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
template <class T, int Rows, int Columns = Rows> simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T);
#define MSL_MATRIX(space)                                                                                  \
  template <class T>                                                                                       \
  void simdgroup_load(__private simdgroup_matrix<T, 8, 8> &, const space T *, ulong elements_per_row = 8,  \
                      ulong2 origin = 0, bool transpose = false);                                          \
  template <class T>                                                                                       \
  void simdgroup_store(const __private simdgroup_matrix<T, 8, 8> &, space T *, ulong elements_per_row = 8, \
                       ulong2 origin = 0, bool transpose = false);
MSL_MATRIX(__global)
MSL_MATRIX(__local)
#undef MSL_MATRIX
template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(__private simdgroup_matrix<D, 8, 8> &, const __private simdgroup_matrix<A, 8, 8> &,
                                   const __private simdgroup_matrix<B, 8, 8> &,
                                   const __private simdgroup_matrix<C, 8, 8> &);
template <class D, class A, class B>
void simdgroup_multiply(__private simdgroup_matrix<D, 8, 8> &, const __private simdgroup_matrix<A, 8, 8> &,
                        const __private simdgroup_matrix<B, 8, 8> &);

enum memory_order { memory_order_relaxed };
template <class T> struct atomic {
  T value;
};
typedef atomic<int> atomic_int;
typedef atomic<uint> atomic_uint;
typedef atomic<float> atomic_float;
#define MSL_ATOMIC(space)                                                                               \
  template <class T, class V> void atomic_store_explicit(volatile space atomic<T> *, V, memory_order);  \
  template <class T> T atomic_load_explicit(const volatile space atomic<T> *, memory_order);            \
  template <class T, class V> T atomic_fetch_add_explicit(volatile space atomic<T> *, V, memory_order); \
  template <class T, class V> T atomic_fetch_max_explicit(volatile space atomic<T> *, V, memory_order); \
  template <class T, class V> T atomic_fetch_min_explicit(volatile space atomic<T> *, V, memory_order);
MSL_ATOMIC(__global)
MSL_ATOMIC(__local)
#undef MSL_ATOMIC
} // namespace metal
