// vec<T, N> with swizzles, packed vectors, matrices.
#pragma once
#include "types.h"

namespace metal {
template <class T, int N> struct vec;
template <class V, class T, int N, int... I> struct swizzle;

// A vector, or something that turns into one.
template <class A> struct components {
  static constexpr int count = 1;
  typedef A element;
};
template <class T, int N> struct components<vec<T, N>> {
  static constexpr int count = N;
  typedef T element;
};
template <class V, class T, int N, int... I> struct components<swizzle<V, T, N, I...>> {
  static constexpr int count = sizeof...(I);
  typedef T element;
};
template <class A> inline constexpr bool is_vector = components<A>::count > 1;

// A view of chosen components: lies in a union with all of them.
template <class V, class T, int N, int... I> struct swizzle {
  T all[N == 3 ? 4 : N];
  MSL_INLINE constexpr operator V() const { return V(all[I]...); }
  MSL_INLINE constexpr T operator[](int i) const {
    const int index[] = {I...};
    return all[index[i]];
  }
  MSL_INLINE constexpr swizzle &operator=(const V &v) {
    int k = 0;
    ((all[I] = v[k++]), ...);
    return *this;
  }
  MSL_INLINE constexpr swizzle &operator=(const swizzle &o) { return *this = V(o); }
  template <class B> MSL_INLINE constexpr swizzle &operator+=(const B &b) { return *this = V(V(*this) + V(b)); }
  template <class B> MSL_INLINE constexpr swizzle &operator-=(const B &b) { return *this = V(V(*this) - V(b)); }
  template <class B> MSL_INLINE constexpr swizzle &operator*=(const B &b) { return *this = V(V(*this) * V(b)); }
  template <class B> MSL_INLINE constexpr swizzle &operator/=(const B &b) { return *this = V(V(*this) / V(b)); }
};

template <class T, int N> struct vec_storage;
#define MSL_2(n, a, b) swizzle<vec<T, 2>, T, n, a, b>
#define MSL_3(n, a, b, c) swizzle<vec<T, 3>, T, n, a, b, c>
#define MSL_4(a, b, c, d) swizzle<vec<T, 4>, T, 4, a, b, c, d>
template <class T> struct alignas(2 * sizeof(T)) vec_storage<T, 2> {
  union {
    T v[2];
    struct {
      T x, y;
    };
    struct {
      T r, g;
    };
    struct {
      T lo, hi;
    };
    struct {
      T even, odd;
    };
    MSL_2(2, 0, 0) xx;
    MSL_2(2, 0, 1) xy;
    MSL_2(2, 1, 0) yx;
    MSL_2(2, 1, 1) yy;
  };
};
template <class T> struct alignas(4 * sizeof(T)) vec_storage<T, 3> {
  union {
    T v[4];
    struct {
      T x, y, z;
    };
    struct {
      T r, g, b;
    };
    MSL_2(3, 0, 1) xy;
    MSL_2(3, 0, 2) xz;
    MSL_2(3, 1, 2) yz;
    MSL_2(3, 1, 0) yx;
    MSL_3(3, 0, 1, 2) xyz;
    MSL_3(3, 0, 1, 2) rgb;
    MSL_3(3, 2, 1, 0) zyx;
    MSL_3(3, 1, 2, 0) yzx;
    MSL_3(3, 2, 0, 1) zxy;
  };
};
template <class T> struct alignas(4 * sizeof(T)) vec_storage<T, 4> {
  union {
    T v[4];
    struct {
      T x, y, z, w;
    };
    struct {
      T r, g, b, a;
    };
    MSL_2(4, 0, 1) xy;
    MSL_2(4, 0, 1) lo;
    MSL_2(4, 0, 1) rg;
    MSL_2(4, 2, 3) zw;
    MSL_2(4, 2, 3) hi;
    MSL_2(4, 2, 3) ba;
    MSL_2(4, 0, 2) xz;
    MSL_2(4, 0, 2) even;
    MSL_2(4, 1, 3) yw;
    MSL_2(4, 1, 3) odd;
    MSL_2(4, 0, 3) xw;
    MSL_2(4, 1, 2) yz;
    MSL_2(4, 1, 0) yx;
    MSL_2(4, 3, 2) wz;
    MSL_3(4, 0, 1, 2) xyz;
    MSL_3(4, 0, 1, 2) rgb;
    MSL_3(4, 1, 2, 3) yzw;
    MSL_4(0, 1, 2, 3) xyzw;
    MSL_4(0, 1, 2, 3) rgba;
    MSL_4(3, 2, 1, 0) wzyx;
    MSL_4(2, 3, 0, 1) zwxy;
    MSL_4(1, 0, 3, 2) yxwz;
  };
};
#undef MSL_2
#undef MSL_3
#undef MSL_4

template <class T, int N> struct vec : vec_storage<T, N> {
  using vec_storage<T, N>::v;
  vec() = default;
#if defined(__clang__) // does not check the alignment where a copy is trivial
  MSL_INLINE vec(const vec &o) { __builtin_memcpy((void *)this, &o, sizeof(vec)); }
#else
  constexpr vec(const vec &) = default;
#endif
  MSL_INLINE vec &operator=(const vec &o) { // at once: one access of the whole
    __builtin_memcpy((void *)this, &o, sizeof(vec));
    return *this;
  }
  template <class S, class = std::enable_if_t<std::is_convertible_v<S, T> && !is_vector<S>>>
  MSL_INLINE constexpr vec(S s) : vec_storage<T, N>{{{}}} {
    for (int i = 0; i < N; i++) v[i] = static_cast<T>(s);
  }
  template <class U, class = std::enable_if_t<!std::is_same_v<U, T>>>
  MSL_INLINE explicit constexpr vec(vec<U, N> o) : vec_storage<T, N>{{{}}} {
    for (int i = 0; i < N; i++) v[i] = static_cast<T>(o.v[i]);
  }
  template <class V, class U, int M, int... I, class = std::enable_if_t<sizeof...(I) == N && !std::is_same_v<U, T>>>
  MSL_INLINE explicit constexpr vec(const swizzle<V, U, M, I...> &o) : vec(V(o)) {}
  template <
      class A, class B, class... R,
      class = std::enable_if_t<components<A>::count + components<B>::count + (components<R>::count + ... + 0) == N>>
  MSL_INLINE constexpr vec(const A &a, const B &b, const R &...r) : vec_storage<T, N>{{{}}} {
    int k = 0;
    put(k, a);
    put(k, b);
    (put(k, r), ...);
  }
  template <class A> MSL_INLINE constexpr void put(int &k, const A &a) {
    if constexpr (is_vector<A>) {
      for (int i = 0; i < components<A>::count; i++) v[k++] = static_cast<T>(a[i]);
    } else {
      v[k++] = static_cast<T>(a);
    }
  }
  MSL_INLINE constexpr T &operator[](int i) { return v[i]; }
  MSL_INLINE constexpr const T &operator[](int i) const { return v[i]; }

#define MSL_EACH(R, expression)                           \
  {                                                       \
    vec<R, N> r = vec<R, N>(R(0));                        \
    for (int i = 0; i < N; i++) r.v[i] = (R)(expression); \
    return r;                                             \
  }
#define MSL_OPERATOR(op)                                                                  \
  friend MSL_INLINE constexpr vec operator op(vec a, vec b) MSL_EACH(T, a.v[i] op b.v[i]) \
      MSL_INLINE vec &operator op##=(vec b) {                                             \
    return *this = *this op b;                                                            \
  }
  MSL_OPERATOR(+)
  MSL_OPERATOR(-)
  MSL_OPERATOR(*)
  MSL_OPERATOR(/)
#undef MSL_OPERATOR
#define MSL_OPERATOR(op)                                                                 \
  template <class S, class = std::enable_if_t<std::is_integral_v<S>>>                    \
  friend MSL_INLINE constexpr vec operator op(vec a, S b)                                \
      MSL_EACH(T, a.v[i] op b) friend MSL_INLINE constexpr vec operator op(vec a, vec b) \
          MSL_EACH(T, a.v[i] op b.v[i]) template <class S>                               \
          MSL_INLINE vec &operator op##=(const S &b) {                                   \
    return *this = *this op b;                                                           \
  }
  MSL_OPERATOR(%)
  MSL_OPERATOR(&)
  MSL_OPERATOR(|)
  MSL_OPERATOR(^)
  MSL_OPERATOR(<<)
  MSL_OPERATOR(>>)
