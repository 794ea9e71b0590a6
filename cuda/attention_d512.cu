// attention_d512, first pass: softmax(q k^T * softmax_scale) v of one partition in one read of its rows, on plain arithmetic units.
//
// Grid (partitions, batch * kv_heads, row blocks). A team of TEAM warps works on a tile of 8 tokens; each warp owns 4 query rows, each
// lane 16 dimensions of them: 128 j + 4 lane .. + 3. So every K/V byte is read from device memory once and from shared memory
// TEAM times. Scores of 4 rows x 8 tokens are summed over the lanes so that each lane ends with one of them.
//
// States go to the three buffers as those of metal/attention_d512.metal do.

#include "states.cuh"

#define TILE 8
#define ROWS 4      // query rows of a warp

// Adds up 2 * HALF values over the lanes; of 32 values, lane i ends with value i.
template <uint HALF>
__device__ __forceinline__ float sum_each(const float *values) {
    const bool upper = threadIdx.x & HALF;
    float kept[HALF];
#pragma unroll
    for (uint i = 0; i < HALF; i++) {
        const float keep = upper ? values[i + HALF] : values[i];
        const float send = upper ? values[i] : values[i + HALF];
        kept[i] = keep + __shfl_xor_sync(~0u, send, HALF);
    }
    if constexpr (HALF == 1) {
        return kept[0];
    } else {
        return sum_each<HALF / 2>(kept);
    }
}

template <typename T>
__device__ __forceinline__ float4 row4(const uchar *rows, uint row, uint dim) {
    return float4(*(const vec4<T> *)(rows + (row * GEM_DIM + dim) * sizeof(T)));
}
template <>
__device__ __forceinline__ float4 row4<float>(const uchar *rows, uint row, uint dim) {
    return *(const float4 *)(rows + (row * GEM_DIM + dim) * sizeof(float));
}

__device__ __forceinline__ float4 times(float4 a, float4 b) { return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w); }

__device__ __forceinline__ float dot(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// One tile of stored keys and values.
template <typename T>
struct Stored {
    static const bool REBUILT = false;
    static const uint ROW = GEM_DIM * sizeof(T);

    __device__ Stored(float4 (&)[ROWS][4], const GemAttention &, const float *, const GemSharedKv *) {}

    __device__ __forceinline__ void keys(const uchar *tile, uint t, uint lane, float4 (&key)[4]) const {
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            key[j] = row4<T>(tile, t, 128 * j + 4 * lane);
        }
    }
};

// One tile of values and of the rows of the rotary tables. Dimensions that do not turn have their weight in q.
// BLOCKS: of 128 pairs, that have angles.
template <typename T, uint BLOCKS>
struct Rebuilt {
    static const bool REBUILT = true;
    static const uint ROW = GEM_DIM * sizeof(T);

    float4 weight[2 * BLOCKS];
    uint pairs;

    __device__ Rebuilt(float4 (&q)[ROWS][4], const GemAttention &, const float *weights, const GemSharedKv *rotary) {
        const uint lane = threadIdx.x % GEM_LANES;
        pairs = rotary->pairs;
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            const float *from = weights + rotary->weight + 128 * j + 4 * lane;
            const float4 w = make_float4(from[0], from[1], from[2], from[3]);
            if (j % 2 < BLOCKS) {
                weight[j / 2 * BLOCKS + j % 2] = w;
            } else {
#pragma unroll
                for (uint h = 0; h < ROWS; h++) {
                    q[h][j] = times(q[h][j], w);
                }
            }
        }
    }

    __device__ __forceinline__ void keys(const uchar *tile, uint t, uint lane, float4 (&key)[4]) const {
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            key[j] = row4<T>(tile, t, 128 * j + 4 * lane);
        }
        const float *angles = (const float *)(tile + TILE * ROW) + t * 2 * pairs;
