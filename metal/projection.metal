// The fused projection: Y[m, n] = X[m, k] W[n, k]^T, rows of W from several weights packed one after the other.
//
// Bitwise contract. An output element is one sum over k, in an order that k alone decides: tiles step through k from 0 in
// eights, decode through k in the order of its lanes. Neither the tile, nor m, nor n, nor which columns share the call
// has a part in it, and there is no split of k. So all tiles agree bit for bit, and so do the columns of a fused call and
// of a call of their own. The two families, tiles and decode, differ in the last bits.
//
// Ownership in the tiles. A threadgroup owns ROWS x COLUMNS elements of Y from the first k to the last; a SIMD group owns
// a block of them, in 8 x 8 matrices in its registers.
//
//                          COLUMNS of Y = rows of W                 one step of DEPTH k at a time:
//                     +-----------------+-----------------+         1. all threads load the tile of X and the tile of W,
//                     |  SIMD group 0   |  SIMD group 1   |            each element once, into threadgroup memory
//        ROWS of Y    |  32 x 64        |  32 x 64        |         2. barrier: the tiles are whole
//                     +-----------------+-----------------+         3. every SIMD group multiplies its rows of X by its
//                     |  SIMD group 2   |  SIMD group 3   |            rows of W: X is read (SIMD columns) times, W
//                     +-----------------+-----------------+            (SIMD rows) times
//                        64 x 128 with 4 SIMD groups                4. barrier: nobody loads over what somebody reads
//
// Tails. Rows past m or n, and columns past k, are 0 in the tile and are not read from the device: whatever lies there,
// NaN too, stays there. Zeros past k add nothing to a sum that starts at +0. Elements past m or n are not written.

#include <metal_stdlib>
using namespace metal;
#include "gem.h"

template <typename T>
using vec4 = metal::vec<T, 4>;

// Four neighbours at any element: rows begin where a view says, which need not be a multiple of four.
template <typename T>
struct Four {
    T x, y, z, w;
};

// Elements at .. at + 3 of a row that ends before `end`; 0 from there on.
template <typename T>
inline vec4<T> load4(device const T *row, uint at, uint end) {
    vec4<T> four = T(0);
    if (at + 4 <= end) {
        const Four<T> found = *(device const Four<T> *)(row + at);
        four.x = found.x;
        four.y = found.y;
        four.z = found.z;
        four.w = found.w;
        return four;
    }
    for (uint i = 0; at + i < end; i++) {
        four[i] = row[at + i];
    }
    return four;
}

// One tile, from rows that begin at the k of this step: `rows` of them exist, with `depth` elements left. Threads take
// vectors of four, neighbours neighbouring ones.
template <typename T, uint ROWS, uint DEPTH, uint STRIDE, uint THREADS>
inline void load_tile(threadgroup T *tile, device const T *from, ulong row_stride, uint rows, uint depth, uint thread_index) {
    for (uint i = thread_index; i < ROWS * DEPTH / 4; i += THREADS) {
        const uint row = 4 * i / DEPTH;
        const uint at = 4 * i % DEPTH;
        *(threadgroup vec4<T> *)(tile + row * STRIDE + at) =
            row < rows ? load4(from + row * row_stride, at, depth) : vec4<T>(T(0));
    }
}

// Threadgroups in bands of `band` rows of tiles: within a band down its column of tiles, then to the next column. The
// threadgroups that run together so share few rows of W and few of X, and W comes from memory once a band.
struct Place {
    uint row;
    uint column;
};

inline Place place_of(constant GemProjection &p, uint where, uint tile_rows, uint tile_columns) {
    const uint row_tiles = (p.m + tile_rows - 1) / tile_rows;
    const uint column_tiles = (p.n + tile_columns - 1) / tile_columns;
    const uint band = where / (p.band * column_tiles);
    const uint inside = where % (p.band * column_tiles);
    const uint height = min(p.band, row_tiles - band * p.band);
    Place place;
    place.row = (band * p.band + inside % height) * tile_rows;
    place.column = inside / height * tile_columns;
    return place;
}

// A step: 64 bytes of a row of W, and as many elements of a row of X.
#define STEP_BYTES 64
// Rows lie this much further apart, so that the rows of a matrix begin in different banks.
#define PAD_BYTES 16

