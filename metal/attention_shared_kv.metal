// attention_d512_shared_kv: attention_d512 over values alone. Key t is turn(weight * value t), rebuilt here; the merge is that of
// attention_d512.metal.
//
// Ownership is as there: a threadgroup owns one (batch, KV head, partition) and a block of its query rows, each SIMD group
// HEADS of these rows, each lane the dimensions 128 j + 4 lane .. + 3 for j = 0..3 of them. The two dimensions of a pair,
// i and i + 256, are so always the same lane's.
//
//      device          threadgroup memory
//      V tile   --->   | tile: rows of V, for every dimension of the output                |
//      angles   --->   | strip: those dimensions of the keys that turn, f32, made once by  |  --->  every SIMD group
//                      | whoever loads them                                                |
//
// The dimensions that do not turn are weight * value, and the weight is in the query. So a token costs the device its 512
// values and a row of angles, and the angles are those of the other KV heads too.
//
// Without STAGE every SIMD group reads the device, and each lane turns its own pairs: the same operations, so the results agree
// bit for bit.

#include <metal_stdlib>
using namespace metal;
#include "gem.h"

template <typename T>
using vec4 = metal::vec<T, 4>;

// What a lane owns of a row.
struct Own {
    float4 part[4];
};

// Four pairs.
struct Pairs {
    float4 low;
    float4 high;
};

// Explicit multiply-adds: where a compiler may or may not contract, staged and direct keys could differ.
inline Pairs turn(float4 low, float4 high, float4 low_weight, float4 high_weight, device const float *cosines, uint pairs) {
    const float4 cosine = *(device const float4 *)cosines;
    const float4 sine = *(device const float4 *)(cosines + pairs);
    const float4 a = low * low_weight;
    const float4 b = high * high_weight;
    Pairs turned;
    turned.low = fma(a, cosine, -(b * sine));
    turned.high = fma(a, sine, b * cosine);
    return turned;
}

// A tile of values, and of what was rebuilt of their keys.
template <typename T, bool STAGE>
struct Tile {
    threadgroup const T *staged;
    threadgroup const float *strip;
    device const T *direct;
    ulong row_stride;
    device const float *angles;
    uint pairs;

    float4 value(uint row, uint dim) const {
        if (STAGE) {
            return float4(*(threadgroup const vec4<T> *)(staged + row * GEM_DIM + dim));
        }
        return float4(*(device const vec4<T> *)(direct + row * row_stride + dim));
    }

    // Of a lane's key, with the weight left to the query in what does not turn.
    Own key(uint row, uint lane, Own weight) const {
        Own key;
        for (uint j = 0; j < 2; j++) {
            const uint low = 128 * j + 4 * lane;
            if (STAGE && low < pairs) {
                key.part[j] = *(threadgroup const float4 *)(strip + row * 2 * pairs + low);
                key.part[j + 2] = *(threadgroup const float4 *)(strip + (row * 2 + 1) * pairs + low);
            } else {
                key.part[j] = value(row, low);
                key.part[j + 2] = value(row, low + GEM_DIM / 2);
                if (low < pairs) {
                    const Pairs turned = turn(
                        key.part[j], key.part[j + 2], weight.part[j], weight.part[j + 2], angles + row * 2 * pairs + low, pairs);
                    key.part[j] = turned.low;
                    key.part[j + 2] = turned.high;
                }
            }
        }
        return key;
    }
};