#pragma unroll
        for (uint j = 0; j < BLOCKS; j++) {
            const uint pair = 128 * j + 4 * lane;
            float4 c = make_float4(1, 1, 1, 1);
            float4 s = make_float4(0, 0, 0, 0);
            if (pair < pairs) {
                c = *(const float4 *)(angles + pair);
                s = *(const float4 *)(angles + pairs + pair);
            }
            const float4 a = times(weight[j], key[j]);
            const float4 b = times(weight[BLOCKS + j], key[j + 2]);
            key[j] = make_float4(a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y, a.z * c.z - b.z * s.z, a.w * c.w - b.w * s.w);
            key[j + 2] = make_float4(a.x * s.x + b.x * c.x, a.y * s.y + b.y * c.y, a.z * s.z + b.z * c.z, a.w * s.w + b.w * c.w);
        }
    }
};

// This lane's share of the warp's query rows, all loads on their way at once; 0 for rows that do not exist.
template <typename Q>
__device__ __forceinline__ void load_query(const Q *q, const GemAttention &p, uint batch, uint kv_head, uint first_row,
                                           float4 (&query)[ROWS][4]) {
    const uint rows = p.group * p.q_len;
    Q loaded[ROWS][16];
#pragma unroll
    for (uint h = 0; h < ROWS; h++) {
        const Q *row = q + gem_query(p, batch, kv_head, min(first_row + h, rows - 1)).element + 4 * (threadIdx.x % GEM_LANES);
#pragma unroll
        for (uint i = 0; i < 16; i++) {
            loaded[h][i] = row[128 * (i / 4) + i % 4];
        }
    }
#pragma unroll
    for (uint h = 0; h < ROWS; h++) {
        const bool kept = first_row + h < rows;
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            const Q *x = loaded[h] + 4 * j;
            query[h][j] = kept ? make_float4(to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3])) : make_float4(0, 0, 0, 0);
        }
    }
}

__device__ __forceinline__ void add(float4 &sum, float weight, float4 value) {
    sum.x = fmaf(weight, value.x, sum.x);
    sum.y = fmaf(weight, value.y, sum.y);
    sum.z = fmaf(weight, value.z, sum.z);
    sum.w = fmaf(weight, value.w, sum.w);
}

template <typename T>
__device__ __forceinline__ void add_value(const uchar *values, uint t, uint lane, const float *weights, float4 (&out)[ROWS][4]) {
    const float4 w = *(const float4 *)(weights + ROWS * t);
#pragma unroll
    for (uint j = 0; j < 4; j++) {
        const float4 value = row4<T>(values, t, 128 * j + 4 * lane);
        add(out[0][j], w.x, value);
        add(out[1][j], w.y, value);
        add(out[2][j], w.z, value);
        add(out[3][j], w.w, value);
    }
}

// Shared memory before the stages: barriers, then 32 weights a warp.
#define MOST_WARPS 16
#define HEADER (BARRIER_BYTES + MOST_WARPS * 32 * 4)