// Grid (tiles), 32 x SIMD_ROWS x SIMD_COLUMNS threads, threadgroup memory for ROWS padded rows of X and COLUMNS of W.
template <typename X, typename W, uint ROWS, uint COLUMNS, uint SIMD_ROWS, uint SIMD_COLUMNS>
[[kernel]] void projection(
    device const X *x [[buffer(0)]],
    device const W *w [[buffer(1)]],
    device float *y [[buffer(2)]],
    constant GemProjection &p [[buffer(3)]],
    threadgroup uchar *shared [[threadgroup(0)]],
    uint where [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]])
{
    constexpr uint THREADS = GEM_LANES * SIMD_ROWS * SIMD_COLUMNS;
    constexpr uint DEPTH = STEP_BYTES / sizeof(W);
    constexpr uint X_STRIDE = DEPTH + PAD_BYTES / sizeof(X);
    constexpr uint W_STRIDE = DEPTH + PAD_BYTES / sizeof(W);
    // 8 x 8 matrices of a SIMD group.
    constexpr uint DOWN = ROWS / SIMD_ROWS / 8;
    constexpr uint ACROSS = COLUMNS / SIMD_COLUMNS / 8;
    static_assert(8 * DOWN * SIMD_ROWS == ROWS && 8 * ACROSS * SIMD_COLUMNS == COLUMNS, "whole matrices");
    static_assert(64 * SIMD_ROWS * SIMD_COLUMNS * sizeof(float) <= ROWS * X_STRIDE * sizeof(X), "a matrix each, where X was");

    const Place tile = place_of(p, where, ROWS, COLUMNS);
    const uint own_row = 8 * DOWN * (simd / SIMD_COLUMNS);
    const uint own_column = 8 * ACROSS * (simd % SIMD_COLUMNS);
    device const X *x_rows = x + p.x.start + tile.row * p.x.row_stride;
    device const W *w_rows = w + p.w.start + tile.column * p.w.row_stride;
    threadgroup X *x_tile = (threadgroup X *)shared;
    threadgroup W *w_tile = (threadgroup W *)(x_tile + ROWS * X_STRIDE);

    simdgroup_float8x8 sum[DOWN][ACROSS];
    for (uint i = 0; i < DOWN; i++) {
        for (uint j = 0; j < ACROSS; j++) {
            sum[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
        }
    }

    for (uint k = 0; k < p.k; k += DEPTH) {
        load_tile<X, ROWS, DEPTH, X_STRIDE, THREADS>(x_tile, x_rows + k, p.x.row_stride, p.m - tile.row, p.k - k, thread_index);
        load_tile<W, COLUMNS, DEPTH, W_STRIDE, THREADS>(w_tile, w_rows + k, p.w.row_stride, p.n - tile.column, p.k - k, thread_index);
        // The tiles are whole before anyone reads them.
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint d = 0; d < DEPTH; d += 8) {
            simdgroup_matrix<X, 8, 8> left[DOWN];
            simdgroup_matrix<W, 8, 8> right[ACROSS];
            for (uint i = 0; i < DOWN; i++) {
                simdgroup_load(left[i], x_tile + (own_row + 8 * i) * X_STRIDE + d, X_STRIDE);
            }
            for (uint j = 0; j < ACROSS; j++) {
                simdgroup_load(right[j], w_tile + (own_column + 8 * j) * W_STRIDE + d, W_STRIDE, ulong2(0, 0), true);
            }
            for (uint i = 0; i < DOWN; i++) {
                for (uint j = 0; j < ACROSS; j++) {
                    simdgroup_multiply_accumulate(sum[i][j], left[i], right[j], sum[i][j]);
                }
            }
        }
        // Nobody loads the next tiles while somebody reads these; after the last step, nobody writes results there.
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }

    // Whole matrices go to Y from the registers. Those across the edge take the way through threadgroup memory, 64 floats
    // of the SIMD group's own, so that no element outside Y is written.
    threadgroup float *edge = (threadgroup float *)shared + 64 * simd;
    for (uint i = 0; i < DOWN; i++) {
        for (uint j = 0; j < ACROSS; j++) {
            const uint row = tile.row + own_row + 8 * i;
            const uint column = tile.column + own_column + 8 * j;
            if (row + 8 <= p.m && column + 8 <= p.n) {
                simdgroup_store(sum[i][j], y + ulong(row) * p.n + column, p.n);
            } else if (row < p.m && column < p.n) {
                simdgroup_store(sum[i][j], edge, 8);
                // The matrix is whole before lanes take elements of it.
                simdgroup_barrier(mem_flags::mem_threadgroup);
                for (uint e = lane; e < 64; e += GEM_LANES) {
                    if (row + e / 8 < p.m && column + e % 8 < p.n) {
                        y[ulong(row + e / 8) * p.n + column + e % 8] = edge[e];
                    }
                }
                // The next matrix waits for the last element of this one.
                simdgroup_barrier(mem_flags::mem_threadgroup);
            }
        }
    }
}

// Decode: a few rows of X. A SIMD group owns DECODE_COLUMNS columns of Y, of all rows, and streams their rows of W once;
// lane l holds elements 4 l .. 4 l + 3 of every 128. No threadgroup memory, no barrier: the rows of X are small, and come
// from the cache. Four neighbours are added in order, then the lanes; every step is an explicit fma, so that a row has the
// same bits in whatever company.
#define DECODE_SIMD_GROUPS 2
#define DECODE_COLUMNS 4

