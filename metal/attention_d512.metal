// attention_d512: softmax(q k^T * softmax_scale) v in one pass over the cache: its first pass. The partial states
// that it leaves go to attention_states.metal.
//
// Ownership. A threadgroup owns one (batch, KV head, partition) and a block of its query rows. A query row is one query
// head of one query position, numbered position first, head second: row r is head r % group at position r / group. Each SIMD
// group owns HEADS of these rows from the first key to the last, and each lane owns 16 dimensions of them: 128 j + 4 lane
// .. + 3 for j = 0..3, so that a vector load of a SIMD group is one contiguous run.
//
//                    threadgroup (batch, KV head, partition)
//      device        +------------------------------------------+
//      K tile  --->  | tile (threadgroup memory), loaded once    |      lane l of any SIMD group holds, in registers,
//      V tile  --->  | by all threads, each row by 128 of them   |      of its row's q and o:
//                    |      |          |                 |       |      | 4l..4l+3 | 128+4l.. | 256+4l.. | 384+4l.. |
//                    |  SIMD group 0  group 1   ...   group 7    |
//                    |  rows 0..HEADS-1                          |  --> (max, denominator, numerator[512]) of each row
//                    +------------------------------------------+
//
// With STAGE the tile is read from device memory once and from threadgroup memory by every SIMD group: K/V bytes are issued to
// the device once, to threadgroup memory (SIMD groups) times. Without it every SIMD group reads the device and relies on the
// cache. Both sum in the same order, so their results agree bit for bit.

#include <metal_stdlib>
using namespace metal;
#include "gem.h"

template <typename T>
using vec4 = metal::vec<T, 4>;

// A row of a tile: in threadgroup memory where it was staged, else where it lies in the cache.
template <typename T, bool STAGE>
struct Tile {
    threadgroup const T *staged;
    device const T *direct;
    ulong row_stride;

    float4 load(uint row, uint dim) const {
        if (STAGE) {
            return float4(*(threadgroup const vec4<T> *)(staged + row * GEM_DIM + dim));
        }
        return float4(*(device const vec4<T> *)(direct + row * row_stride + dim));
    }
};

