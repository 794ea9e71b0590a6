// simdgroup_matrix, 8x8. A lane holds two neighbours of one row, in the layout that MLX found on the device:
// lanes 0, 1, 8, 9 hold row 0. Products are accumulated in float, in order of k, and rounded once.
#pragma once
#include "simd.h"

namespace msl {
MSL_INLINE constexpr int matrix_row(int lane) { return (lane / 4 & 4) + lane / 2 % 4; }
MSL_INLINE constexpr int matrix_column(int lane) { return (lane / 4 & 2) * 2 + lane % 2 * 2; }
} // namespace msl

namespace metal {
template <class T, int Rows, int Columns = Rows> struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "simdgroup_matrix: only 8x8");
  vec<T, 2> mine;
  simdgroup_matrix() = default;
  MSL_INLINE explicit simdgroup_matrix(T diagonal) {
    const int row = msl::matrix_row(msl::lane()), column = msl::matrix_column(msl::lane());
    mine = vec<T, 2>(row == column ? diagonal : T(0), row == column + 1 ? diagonal : T(0));
  }
  MSL_INLINE vec<T, 2> &thread_elements() { return mine; }
  MSL_INLINE const vec<T, 2> &thread_elements() const { return mine; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int Rows, int Columns = Rows>
MSL_INLINE simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, Rows, Columns> m;
  m.mine = vec<T, 2>(x);
  return m;
}
} // namespace metal

namespace msl {
MSL_INLINE ulong matrix_offset(int i, ulong stride, metal::ulong2 origin, bool transpose) {
  const ulong row = matrix_row(lane()), column = matrix_column(lane()) + i;
  return transpose ? (origin.y + column) * stride + origin.x + row : (origin.y + row) * stride + origin.x + column;
}
} // namespace msl

namespace metal {
template <class T, class P>
MSL_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8> &m, const P *p, ulong elements_per_row = 8,
                               ulong2 origin = ulong2(0), bool transpose = false) {
  static_assert(std::is_same_v<T, P>, "simdgroup_load: the element types differ");
  for (int i = 0; i < 2; i++) m.mine[i] = p[msl::matrix_offset(i, elements_per_row, origin, transpose)];
}
template <class T, class P>
MSL_INLINE void simdgroup_store(const simdgroup_matrix<T, 8, 8> &m, P *p, ulong elements_per_row = 8,
                                ulong2 origin = ulong2(0), bool transpose = false) {
  static_assert(std::is_same_v<T, P>, "simdgroup_store: the element types differ");
  for (int i = 0; i < 2; i++) p[msl::matrix_offset(i, elements_per_row, origin, transpose)] = m.mine[i];
}
template <class D, class A, class B, class C>
MSL_UNCHECKED void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a,
                                                 const simdgroup_matrix<B, 8, 8> &b, const simdgroup_matrix<C, 8, 8> &c,
                                                 MSL_SITE) {
  struct Operands {
    A a[2];
    B b[2];
    C c[2];
  };
  const Operands own = {{a.mine.v[0], a.mine.v[1]}, {b.mine.v[0], b.mine.v[1]}, {c.mine.v[0], c.mine.v[1]}};
  MslFiber *f = msl_self;
  MslSimdgroup *sg = f->group;
  msl::put(f, own);
  if (msl_arrive(MSL_MATRIX, MSL_HERE)) {
    if (sg->took_part[f->lane] != ~0u) msl_incomplete_simdgroup(MSL_HERE);
    float left[8][8], right[8][8], sum[8][8];
    for (uint32_t lane = 0; lane < MSL_SIMD; lane++) {
      const Operands o = msl::get<Operands>(f, lane);
      const int row = msl::matrix_row(lane), column = msl::matrix_column(lane);
      for (int i = 0; i < 2; i++) {
        left[row][column + i] = o.a[i];
        right[row][column + i] = o.b[i];
        sum[row][column + i] = o.c[i];
      }
    }
    for (int row = 0; row < 8; row++)
      for (int k = 0; k < 8; k++)
        for (int column = 0; column < 8; column++) sum[row][column] += left[row][k] * right[k][column];
    for (uint32_t lane = 0; lane < MSL_SIMD; lane++) {
      const int row = msl::matrix_row(lane), column = msl::matrix_column(lane);
      const D out[2] = {(D)sum[row][column], (D)sum[row][column + 1]};
      __builtin_memcpy(sg->result[lane], out, sizeof out);
    }
    msl_release();
  }
  __builtin_memcpy((void *)&d.mine, sg->result[f->lane], sizeof d.mine);
}
template <class D, class A, class B>
MSL_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8> &d, const simdgroup_matrix<A, 8, 8> &a,
                                   const simdgroup_matrix<B, 8, 8> &b, MSL_SITE) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0)), MSL_CALLER);
}
} // namespace metal