template <typename X, typename W, uint ROWS, uint COLUMNS>
inline void decode_columns(
    device const X *x, device const W *w, device float *y, constant GemProjection &p, uint first_column, uint lane)
{
    static_assert(ROWS * COLUMNS <= GEM_LANES, "a lane an element of the result");
    device const X *x_rows = x + p.x.start;
    device const W *w_rows = w + p.w.start + first_column * p.w.row_stride;
    float sum[ROWS][COLUMNS];
    for (uint r = 0; r < ROWS; r++) {
        for (uint c = 0; c < COLUMNS; c++) {
            sum[r][c] = 0;
        }
    }
    for (uint k = 4 * lane; k < p.k; k += 4 * GEM_LANES) {
        float4 weight[COLUMNS];
        for (uint c = 0; c < COLUMNS; c++) {
            weight[c] = float4(load4(w_rows + c * p.w.row_stride, k, p.k));
        }
        for (uint r = 0; r < ROWS; r++) {
            // Rows past m repeat the last one, and are dropped: cheaper than a branch.
            const float4 value = float4(load4(x_rows + min(r, p.m - 1) * p.x.row_stride, k, p.k));
            for (uint c = 0; c < COLUMNS; c++) {
                sum[r][c] = fma(value.x, weight[c].x, sum[r][c]);
                sum[r][c] = fma(value.y, weight[c].y, sum[r][c]);
                sum[r][c] = fma(value.z, weight[c].z, sum[r][c]);
                sum[r][c] = fma(value.w, weight[c].w, sum[r][c]);
            }
        }
    }
    float own = 0;
    for (uint r = 0; r < ROWS; r++) {
        for (uint c = 0; c < COLUMNS; c++) {
            const float total = simd_sum(sum[r][c]);
            own = lane == r * COLUMNS + c ? total : own;
        }
    }
    const uint row = lane / COLUMNS;
    if (row < ROWS && row < p.m) {
        y[ulong(row) * p.n + first_column + lane % COLUMNS] = own;
    }
}

// Grid (blocks of DECODE_SIMD_GROUPS x DECODE_COLUMNS columns), 32 x DECODE_SIMD_GROUPS threads; m <= ROWS.
template <typename X, typename W, uint ROWS>
[[kernel]] void projection_decode(
    device const X *x [[buffer(0)]],
    device const W *w [[buffer(1)]],
    device float *y [[buffer(2)]],
    constant GemProjection &p [[buffer(3)]],
    uint where [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]])
{
    const uint first = (where * DECODE_SIMD_GROUPS + simd) * DECODE_COLUMNS;
    if (first + DECODE_COLUMNS <= p.n) {
        decode_columns<X, W, ROWS, DECODE_COLUMNS>(x, w, y, p, first, lane);
    } else {
        for (uint column = first; column < p.n; column++) {
            decode_columns<X, W, ROWS, 1>(x, w, y, p, column, lane);
        }
    }
}

#define GEM_TILE(x, w, name, rows, columns, simd_rows, simd_columns)                                                   \
    template [[host_name("projection_" #name "_" #rows "x" #columns)]] [[kernel]] void                                 \
    projection<x, w, rows, columns, simd_rows, simd_columns>(                                                          \
        device const x *, device const w *, device float *, constant GemProjection &, threadgroup uchar *,            \
        uint, uint, uint, uint);

#define GEM_DECODE(x, w, name, rows)                                                                                   \
    template [[host_name("projection_" #name "_decode" #rows)]] [[kernel]] void projection_decode<x, w, rows>(         \
        device const x *, device const w *, device float *, constant GemProjection &, uint, uint, uint);

#define GEM_PROJECTION(x, w, name)                                                                                     \
    GEM_TILE(x, w, name, 32, 64, 1, 2)                                                                                 \
    GEM_TILE(x, w, name, 32, 128, 1, 2)                                                                                \
    GEM_TILE(x, w, name, 64, 64, 2, 2)                                                                                 \
    GEM_TILE(x, w, name, 64, 128, 2, 2)                                                                                \
    GEM_TILE(x, w, name, 128, 64, 2, 2)                                                                                \
    GEM_TILE(x, w, name, 128, 128, 2, 2)                                                                               \
    GEM_DECODE(x, w, name, 1)                                                                                          \
    GEM_DECODE(x, w, name, 2)                                                                                          \
    GEM_DECODE(x, w, name, 4)                                                                                          \
    GEM_DECODE(x, w, name, 8)

GEM_PROJECTION(float, float, f32)
GEM_PROJECTION(half, half, f16)
GEM_PROJECTION(bfloat, bfloat, bf16)
GEM_PROJECTION(float, half, f32_f16)
GEM_PROJECTION(float, bfloat, f32_bf16)