// First pass. Grid (partitions, batch * kv_heads, row blocks), 32 x (SIMD groups) threads; with STAGE, threadgroup memory
// for TILE rows of K and TILE rows of V in the storage type.
template <typename T, uint TILE, uint HEADS, bool STAGE>
[[kernel]] void attention_d512_partial(
    device const uchar *q [[buffer(0)]],
    device const T *k [[buffer(1)]],
    device const T *v [[buffer(2)]],
    device float *maxima [[buffer(3)]],
    device float *denominators [[buffer(4)]],
    device float *numerators [[buffer(5)]],
    constant GemAttention &p [[buffer(6)]],
    threadgroup T *tile [[threadgroup(0)]],
    uint3 where [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint3 threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]])
{
    const uint partition = where.x;
    const uint batch = where.y / p.kv_heads;
    const uint kv_head = where.y % p.kv_heads;
    const uint simd_groups = threads.x / GEM_LANES;
    const uint rows = p.group * p.q_len;
    const uint first_row = (where.z * simd_groups + simd) * HEADS;

    const uint begin = min(partition * p.partition_len, p.kv_len);
    const uint end = min(begin + p.partition_len, p.kv_len);
    device const T *k_rows = k + gem_head(p.k, batch, kv_head);
    device const T *v_rows = v + gem_head(p.v, batch, kv_head);

    // A SIMD group past the last row still loads its share of each tile and meets every barrier.
    float4 query[HEADS][4];
    float4 out[HEADS][4];
    float max_score[HEADS];
    float denominator[HEADS];
    uint sees[HEADS];
    for (uint h = 0; h < HEADS; h++) {
        const bool owned = first_row + h < rows;
        const GemQuery own = gem_query(p, batch, kv_head, owned ? first_row + h : 0);
        for (uint j = 0; j < 4; j++) {
            query[h][j] = owned ? gem_load4(q, p.q_type, own.element + 128 * j + 4 * lane) : float4(0);
            out[h][j] = float4(0);
        }
        max_score[h] = GEM_NO_MAX;
        denominator[h] = 0;
        sees[h] = owned ? own.sees : 0;
    }

    for (uint t0 = begin; t0 < end; t0 += TILE) {
        const uint count = min(TILE, end - t0);
        if (STAGE) {
            // Every thread takes vectors of four of the K rows, then of the V rows.
            for (uint i = thread_index; i < count * (GEM_DIM / 4); i += threads.x) {
                const uint row = i / (GEM_DIM / 4);
                const uint dim = 4 * (i % (GEM_DIM / 4));
                *(threadgroup vec4<T> *)(tile + row * GEM_DIM + dim) =
                    *(device const vec4<T> *)(k_rows + (t0 + row) * p.k.row_stride + dim);
                *(threadgroup vec4<T> *)(tile + (TILE + row) * GEM_DIM + dim) =
                    *(device const vec4<T> *)(v_rows + (t0 + row) * p.v.row_stride + dim);
            }
            // The tile is whole before anyone reads it.
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        const Tile<T, STAGE> keys = {tile, k_rows + t0 * p.k.row_stride, p.k.row_stride};
        const Tile<T, STAGE> values = {tile + TILE * GEM_DIM, v_rows + t0 * p.v.row_stride, p.v.row_stride};

        // Rows of the tile past `count` hold what an earlier tile left, or nothing: they are never read.
        float weight[HEADS][TILE];
        for (uint t = 0; t < TILE; t++) {
            float partial[HEADS];
            for (uint h = 0; h < HEADS; h++) {
                partial[h] = 0;
            }
            if (t < count) {
                for (uint j = 0; j < 4; j++) {
                    const float4 key = keys.load(t, 128 * j + 4 * lane);
                    for (uint h = 0; h < HEADS; h++) {
                        partial[h] += dot(query[h][j], key);
                    }
                }
            }
            for (uint h = 0; h < HEADS; h++) {
                weight[h][t] = simd_sum(partial[h]) * p.softmax_scale;
            }
        }
        // One new maximum and one rescale a tile, not a token. Hidden keys weigh 0 and do not raise the maximum.
        for (uint h = 0; h < HEADS; h++) {
            const uint seen = min(count, sees[h] > t0 ? sees[h] - t0 : 0);
            float new_max = max_score[h];
            for (uint t = 0; t < TILE; t++) {
                new_max = t < seen ? max(new_max, weight[h][t]) : new_max;
            }
            const float rescale = exp(max_score[h] - new_max);
            float sum = 0;
            for (uint t = 0; t < TILE; t++) {
                weight[h][t] = t < seen ? exp(weight[h][t] - new_max) : 0;
                sum += weight[h][t];
            }
            denominator[h] = denominator[h] * rescale + sum;
            max_score[h] = new_max;
            for (uint j = 0; j < 4; j++) {
                out[h][j] *= rescale;
            }
        }
        for (uint t = 0; t < count; t++) {
            for (uint j = 0; j < 4; j++) {
                const float4 value = values.load(t, 128 * j + 4 * lane);
                for (uint h = 0; h < HEADS; h++) {
                    // A value that no key of this row leads to must not reach it, not even as 0 * NaN.
                    out[h][j] = sees[h] > t0 + t ? fma(float4(weight[h][t]), value, out[h][j]) : out[h][j];
                }
            }
        }
        if (STAGE) {
            // Nobody overwrites the tile while somebody reads it.
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }

    // Every element of the partial buffers is written, empty partitions too: pool memory is not zeroed.
    for (uint h = 0; h < HEADS; h++) {
        if (first_row + h >= rows) {
            break;
        }
        const ulong at = partition * gem_rows(p) + gem_query(p, batch, kv_head, first_row + h).partial;
        if (lane == 0) {
            maxima[at] = max_score[h];
            denominators[at] = denominator[h];
        }
        for (uint j = 0; j < 4; j++) {
            *(device float4 *)(numerators + at * GEM_DIM + 128 * j + 4 * lane) = out[h][j];
        }
    }
}

#define GEM_PARTIAL(type, name, tile, heads, stage, how)                                                               \
    template [[host_name("attention_d512_partial_" #name "_tile" #tile "_heads" #heads "_" #how)]] [[kernel]] void     \
    attention_d512_partial<type, tile, heads, stage>(                                                                  \
        device const uchar *, device const type *, device const type *, device float *, device float *,               \
        device float *, constant GemAttention &, threadgroup type *, uint3, uint, uint3, uint, uint);

#define GEM_PARTIALS(type, name)                                                                                       \
    GEM_PARTIAL(type, name, 4, 1, true, staged)                                                                        \
    GEM_PARTIAL(type, name, 4, 1, false, direct)                                                                       \
    GEM_PARTIAL(type, name, 8, 1, true, staged)                                                                        \
    GEM_PARTIAL(type, name, 8, 1, false, direct)                                                                       \
    GEM_PARTIAL(type, name, 4, 2, true, staged)                                                                        \
    GEM_PARTIAL(type, name, 4, 2, false, direct)

GEM_PARTIALS(float, f32)
GEM_PARTIALS(half, f16)
GEM_PARTIALS(bfloat, bf16)