template <typename T, uint TEAM, typename Keys>
__device__ void first_pass(const uchar *q, const T *k, const T *v, float *maxima, float *denominators, float *numerators,
                           const GemAttention &p, const float *weights, const float *table, const GemSharedKv *rotary) {
    extern __shared__ __align__(128) uchar shared[];
    const uint lane = threadIdx.x % GEM_LANES;
    const uint warp = threadIdx.x / GEM_LANES;
    const uint teams = blockDim.x / (GEM_LANES * TEAM);
    const uint batch = blockIdx.y / p.kv_heads;
    const uint kv_head = blockIdx.y % p.kv_heads;
    const uint block_row = blockIdx.z * ROWS * TEAM;
    const uint begin = min(blockIdx.x * p.partition_len, p.kv_len);
    const uint end = min(begin + p.partition_len, p.kv_len);
    const uint tiles = (end - begin + TILE - 1) / TILE;
    const uint angles = Keys::REBUILT ? 2 * rotary->pairs : 0;
    const uint team = warp / TEAM;
    const bool fills = warp % TEAM == 0;
    Ring ring(shared, HEADER, TILE * (Keys::ROW + 4 * angles), team, teams);
    if (fills) {
        ring.init(TEAM);
    }
    __syncthreads();

    // Keys and values take turns in the slots; rebuilt keys come with their values.
    const Rows tensors[2] = {
        Keys::REBUILT
            ? Rows(table, rotary->angles + begin * (ulong)angles, angles, angles, 4, 4 * angles, TILE * Keys::ROW, false)
            : Rows(k, gem_head(p.k, batch, kv_head) + begin * p.k.row_stride, p.k.row_stride, GEM_DIM, sizeof(T), Keys::ROW, 0, false),
        Rows(v, gem_head(p.v, batch, kv_head) + begin * p.v.row_stride, p.v.row_stride, GEM_DIM, sizeof(T), Keys::ROW, 0, false)};
    uint next = 0;      // item for the next free slot
    const auto fill = [&](uint slot) {
        const uint tile = team + (Keys::REBUILT ? next : next / 2) * teams;
        if (tile < tiles) {
            const uint first = tile * TILE;
            const uint count = min(TILE, end - begin - first);
            if (Keys::REBUILT) {
                ring.fill<TILE, 2>(slot, tensors, first, count);
            } else {
                const Rows rows[1] = {next % 2 == 0 ? tensors[0] : tensors[1]};
                ring.fill<TILE, 1>(slot, rows, first, count);
            }
        }
        next++;
    };
    const auto done = [&]() {
        ring.give();
        if (fills) {
            ring.wait_until_free();
            fill(ring.slot);
        }
        ring.advance();
    };
    for (uint slot = 0; fills && slot < ring.slots; slot++) {
        fill(slot);
    }

    const uint first_row = block_row + warp % TEAM * ROWS;
    const uint rows = p.group * p.q_len;
    float4 query[ROWS][4];
    float4 out[ROWS][4];
    switch (p.q_type) {
    case GEM_F16: load_query((const half *)q, p, batch, kv_head, first_row, query); break;
    case GEM_BF16: load_query((const bfloat *)q, p, batch, kv_head, first_row, query); break;
    default: load_query((const float *)q, p, batch, kv_head, first_row, query);
    }
#pragma unroll
    for (uint h = 0; h < ROWS; h++) {
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            out[h][j] = make_float4(0, 0, 0, 0);
        }
    }
    const Keys keys(query, p, weights, rotary);
    // Lane 4 t + h has the score of token t for row h, and the state of row h as far as token t goes.
    const uint own_row = first_row + lane % ROWS;
    const uint sees = own_row < rows ? gem_query(p, batch, kv_head, own_row).sees : 0;
    // Rows that do not exist see every key: what comes of them is dropped, and no tile is ragged for them.
    const uint least = __reduce_min_sync(~0u, own_row < rows ? sees : p.kv_len);
    float max_score = GEM_NO_MAX;
    float denominator = 0;
    float *own_weights = (float *)(shared + BARRIER_BYTES) + 32 * warp;

    for (uint tile = team; tile < tiles; tile += teams) {
        const uint t0 = begin + tile * TILE;
        const uint count = min(TILE, end - t0);
        const uchar *at = ring.take();
        float scores[ROWS * TILE];
#pragma unroll
        for (uint t = 0; t < TILE; t++) {
            float4 key[4];
            keys.keys(at, t, lane, key);
#pragma unroll
            for (uint h = 0; h < ROWS; h++) {
                float sum = 0;
#pragma unroll
                for (uint j = 0; j < 4; j++) {
                    sum = dot(query[h][j], key[j], sum);
                }
                scores[ROWS * t + h] = sum;
            }
        }
        const float score = sum_each<16>(scores) * p.softmax_scale;
        // Not sooner: the compiler would put all loads before the barrier, all products after it, and keep a tile in registers.
        if (!Keys::REBUILT) {
            done();
        }
        const uint t = lane / ROWS;
        const bool seen = t < count && t0 + t < sees;
        float new_max = seen ? score : GEM_NO_MAX;
        // fmaxf passes over a NaN; the weight of its token does not.
        new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 4));
        new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 8));
        new_max = fmaxf(new_max, __shfl_xor_sync(~0u, new_max, 16));
        new_max = fmaxf(new_max, max_score);
        const float rescale = expf(max_score - new_max);
        const float weight = seen ? expf(score - new_max) : 0;
        denominator = denominator * rescale + weight;
        max_score = new_max;
        own_weights[lane] = weight;
        __syncwarp();
        if (__any_sync(~0u, rescale != 1)) {
#pragma unroll
            for (uint h = 0; h < ROWS; h++) {
                const float factor = __shfl_sync(~0u, rescale, h);
#pragma unroll
                for (uint j = 0; j < 4; j++) {
                    out[h][j] = times(out[h][j], make_float4(factor, factor, factor, factor));
                }
            }
        }
        if (!Keys::REBUILT) {
            at = ring.take();
        }
        if (count == TILE && t0 + TILE <= least) {
#pragma unroll 2
            for (uint t = 0; t < TILE; t++) {
                add_value<T>(at, t, lane, own_weights, out);
            }
        } else {
            for (uint t = 0; t < count; t++) {
                // A value that a row does not see must not reach it, not even as 0 * NaN.
                const uint see = __ballot_sync(~0u, t0 + t < sees);
#pragma unroll
                for (uint h = 0; h < ROWS; h++) {
                    if (see >> h & 1) {
                        const float w = own_weights[ROWS * t + h];
#pragma unroll
                        for (uint j = 0; j < 4; j++) {
                            add(out[h][j], w, row4<T>(at, t, 128 * j + 4 * lane));
                        }
                    }
                }
            }
        }
        done();
    }

    denominator += __shfl_xor_sync(~0u, denominator, 4);
    denominator += __shfl_xor_sync(~0u, denominator, 8);
    denominator += __shfl_xor_sync(~0u, denominator, 16);
    __syncthreads();
    const BlockStates<ROWS * TEAM> states(shared, HEADER, teams);
    const uint row = warp % TEAM * ROWS;
    if (lane < ROWS) {
        states.max_score(team, row + lane) = max_score;
        states.denominator(team, row + lane) = denominator;
    }
