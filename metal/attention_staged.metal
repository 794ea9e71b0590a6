// The unfused baseline: scores to memory, a softmax over them, values. What attention_d512 is measured against.
//
// Every K row is staged once for all query heads of its KV head, and every V element too; what this route pays for is the
// traffic of the scores, S bytes of them: 1 S written by the score pass, 5 S by the softmax (maximum: read; exponential:
// read, write; scale: read, write), 16 S read by the value pass, once for each of its 16 tiles of dimensions. 22 S in all.

#include <metal_stdlib>
using namespace metal;
#include "gem.h"

template <typename T>
using vec4 = metal::vec<T, 4>;

#define TILE 4                  // K rows staged together
#define TOKENS 64               // keys of a score threadgroup
#define ROWS 8                  // query rows of a threadgroup: one a SIMD group
#define DIMS 32                 // dimensions of a value tile: one a lane
#define VALUE_TOKENS 32         // V rows staged together
#define VALUE_PARTITIONS 16

// Grid (blocks of TOKENS keys, batch * kv_heads, row blocks), 256 threads, TILE K rows of threadgroup memory.
// Hidden keys score GEM_NO_MAX.
template <typename T>
[[kernel]] void attention_staged_scores(
    device const uchar *q [[buffer(0)]],
    device const T *k [[buffer(1)]],
    device float *scores [[buffer(2)]],
    constant GemAttention &p [[buffer(3)]],
    threadgroup T *tile [[threadgroup(0)]],
    uint3 where [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]])
{
    const uint batch = where.y / p.kv_heads;
    const uint kv_head = where.y % p.kv_heads;
    const uint row = where.z * ROWS + simd;
    const bool owned = row < p.group * p.q_len;
    const GemQuery own = gem_query(p, batch, kv_head, owned ? row : 0);
    const uint sees = owned ? own.sees : 0;
    const uint begin = where.x * TOKENS;
    const uint end = min(begin + TOKENS, p.kv_len);
    device const T *k_rows = k + gem_head(p.k, batch, kv_head);
    device float *score_row = scores + own.partial * p.kv_len;
    float4 query[4];
    for (uint j = 0; j < 4; j++) {
        query[j] = owned ? gem_load4(q, p.q_type, own.element + 128 * j + 4 * lane) : float4(0);
    }

    for (uint t0 = begin; t0 < end; t0 += TILE) {
        const uint count = min(uint(TILE), end - t0);
        for (uint i = thread_index; i < count * (GEM_DIM / 4); i += GEM_LANES * ROWS) {
            const uint staged = i / (GEM_DIM / 4);
            const uint dim = 4 * (i % (GEM_DIM / 4));
            *(threadgroup vec4<T> *)(tile + staged * GEM_DIM + dim) =
                *(device const vec4<T> *)(k_rows + (t0 + staged) * p.k.row_stride + dim);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint t = 0; t < count; t++) {
            float partial = 0;
            for (uint j = 0; j < 4; j++) {
                partial += dot(query[j], float4(*(threadgroup const vec4<T> *)(tile + t * GEM_DIM + 128 * j + 4 * lane)));
            }
            const float score = simd_sum(partial) * p.softmax_scale;
            if (owned && lane == 0) {
                score_row[t0 + t] = t0 + t < sees ? score : GEM_NO_MAX;
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

// Grid (query rows), 256 threads: scores of a row become weights that sum to 1.
[[kernel]] void attention_staged_softmax(
    device float *scores [[buffer(0)]],
    constant GemAttention &p [[buffer(1)]],
    threadgroup float *shared [[threadgroup(0)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]])
{
    device float *own = scores + ulong(row) * p.kv_len;
    const uint threads = GEM_LANES * ROWS;
    float row_max = GEM_NO_MAX;
    for (uint t = thread_index; t < p.kv_len; t += threads) {
        row_max = max(row_max, own[t]);
    }
    row_max = simd_max(row_max);
    if (lane == 0) {
        shared[simd] = row_max;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint g = 0; g < ROWS; g++) {
        row_max = max(row_max, shared[g]);
    }
    float sum = 0;
    for (uint t = thread_index; t < p.kv_len; t += threads) {
        const float score = own[t];
        const float weight = score == GEM_NO_MAX ? 0 : exp(score - row_max);
        own[t] = weight;
        sum += weight;
    }
    sum = simd_sum(sum);
    if (lane == 0) {
        shared[ROWS + simd] = sum;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sum = 0;
    for (uint g = 0; g < ROWS; g++) {
        sum += shared[ROWS + g];
    }
    for (uint t = thread_index; t < p.kv_len; t += threads) {
        own[t] /= sum;
    }
}

// Grid (16 tiles of dimensions, VALUE_PARTITIONS, batch * kv_heads * row blocks), 256 threads, VALUE_TOKENS x DIMS elements of
// threadgroup memory. Each lane owns a dimension, each SIMD group a query row.
template <typename T>
[[kernel]] void attention_staged_values(
    device const T *v [[buffer(0)]],
    device const float *scores [[buffer(1)]],
    device float *sums [[buffer(2)]],
    constant GemAttention &p [[buffer(3)]],
    threadgroup T *tile [[threadgroup(0)]],
    uint3 where [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]])
{
    const uint heads = p.batch * p.kv_heads;
    const uint batch = (where.z % heads) / p.kv_heads;
    const uint kv_head = where.z % p.kv_heads;
    const uint row = (where.z / heads) * ROWS + simd;
    const bool owned = row < p.group * p.q_len;
    const uint first_dim = where.x * DIMS;
    const uint size = (p.kv_len + VALUE_PARTITIONS - 1) / VALUE_PARTITIONS;
    const uint begin = min(where.y * size, p.kv_len);
    const uint end = min(begin + size, p.kv_len);
    const GemQuery own = gem_query(p, batch, kv_head, owned ? row : 0);
    const uint sees = owned ? own.sees : 0;
    device const float *weight_row = scores + own.partial * p.kv_len;
    device const T *v_rows = v + gem_head(p.v, batch, kv_head) + first_dim;
    float sum = 0;
    for (uint t0 = begin; t0 < end; t0 += VALUE_TOKENS) {
        const uint count = min(uint(VALUE_TOKENS), end - t0);
        for (uint i = thread_index; i < count * DIMS; i += GEM_LANES * ROWS) {
            tile[i] = v_rows[(t0 + i / DIMS) * p.v.row_stride + i % DIMS];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        // One read of each weight: a lane a token, then handed round.
        const float own_weight = owned && lane < count ? weight_row[t0 + lane] : 0;
        for (uint t = 0; t < count; t++) {
            const float weight = simd_shuffle(own_weight, ushort(t));
            sum = t0 + t < sees ? fma(weight, float(tile[t * DIMS + lane]), sum) : sum;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    if (owned) {
        sums[(where.y * gem_rows(p) + own.partial) * GEM_DIM + first_dim + lane] = sum;
    }
}

// Grid (query rows), 256 threads.
[[kernel]] void attention_staged_reduce(
    device const float *sums [[buffer(0)]],
    device uchar *out [[buffer(1)]],
    constant GemAttention &p [[buffer(2)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]])
{
    const ulong rows = gem_rows(p);
    for (uint dim = thread_index; dim < GEM_DIM; dim += threads) {
        float sum = 0;
        for (uint i = 0; i < VALUE_PARTITIONS; i++) {
            sum += sums[(i * rows + row) * GEM_DIM + dim];
        }
        gem_store(out, p.out_type, ulong(row) * GEM_DIM + dim, sum);
    }
}

#define GEM_STAGED(type, name)                                                                                         \
    template [[host_name("attention_staged_scores_" #name)]] [[kernel]] void attention_staged_scores<type>(            \
        device const uchar *, device const type *, device float *, constant GemAttention &, threadgroup type *,       \
        uint3, uint, uint, uint);                                                                                      \
    template [[host_name("attention_staged_values_" #name)]] [[kernel]] void attention_staged_values<type>(            \
        device const type *, device const float *, device float *, constant GemAttention &, threadgroup type *,       \
        uint3, uint, uint, uint);

GEM_STAGED(float, f32)
GEM_STAGED(half, f16)
GEM_STAGED(bfloat, bf16)
