// attention_d512, first pass, of many query rows on the matrix units: for half types and q in the type of K and V; causal rows too.
//
// Grid (partitions, batch * kv_heads, row blocks). Eight warps work on a tile of 32 tokens for 64 query rows:
//
//      scores (64 x 32) = q (64 x 512) K^T             a warp has 16 rows and 16 tokens
//      out (64 x 512)  += weights (64 x 32) V          a warp has 32 rows and 128 dimensions; a weight is split into two halves
//
// q stays in shared memory, out in registers. A row's scores are in two warps, its output in four: maxima, weights and what a new maximum
// does to the output go through shared memory. Rows of a block are neighbours in position, so a tile that no row sees is never read,
// and few tiles are seen by some rows only. Blocks of late rows have the most to do and begin first.
//
// Of one partition there is nothing to merge: the kernels called `whole` leave the output itself.
//
// Keys rebuilt from values are rounded to the type, as a cache of keys would hold them, once a tile for all rows.

#include "mma.cuh"
#include "states.cuh"

#define TILE 32
#define ROWS 64
#define WARPS 8
#define WEIGHT_PITCH (TILE * 2 + 16)        // bytes

// Shared memory before the slots: barriers, weights in two halves, maxima of two groups of tokens, one f32 more a row, q, rebuilt keys.
#define MAXIMA (BARRIER_BYTES + 2 * ROWS * WEIGHT_PITCH)
#define QUERY (MAXIMA + 3 * ROWS * 4)
#define KEYS (QUERY + ROWS * HALF_PITCH)
#define HEADER(rebuilt) (KEYS + ((rebuilt) ? TILE * HALF_PITCH : 0))

// The block's rows of q; zeros for rows that do not exist.
template <typename T>
__device__ void load_query(uchar *query, const T *q, const GemAttention &p, uint batch, uint kv_head, uint block_row) {
    const uint rows = p.group * p.q_len;
#pragma unroll 4
    for (uint i = threadIdx.x; i < ROWS * GEM_DIM / 8; i += WARPS * GEM_LANES) {
        const uint row = i / (GEM_DIM / 8);
        const uint dim = 8 * (i % (GEM_DIM / 8));
        uint4 eight = make_uint4(0, 0, 0, 0);
        if (block_row + row < rows) {
            const T *from = q + gem_query(p, batch, kv_head, block_row + row).element + dim;
            if ((ulong)from % 16 == 0) {
                eight = *(const uint4 *)from;
            } else {
#pragma unroll
                for (uint e = 0; e < 8; e++) {
                    ((T *)&eight)[e] = from[e];
                }
            }
        }
        *(uint4 *)(query + row * HALF_PITCH + 2 * dim) = eight;
    }
}

// keys = turn(weight * value), of a tile of values with its rows of the rotary tables behind it.
template <typename T>
__device__ void rebuild(uchar *keys, const uchar *values, const float *weight, uint pairs) {
    const uint dim = 4 * (threadIdx.x % (GEM_DIM / 8));
#pragma unroll 2
    for (uint t = threadIdx.x / (GEM_DIM / 8); t < TILE; t += WARPS * GEM_LANES / (GEM_DIM / 8)) {
        const float4 low = *(const vec4<T> *)(values + t * HALF_PITCH + 2 * dim);
        const float4 high = *(const vec4<T> *)(values + t * HALF_PITCH + 2 * dim + GEM_DIM);
        float a[4] = {low.x, low.y, low.z, low.w};
        float b[4] = {high.x, high.y, high.z, high.w};
        float4 cosine = make_float4(1, 1, 1, 1);
        float4 sine = make_float4(0, 0, 0, 0);
        if (dim < pairs) {
            const float *angles = (const float *)(values + TILE * HALF_PITCH) + t * 2 * pairs;
            cosine = *(const float4 *)(angles + dim);
            sine = *(const float4 *)(angles + pairs + dim);
        }
        const float c[4] = {cosine.x, cosine.y, cosine.z, cosine.w};
        const float s[4] = {sine.x, sine.y, sine.z, sine.w};
#pragma unroll
        for (uint e = 0; e < 4; e++) {
            const float x = a[e] * weight[dim + e];
            const float y = b[e] * weight[GEM_DIM / 2 + dim + e];
            a[e] = dim < pairs ? x * c[e] - y * s[e] : x;
            b[e] = dim < pairs ? x * s[e] + y * c[e] : y;
        }
        *(uint2 *)(keys + t * HALF_PITCH + 2 * dim) = make_uint2(Half<T>::pack(a[0], a[1]), Half<T>::pack(a[2], a[3]));
        *(uint2 *)(keys + t * HALF_PITCH + 2 * dim + GEM_DIM) = make_uint2(Half<T>::pack(b[0], b[1]), Half<T>::pack(b[2], b[3]));
    }
}