#pragma unroll
    for (uint h = 0; h < ROWS; h++) {
#pragma unroll
        for (uint j = 0; j < 4; j++) {
            *(float4 *)(states.numerator(team, row + h) + 128 * j + 4 * lane) = out[h][j];
        }
    }
    merge_block(states, p, batch, kv_head, block_row, maxima, denominators, numerators);
}

#define GEM_FIRST_PASS(type, name, rows, team)                                                                          \
    extern "C" __global__ void __launch_bounds__(256, 1) attention_d512_partial_##name##_rows##rows(                    \
        const uchar *q, const type *k, const type *v, float *maxima, float *denominators, float *numerators,            \
        const __grid_constant__ GemAttention p) {                                                                       \
        first_pass<type, team, Stored<type>>(q, k, v, maxima, denominators, numerators, p, nullptr, nullptr, nullptr);  \
    }

#define GEM_SHARED_KV(type, name, rows, team, blocks)                                                                   \
    extern "C" __global__ void __launch_bounds__(256, 1) attention_d512_shared_kv_partial_##name##_rows##rows##_blocks##blocks( \
        const uchar *q, const type *v, const float *weights, const float *table, float *maxima, float *denominators,    \
        float *numerators, const __grid_constant__ GemSharedKv p) {          \
        first_pass<type, team, Rebuilt<type, blocks>>(q, nullptr, v, maxima, denominators, numerators, p.attention, weights, table, &p); \
    }

#define GEM_ROWS(type, name, rows, team)                                                                                \
    GEM_FIRST_PASS(type, name, rows, team)                                                                              \
    GEM_SHARED_KV(type, name, rows, team, 1)                                                                            \
    GEM_SHARED_KV(type, name, rows, team, 2)

#define GEM_TYPES(rows, team)                                                                                           \
    GEM_ROWS(float, f32, rows, team)                                                                                    \
    GEM_ROWS(half, f16, rows, team)                                                                                     \
    GEM_ROWS(bfloat, bf16, rows, team)

GEM_TYPES(4, 1)
GEM_TYPES(8, 2)
GEM_TYPES(16, 4)
