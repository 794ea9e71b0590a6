// attention_d512 on the matrix units: the first pass, for query rows that see every key (decode).
//
// The 8 query heads of a KV head are the 8 rows of a SIMD group's matrices. Ownership is by dimension: SIMD group g owns
// dimensions 64 g .. 64 g + 63 of q, K, V and the output, so that every K/V element goes from the device straight into the
// matrix registers of one SIMD group, once, and no tile is staged.
//
//      K^T (dims x 8 tokens)                  scores (8 rows x 8 tokens)             V (8 tokens x dims)
//      +-------- group 0 --------+            each group sums its 64 dims,           +-------- group 0 ..
//      +-------- group 1 --------+    --->    threadgroup memory adds the 8   --->   weights x V: each group
//      |          ...            |            parts, every group reads them,         its own 64 columns
//      +-------- group 7 --------+            and knows all 8 x 8 weights
//
// One threadgroup barrier a tile of 16 tokens: the parts of the scores are double buffered. The running maximum and
// denominator of row r live, in every SIMD group alike, in its lanes 4 r .. 4 r + 3. Rescaling the output by row is a
// product with a diagonal matrix, which needs no knowledge of how a matrix lies in registers. The price: 0 x NaN is NaN, so a row
// that is not finite (a NaN or infinity in q, K or V, or scores past the range of f32) takes the other rows of its block along.
//
// Tokens come in blocks of 8. The last block of a partition starts early enough to end with it, and weighs tokens that
// an earlier block has had with 0: nothing past the end of the cache is read. So `end >= 8` in every partition.

#include <metal_stdlib>
using namespace metal;
#include "gem.h"

#define ROWS 8
#define SIMD_GROUPS 8
#define SLICE (GEM_DIM / SIMD_GROUPS)      // dimensions of a SIMD group
#define FRAGMENTS (SLICE / 8)              // 8 x 8 matrices that cover them
#define BLOCKS 2                           // blocks of 8 tokens in a tile

// Threadgroup memory, in floats: q rows and, at the end, output rows use all of it; in between the scores and weights do.
#define PARTS (SIMD_GROUPS * BLOCKS * 64)                          // one of the two score buffers
#define WEIGHTS (2 * PARTS)                                        // then BLOCKS weight matrices and a diagonal one each
#define OWN_WEIGHTS ((BLOCKS + 1) * 64)
#define SHARED_FLOATS (ROWS * GEM_DIM)
static_assert(WEIGHTS + SIMD_GROUPS * OWN_WEIGHTS <= SHARED_FLOATS, "scores and weights fit where q was");