#undef MSL_OPERATOR
#define MSL_OPERATOR(op) \
  friend MSL_INLINE constexpr vec<bool, N> operator op(vec a, vec b) MSL_EACH(bool, a.v[i] op b.v[i])
  MSL_OPERATOR(<)
  MSL_OPERATOR(>)
  MSL_OPERATOR(<=)
  MSL_OPERATOR(>=)
  MSL_OPERATOR(==)
  MSL_OPERATOR(!=)
  MSL_OPERATOR(&&)
  MSL_OPERATOR(||)
#undef MSL_OPERATOR
  MSL_INLINE constexpr vec operator+() const { return *this; }
  MSL_INLINE constexpr vec operator-() const MSL_EACH(T, -v[i]) MSL_INLINE constexpr vec operator~() const
      MSL_EACH(T, ~v[i]) MSL_INLINE constexpr vec<bool, N> operator!() const MSL_EACH(bool, !v[i])
#undef MSL_EACH
};

// Aligned as their elements, no swizzles.
template <class T, int N> struct packed_storage;
template <class T> struct packed_storage<T, 2> {
  union {
    T v[2];
    struct {
      T x, y;
    };
  };
};
template <class T> struct packed_storage<T, 3> {
  union {
    T v[3];
    struct {
      T x, y, z;
    };
  };
};
template <class T> struct packed_storage<T, 4> {
  union {
    T v[4];
    struct {
      T x, y, z, w;
    };
  };
};
template <class T, int N> struct packed_vec : packed_storage<T, N> {
  using packed_storage<T, N>::v;
  packed_vec() = default;
  MSL_INLINE packed_vec(const vec<T, N> &o) {
    for (int i = 0; i < N; i++) v[i] = o.v[i];
  }
  MSL_INLINE operator vec<T, N>() const {
    vec<T, N> r;
    for (int i = 0; i < N; i++) r.v[i] = v[i];
    return r;
  }
  MSL_INLINE T &operator[](int i) { return v[i]; }
  MSL_INLINE const T &operator[](int i) const { return v[i]; }
};