// First pass. Grid (partitions, batch * kv_heads, row blocks), 32 x (SIMD groups) threads; with STAGE, threadgroup memory for
// TILE strips of 2 x pairs floats and TILE rows of V in the storage type.
template <typename T, uint TILE, uint HEADS, bool STAGE>
[[kernel]] void attention_d512_shared_kv_partial(
    device const uchar *q [[buffer(0)]],
    device const T *v [[buffer(1)]],
    device const float *weights [[buffer(2)]],
    device const float *angles [[buffer(3)]],
    device float *maxima [[buffer(4)]],
    device float *denominators [[buffer(5)]],
    device float *numerators [[buffer(6)]],
    constant GemSharedKv &shared [[buffer(7)]],
    threadgroup float *memory [[threadgroup(0)]],
    uint3 where [[threadgroup_position_in_grid]],
    uint3 threads [[threads_per_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]])
{
    constant GemAttention &p = shared.attention;
    const uint pairs = shared.pairs;
    const uint partition = where.x;
    const uint batch = where.y / p.kv_heads;
    const uint kv_head = where.y % p.kv_heads;
    const uint simd_groups = threads.x / GEM_LANES;
    const uint rows = p.group * p.q_len;
    const uint first_row = (where.z * simd_groups + simd) * HEADS;

    const uint begin = min(partition * p.partition_len, p.kv_len);
    const uint end = min(begin + p.partition_len, p.kv_len);
    device const T *v_rows = v + gem_head(p.v, batch, kv_head);
    device const float *first_angles = angles + shared.angles;
    threadgroup float *strip = memory;
    threadgroup T *tile = (threadgroup T *)(memory + TILE * 2 * pairs);

    Own weight;
    for (uint j = 0; j < 4; j++) {
        device const float *own = weights + shared.weight + 128 * j + 4 * lane;
        weight.part[j] = float4(own[0], own[1], own[2], own[3]);
    }
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
            const bool turns = (128 * j + 4 * lane) % (GEM_DIM / 2) < pairs;
            const float4 row = owned ? gem_load4(q, p.q_type, own.element + 128 * j + 4 * lane) : float4(0);
            query[h][j] = turns ? row : row * weight.part[j];
            out[h][j] = float4(0);
        }
        max_score[h] = GEM_NO_MAX;
        denominator[h] = 0;
        sees[h] = owned ? own.sees : 0;
    }

    for (uint t0 = begin; t0 < end; t0 += TILE) {
        const uint count = min(TILE, end - t0);
        device const float *tile_angles = first_angles + ulong(t0) * 2 * pairs;
        if (STAGE) {
            // A SIMD group takes 128 pairs of a row at a time, each lane those whose weights it holds.
            for (uint i = simd; i < 2 * count; i += simd_groups) {
                const uint row = i / 2;
                const bool second = i % 2 == 1;
                const uint low = (second ? 128 : 0) + 4 * lane;
                device const T *from = v_rows + (t0 + row) * p.v.row_stride + low;
                const vec4<T> low_values = *(device const vec4<T> *)from;
                const vec4<T> high_values = *(device const vec4<T> *)(from + GEM_DIM / 2);
                *(threadgroup vec4<T> *)(tile + row * GEM_DIM + low) = low_values;
                *(threadgroup vec4<T> *)(tile + row * GEM_DIM + GEM_DIM / 2 + low) = high_values;
                if (low < pairs) {
                    const Pairs turned = turn(
                        float4(low_values),
                        float4(high_values),
                        second ? weight.part[1] : weight.part[0],
                        second ? weight.part[3] : weight.part[2],
                        tile_angles + row * 2 * pairs + low,
                        pairs);
                    *(threadgroup float4 *)(strip + row * 2 * pairs + low) = turned.low;
                    *(threadgroup float4 *)(strip + (row * 2 + 1) * pairs + low) = turned.high;
                }
            }
            // The tile is whole before anyone reads it.
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        const Tile<T, STAGE> kv = {tile, strip, v_rows + t0 * p.v.row_stride, p.v.row_stride, tile_angles, pairs};

        // Rows of the tile past `count` hold what an earlier tile left, or nothing: they are never read.
        float score[HEADS][TILE];
        for (uint t = 0; t < TILE; t++) {
            float partial[HEADS];
            for (uint h = 0; h < HEADS; h++) {
                partial[h] = 0;
            }
            if (t < count) {
                const Own key = kv.key(t, lane, weight);
                for (uint j = 0; j < 4; j++) {
                    for (uint h = 0; h < HEADS; h++) {
                        partial[h] += dot(query[h][j], key.part[j]);
                    }
                }
            }
            for (uint h = 0; h < HEADS; h++) {
                score[h][t] = simd_sum(partial[h]) * p.softmax_scale;
            }
        }
        // One new maximum and one rescale a tile, not a token. Hidden keys weigh 0 and do not raise the maximum.
        for (uint h = 0; h < HEADS; h++) {
            const uint seen = min(count, sees[h] > t0 ? sees[h] - t0 : 0);
            float new_max = max_score[h];
            for (uint t = 0; t < TILE; t++) {
                new_max = t < seen ? max(new_max, score[h][t]) : new_max;
            }
            const float rescale = exp(max_score[h] - new_max);
            float sum = 0;
            for (uint t = 0; t < TILE; t++) {
                score[h][t] = t < seen ? exp(score[h][t] - new_max) : 0;
                sum += score[h][t];
            }
            denominator[h] = denominator[h] * rescale + sum;
            max_score[h] = new_max;
            for (uint j = 0; j < 4; j++) {
                out[h][j] *= rescale;
            }
        }
        for (uint t = 0; t < count; t++) {
            for (uint j = 0; j < 4; j++) {
                const float4 value = kv.value(t, 128 * j + 4 * lane);
                for (uint h = 0; h < HEADS; h++) {
                    // A value that no key of this row leads to must not reach it, not even as 0 * NaN.
                    out[h][j] = sees[h] > t0 + t ? fma(float4(score[h][t]), value, out[h][j]) : out[h][j];
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
    template [[host_name("attention_d512_shared_kv_partial_" #name "_tile" #tile "_heads" #heads "_" #how)]] [[kernel]] \
    void attention_d512_shared_kv_partial<type, tile, heads, stage>(                                                   \
        device const uchar *, device const type *, device const float *, device const float *, device float *,        \
        device float *, device float *, constant GemSharedKv &, threadgroup float *, uint3, uint3, uint, uint);

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