// Whether a value of this thread's share of the tile is not finite.
template <typename T>
__device__ bool not_finite(const uchar *values) {
    bool any = false;
    for (uint i = threadIdx.x; i < TILE * GEM_DIM / 2; i += WARPS * GEM_LANES) {
        const float2 two = Half<T>::unpack(*(const uint *)(values + i / (GEM_DIM / 2) * HALF_PITCH + 4 * (i % (GEM_DIM / 2))));
        any |= !(fabsf(two.x) < INFINITY) | !(fabsf(two.y) < INFINITY);
    }
    return any;
}

// Where the result goes: the states of a partition or, of all there is, the output.
template <typename T>
struct Result {
    float *maxima;
    float *denominators;
    float *numerators;
    T *out;
};

template <typename T, bool REBUILT, bool WHOLE>
__device__ void first_pass(const uchar *q, const T *k, const T *v, const Result<T> &result, const GemAttention &p,
                           const float *weights, const float *table, const GemSharedKv *rotary) {
    extern __shared__ __align__(128) uchar shared[];
    const uint lane = threadIdx.x % GEM_LANES;
    const uint warp = threadIdx.x / GEM_LANES;
    const uint batch = blockIdx.y / p.kv_heads;
    const uint kv_head = blockIdx.y % p.kv_heads;
    const uint block_row = (gridDim.z - 1 - blockIdx.z) * ROWS;
    const uint rows = p.group * p.q_len;
    const uint begin = min(blockIdx.x * p.partition_len, p.kv_len);
    // Keys of the partition that a row sees; a row that does not exist sees those of the last one.
    const auto seen_by = [&](uint row) {
        const uint sees = gem_query(p, batch, kv_head, min(block_row + row, rows - 1)).sees;
        return sees > begin ? min(sees - begin, p.partition_len) : 0;
    };
    const uint least = seen_by(0);
    const uint most = min(seen_by(ROWS - 1), p.kv_len - begin);
    const uint tiles = (most + TILE - 1) / TILE;
    const uint pairs = REBUILT ? rotary->pairs : 0;
    Ring ring(shared, HEADER(REBUILT), TILE * (HALF_PITCH + 8 * pairs), 0, 1);
    if (warp == 0) {
        ring.init(WARPS);
    }
    __syncthreads();

    // Keys and values take turns in the slots; rebuilt keys come with their values.
    const Rows tensors[2] = {
        REBUILT ? Rows(table, rotary->angles + begin * (2ul * pairs), 2 * pairs, 2 * pairs, 4, 8 * pairs, TILE * HALF_PITCH, false)
                : Rows(k, gem_head(p.k, batch, kv_head) + begin * p.k.row_stride, p.k.row_stride, GEM_DIM, 2, HALF_PITCH, 0, true),
        Rows(v, gem_head(p.v, batch, kv_head) + begin * p.v.row_stride, p.v.row_stride, GEM_DIM, 2, HALF_PITCH, 0, true)};
    uint next = 0;      // item for the next free slot
    const auto fill = [&](uint slot) {
        const uint tile = REBUILT ? next : next / 2;
        if (tile < tiles) {
            const uint first = tile * TILE;
            const uint count = min(TILE, most - first);
            if (REBUILT) {
                ring.fill<TILE, 2>(slot, tensors, first, count);
            } else {
                const Rows one[1] = {next % 2 == 0 ? tensors[0] : tensors[1]};
                ring.fill<TILE, 1>(slot, one, first, count);
            }
        }
        next++;
    };
    const auto done = [&]() {
        ring.give();
        if (warp == 0) {
            ring.wait_until_free();
            fill(ring.slot);
        }
        ring.advance();
    };
    for (uint slot = 0; warp == 0 && slot < ring.slots; slot++) {
        fill(slot);
    }
    load_query<T>(shared + QUERY, (const T *)q, p, batch, kv_head, block_row);
    __syncthreads();

    uchar *const high = shared + BARRIER_BYTES;
    uchar *const low = high + ROWS * WEIGHT_PITCH;
    float *const tile_maxima = (float *)(shared + MAXIMA);
    float *const rescales = tile_maxima + 2 * ROWS;
    // Of a product's result: a lane has rows lane / 4 and that + 8, columns 2 (lane % 4) and that + 1.
    const uint column = 2 * (lane % 4);
    // Scores: this warp's rows and tokens.
    const uint score_row = warp / 2 * 16 + lane / 4;
    const uint tokens = warp % 2 * 16;
    const uint query_at = shared_address(shared) + QUERY + (warp / 2 * 16 + lane % 16) * HALF_PITCH + lane / 16 * 16;
    const uint key_lane = (tokens + lane % 8 + lane / 16 * 8) * HALF_PITCH + lane / 8 % 2 * 16;
    const uint seen[2] = {min(seen_by(score_row), most), min(seen_by(score_row + 8), most)};
    float max_score[2] = {GEM_NO_MAX, GEM_NO_MAX};
    float denominator[2] = {0, 0};
    // Output: rows 16 m + 8 h + lane / 4 of 32, and 128 dimensions.
    const uint out_row = warp / 4 * 32 + lane / 4;
    const uint out_dim = warp % 4 * 128;
    const uint weight_lane = (warp / 4 * 32 + lane % 16) * WEIGHT_PITCH + lane / 16 * 16;
    const uint value_lane = lane % 16 * HALF_PITCH + lane / 16 * 16 + 2 * out_dim;
    float out[2][16][4];
#pragma unroll
    for (uint m = 0; m < 2; m++) {
#pragma unroll
        for (uint n = 0; n < 16; n++) {
            out[m][n][0] = out[m][n][1] = out[m][n][2] = out[m][n][3] = 0;
        }
    }

    for (uint tile = 0; tile < tiles; tile++) {
        const uint first = tile * TILE;
        const uchar *values = ring.take();
        uint keys = shared_address(values);
        if (REBUILT) {
            rebuild<T>(shared + KEYS, values, weights + rotary->weight, pairs);
            __syncthreads();
            keys = shared_address(shared) + KEYS;
        }
        // Even and odd steps apart: two chains of products.
        float parts[2][2][4] = {};
#pragma unroll 8
        for (uint step = 0; step < GEM_DIM / 16; step++) {
            uint a[4], b[4];
            load_matrices(a, query_at + 32 * step);
            load_matrices(b, keys + key_lane + 32 * step);
            Half<T>::multiply(parts[step % 2][0], a, b[0], b[1]);
            Half<T>::multiply(parts[step % 2][1], a, b[2], b[3]);
        }
        if (!REBUILT) {
            done();
        }

        float score[2][4];
        bool counts[2][4];
        float most_of[2] = {GEM_NO_MAX, GEM_NO_MAX};
#pragma unroll
        for (uint n = 0; n < 2; n++) {
#pragma unroll
            for (uint i = 0; i < 4; i++) {
                score[n][i] = (parts[0][n][i] + parts[1][n][i]) * p.softmax_scale;
                counts[n][i] = first + tokens + 8 * n + column + i % 2 < seen[i / 2];
                // fmaxf passes over a NaN; the weight of its token does not.
                most_of[i / 2] = fmaxf(most_of[i / 2], counts[n][i] ? score[n][i] : GEM_NO_MAX);
            }
        }
#pragma unroll
        for (uint h = 0; h < 2; h++) {
            most_of[h] = fmaxf(most_of[h], __shfl_xor_sync(~0u, most_of[h], 1));
            most_of[h] = fmaxf(most_of[h], __shfl_xor_sync(~0u, most_of[h], 2));
            if (lane % 4 == 0) {
                tile_maxima[warp % 2 * ROWS + score_row + 8 * h] = most_of[h];
            }
        }
        __syncthreads();
#pragma unroll
        for (uint h = 0; h < 2; h++) {
            const uint row = score_row + 8 * h;
            const float new_max = fmaxf(max_score[h], fmaxf(tile_maxima[row], tile_maxima[ROWS + row]));
            const float rescale = expf(max_score[h] - new_max);
            if (warp % 2 == 0 && lane % 4 == 0) {
                rescales[row] = rescale;
            }
            denominator[h] *= rescale;
            max_score[h] = new_max;
#pragma unroll
            for (uint n = 0; n < 2; n++) {
                const float a = counts[n][2 * h] ? expf(score[n][2 * h] - new_max) : 0;
                const float b = counts[n][2 * h + 1] ? expf(score[n][2 * h + 1] - new_max) : 0;
                denominator[h] += a + b;
                const uint both = Half<T>::pack(a * Half<T>::SCALE, b * Half<T>::SCALE);
                const float2 rounded = Half<T>::unpack(both);
                const uint at = row * WEIGHT_PITCH + 2 * (tokens + 8 * n + column);
                *(uint *)(high + at) = both;
                *(uint *)(low + at) = Half<T>::pack(a * Half<T>::SCALE - rounded.x, b * Half<T>::SCALE - rounded.y);
            }
        }
        __syncthreads();
        float rescale[2][2];
        bool any = false;
#pragma unroll
        for (uint m = 0; m < 2; m++) {
#pragma unroll
            for (uint h = 0; h < 2; h++) {
                rescale[m][h] = rescales[out_row + 16 * m + 8 * h];
                any |= rescale[m][h] != 1;
            }
        }
        if (__any_sync(~0u, any)) {
#pragma unroll
            for (uint m = 0; m < 2; m++) {
#pragma unroll
                for (uint n = 0; n < 16; n++) {
#pragma unroll
                    for (uint i = 0; i < 4; i++) {
                        out[m][n][i] *= rescale[m][i / 2];
                    }
                }
            }
        }
        if (!REBUILT) {
            values = ring.take();
        }
        // A weight of 0 times a value that is not finite would be NaN: such a value must not reach rows that do not see it.
        if (first + TILE > least && __syncthreads_or(not_finite<T>(values))) {
            const uint count = min(TILE, most - first);
            for (uint t = 0; t < count; t++) {
#pragma unroll
                for (uint m = 0; m < 2; m++) {
#pragma unroll
                    for (uint h = 0; h < 2; h++) {
                        const uint row = out_row + 16 * m + 8 * h;
                        if (first + t < seen_by(row)) {
                            const uint at = row * WEIGHT_PITCH + 2 * t;
                            const float weight = to_float(*(const T *)(high + at)) + to_float(*(const T *)(low + at));
#pragma unroll
                            for (uint n = 0; n < 16; n++) {
                                const uint two = *(const uint *)(values + t * HALF_PITCH + 2 * (out_dim + 8 * n + column));
                                const float2 value = Half<T>::unpack(two);
                                out[m][n][2 * h] = fmaf(weight, value.x, out[m][n][2 * h]);
                                out[m][n][2 * h + 1] = fmaf(weight, value.y, out[m][n][2 * h + 1]);
                            }
                        }
                    }
                }
            }
        } else {
            const uint values_at = shared_address(values) + value_lane;
#pragma unroll
            for (uint step = 0; step < TILE / 16; step++) {
                uint a[2][2][4];        // by half of the weight, then by 16 rows
#pragma unroll
                for (uint m = 0; m < 2; m++) {
                    const uint at = weight_lane + 16 * m * WEIGHT_PITCH + 32 * step;
                    load_matrices(a[0][m], shared_address(high) + at);
                    load_matrices(a[1][m], shared_address(low) + at);
                }
#pragma unroll
                for (uint n = 0; n < 8; n++) {
                    uint b[4];
                    load_transposed(b, values_at + 16 * step * HALF_PITCH + 32 * n);
#pragma unroll
                    for (uint part = 0; part < 2; part++) {
#pragma unroll
                        for (uint m = 0; m < 2; m++) {
                            Half<T>::multiply(out[m][2 * n], a[part][m], b[0], b[1]);
                            Half<T>::multiply(out[m][2 * n + 1], a[part][m], b[2], b[3]);
                        }
                    }
                }
            }
        }
        done();
    }

    // The two warps of a row have a denominator each. Nobody reads the maxima of a tile any more, but the rescales of the last.
#pragma unroll
    for (uint h = 0; h < 2; h++) {
        denominator[h] += __shfl_xor_sync(~0u, denominator[h], 1);
        denominator[h] += __shfl_xor_sync(~0u, denominator[h], 2);
        if (lane % 4 == 0) {
            tile_maxima[warp % 2 * ROWS + score_row + 8 * h] = denominator[h];
        }
    }
    __syncthreads();
    const ulong states = WHOLE ? 0 : blockIdx.x * gem_rows(p);
#pragma unroll
    for (uint h = 0; h < 2; h++) {
        const uint row = score_row + 8 * h;
        if (!WHOLE && warp % 2 == 0 && lane % 4 == 0 && block_row + row < rows) {
            const ulong at = states + gem_query(p, batch, kv_head, block_row + row).partial;
            result.maxima[at] = max_score[h];
            result.denominators[at] = tile_maxima[row] + tile_maxima[ROWS + row];
        }
    }
#pragma unroll
    for (uint m = 0; m < 2; m++) {
#pragma unroll
        for (uint h = 0; h < 2; h++) {
            const uint row = out_row + 16 * m + 8 * h;
            if (block_row + row < rows) {
                const ulong at = (states + gem_query(p, batch, kv_head, block_row + row).partial) * GEM_DIM + out_dim + column;
                const float sum = tile_maxima[row] + tile_maxima[ROWS + row];
                // A row whose keys all scored -inf has no value.
                const float divisor = sum == 0 ? NAN : sum;
#pragma unroll
                for (uint n = 0; n < 16; n++) {
                    const float a = out[m][n][2 * h] / Half<T>::SCALE;
                    const float b = out[m][n][2 * h + 1] / Half<T>::SCALE;
                    if (WHOLE) {
                        *(uint *)(result.out + at + 8 * n) = Half<T>::pack(a / divisor, b / divisor);
                    } else {
                        *(float2 *)(result.numerators + at + 8 * n) = make_float2(a, b);
                    }
                }
            }
        }
    }
}