template <class T, int C, int R> struct matrix {
  vec<T, R> columns[C];
  matrix() = default;
  MSL_INLINE explicit matrix(T diagonal) {
    for (int j = 0; j < C; j++)
      for (int i = 0; i < R; i++) columns[j][i] = i == j ? diagonal : T(0);
  }
  template <class... A, class = std::enable_if_t<sizeof...(A) == C>> MSL_INLINE matrix(const A &...a) {
    int k = 0;
    ((columns[k++] = a), ...);
  }
  MSL_INLINE vec<T, R> &operator[](int i) { return columns[i]; }
  MSL_INLINE const vec<T, R> &operator[](int i) const { return columns[i]; }
  friend MSL_INLINE vec<T, R> operator*(const matrix &m, const vec<T, C> &x) {
    vec<T, R> r(T(0));
    for (int j = 0; j < C; j++) r += m.columns[j] * vec<T, R>(x[j]);
    return r;
  }
};

template <class T> struct vec_elements {
  static constexpr short value = 1;
};
template <class T, int N> struct vec_elements<vec<T, N>> {
  static constexpr short value = N;
};
} // namespace metal

#define MSL_VECTORS(t)                                                             \
  typedef metal::vec<t, 2> t##2;                                                   \
  typedef metal::vec<t, 3> t##3;                                                   \
  typedef metal::vec<t, 4> t##4;                                                   \
  typedef metal::packed_vec<t, 2> packed_##t##2;                                   \
  typedef metal::packed_vec<t, 3> packed_##t##3;                                   \
  typedef metal::packed_vec<t, 4> packed_##t##4;                                   \
  namespace metal {                                                                \
  using ::t##2, ::t##3, ::t##4, ::packed_##t##2, ::packed_##t##3, ::packed_##t##4; \
  }
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
#define MSL_MATRICES(t)                         \
  typedef metal::matrix<t, 2, 2> t##2x2;        \
  typedef metal::matrix<t, 2, 4> t##2x4;        \
  typedef metal::matrix<t, 3, 3> t##3x3;        \
  typedef metal::matrix<t, 4, 4> t##4x4;        \
  namespace metal {                             \
  using ::t##2x2, ::t##2x4, ::t##3x3, ::t##4x4; \
  }
MSL_MATRICES(float)
MSL_MATRICES(half)
MSL_MATRICES(bfloat)
#undef MSL_MATRICES