// Grid (partitions, batch * kv_heads, blocks of 8 query rows), 256 threads, SHARED_FLOATS of threadgroup memory.
template <typename T>
[[kernel]] void attention_d512_matrix(
    device const uchar *q [[buffer(0)]],
    device const T *k [[buffer(1)]],
    device const T *v [[buffer(2)]],
    device float *maxima [[buffer(3)]],
    device float *denominators [[buffer(4)]],
    device float *numerators [[buffer(5)]],
    constant GemAttention &p [[buffer(6)]],
    threadgroup float *shared [[threadgroup(0)]],
    uint3 where [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]])
{
    const uint partition = where.x;
    const uint batch = where.y / p.kv_heads;
    const uint kv_head = where.y % p.kv_heads;
    const uint rows = p.group * p.q_len;
    const uint first_row = where.z * ROWS;
    const uint begin = min(partition * p.partition_len, p.kv_len);
    const uint end = min(begin + p.partition_len, p.kv_len);
    const uint slice = SLICE * simd;
    device const T *k_slice = k + gem_head(p.k, batch, kv_head) + slice;
    device const T *v_slice = v + gem_head(p.v, batch, kv_head) + slice;

    // The block's query rows as f32. In place of rows that do not exist, which are dropped at the end, there is row 0: what it
    // meets, a row that is there meets too, so that nothing overflows on their account.
    for (uint i = thread_index; i < ROWS * GEM_DIM / 4; i += GEM_LANES * SIMD_GROUPS) {
        const uint dim = 4 * i % GEM_DIM;
        const uint row = first_row + 4 * i / GEM_DIM;
        const ulong element = gem_query(p, batch, kv_head, row < rows ? row : 0).element + dim;
        *(threadgroup float4 *)(shared + 4 * i) = gem_load4(q, p.q_type, element);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_float8x8 query[FRAGMENTS];
    simdgroup_float8x8 out[FRAGMENTS];
    for (uint j = 0; j < FRAGMENTS; j++) {
        simdgroup_load(query[j], shared + slice + 8 * j, GEM_DIM);
        out[j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    // Everybody has q before scores overwrite it.
    threadgroup_barrier(mem_flags::mem_threadgroup);

    const uint row = lane / 4;
    const uint column = 2 * (lane % 4);
    threadgroup float *weights = shared + WEIGHTS + simd * OWN_WEIGHTS;
    threadgroup float *diagonal = weights + BLOCKS * 64;
    float max_score = GEM_NO_MAX;
    float denominator = 0;
    uint parity = 0;

    for (uint t0 = begin; t0 < end; t0 += 8 * BLOCKS) {
        threadgroup float *parts = shared + parity * PARTS;
        parity = 1 - parity;
        for (uint b = 0; b < BLOCKS; b++) {
            const uint first = t0 + 8 * b;
            if (first < end) {
                const ulong at = min(first, end - 8) * p.k.row_stride;
                simdgroup_float8x8 score = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
                for (uint j = 0; j < FRAGMENTS; j++) {
                    simdgroup_matrix<T, 8, 8> key;
                    simdgroup_load(key, k_slice + at + 8 * j, p.k.row_stride, ulong2(0, 0), true);
                    simdgroup_multiply_accumulate(score, query[j], key, score);
                }
                simdgroup_store(score, parts + (simd * BLOCKS + b) * 64, 8);
            }
        }
        // The parts are whole. Whoever is a tile ahead writes the other buffer.
        threadgroup_barrier(mem_flags::mem_threadgroup);

        // Two columns of each block a lane: weight[2 b], weight[2 b + 1].
        float weight[2 * BLOCKS];
        float new_max = max_score;
        for (uint b = 0; b < BLOCKS; b++) {
            const uint first = t0 + 8 * b;
            const uint start = first < end ? min(first, end - 8) : first;
            for (uint c = 0; c < 2; c++) {
                const uint token = start + column + c;
                float score = GEM_NO_MAX;
                if (token >= first && token < end) {
                    score = 0;
                    for (uint g = 0; g < SIMD_GROUPS; g++) {
                        score += parts[(g * BLOCKS + b) * 64 + 8 * row + column + c];
                    }
                    score *= p.softmax_scale;
                    new_max = max(new_max, score);
                }
                weight[2 * b + c] = score;
            }
        }
        new_max = max(new_max, simd_shuffle_xor(new_max, 1));
        new_max = max(new_max, simd_shuffle_xor(new_max, 2));
        const float rescale = exp(max_score - new_max);
        float sum = 0;
        for (uint b = 0; b < BLOCKS; b++) {
            const uint first = t0 + 8 * b;
            const uint start = first < end ? min(first, end - 8) : first;
            for (uint c = 0; c < 2; c++) {
                const uint token = start + column + c;
                const bool seen = token >= first && token < end;
                weight[2 * b + c] = seen ? exp(weight[2 * b + c] - new_max) : 0;
                sum += weight[2 * b + c];
                weights[64 * b + 8 * row + column + c] = weight[2 * b + c];
            }
        }
        sum += simd_shuffle_xor(sum, 1);
        sum += simd_shuffle_xor(sum, 2);
        denominator = denominator * rescale + sum;
        max_score = new_max;
        for (uint c = 0; c < 2; c++) {
            diagonal[8 * row + column + c] = row == column + c ? rescale : 0;
        }
        // Weights and diagonal are the SIMD group's own.
        simdgroup_barrier(mem_flags::mem_threadgroup);
        // Asked so that a NaN, of which a minimum is not defined, answers yes.
        if (simd_max(rescale == 1 ? 0.0f : 1.0f) != 0) {
            simdgroup_float8x8 scale;
            simdgroup_load(scale, diagonal, 8);
            for (uint j = 0; j < FRAGMENTS; j++) {
                simdgroup_float8x8 scaled;
                simdgroup_multiply(scaled, scale, out[j]);
                out[j] = scaled;
            }
        }
        for (uint b = 0; b < BLOCKS; b++) {
            const uint first = t0 + 8 * b;
            if (first < end) {
                const ulong at = min(first, end - 8) * p.v.row_stride;
                simdgroup_float8x8 weight_block;
                simdgroup_load(weight_block, weights + 64 * b, 8);
                for (uint j = 0; j < FRAGMENTS; j++) {
                    simdgroup_matrix<T, 8, 8> value;
                    simdgroup_load(value, v_slice + at + 8 * j, p.v.row_stride);
                    simdgroup_multiply_accumulate(out[j], weight_block, value, out[j]);
                }
            }
        }
        // The next tile's threadgroup barrier keeps its weights from this tile's.
    }

    // Rows that do not exist must not be written, so the output takes the way through threadgroup memory.
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint j = 0; j < FRAGMENTS; j++) {
        simdgroup_store(out[j], shared + slice + 8 * j, GEM_DIM);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint r = 0; r < ROWS; r++) {
        if (first_row + r >= rows) {
            break;
        }
        const ulong at = partition * gem_rows(p) + gem_query(p, batch, kv_head, first_row + r).partial;
        for (uint dim = thread_index; dim < GEM_DIM; dim += GEM_LANES * SIMD_GROUPS) {
            numerators[at * GEM_DIM + dim] = shared[r * GEM_DIM + dim];
        }
        if (simd == 0 && lane == 4 * r) {
            maxima[at] = max_score;
            denominators[at] = denominator;
        }
    }
}

#define GEM_MATRIX(type, name)                                                                                         \
    template [[host_name("attention_d512_matrix_" #name)]] [[kernel]] void attention_d512_matrix<type>(                \
        device const uchar *, device const type *, device const type *, device float *, device float *,               \
        device float *, constant GemAttention &, threadgroup float *, uint3, uint, uint, uint);

GEM_MATRIX(float, f32)
GEM_MATRIX(half, f16)
GEM_MATRIX(bfloat, bf16)