#define GEM_TILED(type, name)                                                                                           \
    extern "C" __global__ void __launch_bounds__(256, 1) attention_d512_tiled_##name(                                   \
        const uchar *q, const type *k, const type *v, float *maxima, float *denominators, float *numerators,            \
        const __grid_constant__ GemAttention p) {                                                                       \
        first_pass<type, false, false>(q, k, v, {maxima, denominators, numerators, nullptr}, p, nullptr, nullptr, nullptr); \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256, 1) attention_d512_tiled_##name##_whole(                           \
        const uchar *q, const type *k, const type *v, type *out, const __grid_constant__ GemAttention p) {              \
        first_pass<type, false, true>(q, k, v, {nullptr, nullptr, nullptr, out}, p, nullptr, nullptr, nullptr);         \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256, 1) attention_d512_shared_kv_tiled_##name(                         \
        const uchar *q, const type *v, const float *weights, const float *table, float *maxima, float *denominators,    \
        float *numerators, const __grid_constant__ GemSharedKv p) {                                                     \
        first_pass<type, true, false>(q, nullptr, v, {maxima, denominators, numerators, nullptr}, p.attention, weights, table, &p); \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256, 1) attention_d512_shared_kv_tiled_##name##_whole(                 \
        const uchar *q, const type *v, const float *weights, const float *table, type *out,                             \
        const __grid_constant__ GemSharedKv p) {                                                                        \
        first_pass<type, true, true>(q, nullptr, v, {nullptr, nullptr, nullptr, out}, p.attention, weights, table, &p); \
    }

GEM_TILED(half, f16)
GEM_TILED(bfloat, bf16)
