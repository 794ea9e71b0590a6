// attention_d512, first pass, on the matrix units: for half types, q in the type of K and V, and query rows that see every key.
//
// Grid (partitions, batch * kv_heads, row blocks). A warp works on a tile of 16 tokens for 8 query rows and all 512 dimensions:
//
//      scores (16 tokens x 8 rows) = K (16 x 512) q^T          32 products of 16 x 16 by 16 x 8
//      out^T (512 x 8 rows)       += V^T (512 x 16) weights    32 products, twice: a weight is split into two halves
//
// so that a K or V element goes from shared memory to the registers of one warp once, for all 8 rows. Scores and out have their rows
// (columns of a product) in the same lanes: a lane that rescales needs no other. Weights become an operand by a transpose
// of 8 x 8 within the warp.
//
// Keys rebuilt from values: dimensions that do not turn have their weight in q, split into two halves. Those that turn are
// rotated in registers, since the elements of a pair lie in the same place of two fragments, and multiplied as
// tf32, split in two.

#include "mma.cuh"
#include "states.cuh"

#define TILE 16
#define ROWS 8                              // query rows of a warp
#define STEPS (GEM_DIM / 16)                // products over the dimensions

__device__ __forceinline__ void multiply_tf32(float (&sum)[4], float a0, float a1, float a2, float a3, uint b0, uint b1) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(__float_as_uint(a0)), "r"(__float_as_uint(a1)), "r"(__float_as_uint(a2)), "r"(__float_as_uint(a3)), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float tf32_part(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000); }

__device__ __forceinline__ uint transpose(uint a) {
    uint b;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(b) : "r"(a));
    return b;
}

// q as the second operand of the products, one fragment a step and lane. Of stored keys two words; of rebuilt ones two and what two
// halves leave of them, or, of steps whose dimensions turn, four f32.
template <bool REBUILT>
struct Fragment {
    typedef uint4 Type;
};
template <>
struct Fragment<false> {
    typedef uint2 Type;
};

// Shared memory before the stages: barriers, q of each warp of a team, the weight of the key norm, scales of rows.
#define FRAGMENT_BYTES(rebuilt) (STEPS * GEM_LANES * ((rebuilt) ? 16 : 8))
#define HEADER(team, rebuilt) (BARRIER_BYTES + (team) * FRAGMENT_BYTES(rebuilt) + GEM_DIM * 4 + (team) * 64)

// By which power of two each row of q is scaled, so that products with the weight stay in the range of f16.
template <typename T>
__device__ float row_scale(const T *row, const float *weight) {
    if (Half<T>::SCALE == 1) {
        return 1;
    }
    float most = 0;
    for (uint dim = threadIdx.x % GEM_LANES; dim < GEM_DIM; dim += GEM_LANES) {
        const float x = fabsf(to_float(row[dim]));
        most = fmaxf(most, fmaxf(x, x * fabsf(weight[dim])));
    }
    for (uint offset = 16; offset > 0; offset /= 2) {
        most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
    }
    return most > 0 && most < INFINITY ? scalbnf(1, max(-100, 10 - ilogbf(most))) : 1;
}

template <typename T, uint TEAM, bool REBUILT>
__device__ void first_pass(const uchar *q, const T *k, const T *v, float *maxima, float *denominators, float *numerators,
                           const GemAttention &p, const float *weights, const float *table, const GemSharedKv *rotary) {
    extern __shared__ __align__(128) uchar shared[];
    const uint lane = threadIdx.x % GEM_LANES;
    const uint warp = threadIdx.x / GEM_LANES;
    const uint warps = blockDim.x / GEM_LANES;
    const uint teams = warps / TEAM;
    const uint batch = blockIdx.y / p.kv_heads;
    const uint kv_head = blockIdx.y % p.kv_heads;
    const uint block_row = blockIdx.z * ROWS * TEAM;
    const uint rows = p.group * p.q_len;
    const uint begin = min(blockIdx.x * p.partition_len, p.kv_len);
    const uint end = min(begin + p.partition_len, p.kv_len);
    const uint tiles = (end - begin + TILE - 1) / TILE;
    const uint header = HEADER(TEAM, REBUILT);
    const uint pairs = REBUILT ? rotary->pairs : 0;
    // Rows of the table 32 bytes apart, modulo all banks.
    const uint angle_pitch = 8 * pairs + 32;
    const uint team = warp / TEAM;
    const uint member = warp % TEAM;
    Ring ring(shared, header, TILE * (REBUILT ? HALF_PITCH + angle_pitch : HALF_PITCH), team, teams);
    typedef typename Fragment<REBUILT>::Type Query;
    Query *const fragments = (Query *)(shared + BARRIER_BYTES);
    float *const weight = (float *)(shared + BARRIER_BYTES + TEAM * FRAGMENT_BYTES(REBUILT));
    float *const scales = weight + GEM_DIM;
    if (member == 0) {
        ring.init(TEAM);
    }
    if (REBUILT) {
        for (uint i = threadIdx.x; i < GEM_DIM; i += blockDim.x) {
            weight[i] = weights[rotary->weight + i];
        }
    }
    __syncthreads();

    // Keys and values take turns in the slots; rebuilt keys come with their values.
    const Rows tensors[2] = {
        REBUILT ? Rows(table, rotary->angles + begin * (2ul * pairs), 2 * pairs, 2 * pairs, 4, angle_pitch, TILE * HALF_PITCH, false)
                : Rows(k, gem_head(p.k, batch, kv_head) + begin * p.k.row_stride, p.k.row_stride, GEM_DIM, 2, HALF_PITCH, 0, true),
        Rows(v, gem_head(p.v, batch, kv_head) + begin * p.v.row_stride, p.v.row_stride, GEM_DIM, 2, HALF_PITCH, 0, true)};
    uint next = 0;      // item for the next free slot
    const auto fill = [&](uint slot) {
        const uint tile = team + (REBUILT ? next : next / 2) * teams;
        if (tile < tiles) {
            const uint first = tile * TILE;
            const uint count = min(TILE, end - begin - first);
            if (REBUILT) {
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
        if (member == 0) {
            ring.wait_until_free();
            fill(ring.slot);
        }
        ring.advance();
    };
    // The first tiles are on their way while q is prepared.
    for (uint slot = 0; member == 0 && slot < ring.slots; slot++) {
        fill(slot);
    }

    // Warps share out the rows of q; rows that do not exist are 0 and are dropped at the end.
    for (uint own = warp; own < ROWS * TEAM; own += warps) {
        const bool exists = block_row + own < rows;
        const T *row = (const T *)q + gem_query(p, batch, kv_head, exists ? block_row + own : 0).element;
        // Four lanes of a step have this row; all loads are on their way at once.
        T loaded[STEPS / 8][4];
#pragma unroll
        for (uint n = 0; n < STEPS / 8; n++) {
#pragma unroll
            for (uint e = 0; e < 4; e++) {
                loaded[n][e] = row[16 * (8 * n + lane / 4) + 2 * (lane % 4) + e % 2 + 8 * (e / 2)];
            }
        }
        const float scale = REBUILT ? row_scale<T>(row, weight) : 1;
        if (lane == 0) {
            scales[own] = 1 / scale;
        }
#pragma unroll
        for (uint n = 0; n < STEPS / 8; n++) {
            const uint step = 8 * n + lane / 4;
            const uint dim = 16 * step + 2 * (lane % 4);
            float x[4];
#pragma unroll
            for (uint e = 0; e < 4; e++) {
                x[e] = exists ? to_float(loaded[n][e]) * scale : 0;
            }
            uint4 fragment = make_uint4(0, 0, 0, 0);
            if (REBUILT && 16 * (step % (STEPS / 2)) < pairs) {
                fragment = make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
            } else {
                if (REBUILT) {
#pragma unroll
                    for (uint e = 0; e < 4; e++) {
                        x[e] *= weight[dim + e % 2 + 8 * (e / 2)];
                    }
                }
                fragment.x = Half<T>::pack(x[0], x[1]);
                fragment.y = Half<T>::pack(x[2], x[3]);
                if (REBUILT) {
                    const float2 first = Half<T>::unpack(fragment.x);
                    const float2 second = Half<T>::unpack(fragment.y);
                    fragment.z = Half<T>::pack(x[0] - first.x, x[1] - first.y);
                    fragment.w = Half<T>::pack(x[2] - second.x, x[3] - second.y);
                }
            }
            Query &at = fragments[(own / ROWS * STEPS + step) * GEM_LANES + own % ROWS * 4 + lane % 4];
            if constexpr (REBUILT) {
                at = fragment;
            } else {
                at = make_uint2(fragment.x, fragment.y);
            }
        }
    }
    __syncthreads();

    const Query *const query = fragments + member * STEPS * GEM_LANES + lane;
    // Of a product's rows, columns: lane has rows lane / 4 and that + 8, columns 2 (lane % 4) and that + 1.
    const uint column = 2 * (lane % 4);
    const float scale[2] = {p.softmax_scale * scales[member * ROWS + column], p.softmax_scale * scales[member * ROWS + column + 1]};
    const uint key_lane = lane % 16 * HALF_PITCH + lane / 16 * 16;
    const uint value_lane = (lane % 8 + lane / 16 * 8) * HALF_PITCH + lane / 8 % 2 * 16;
    float out[STEPS][4];
#pragma unroll
    for (uint d = 0; d < STEPS; d++) {
        out[d][0] = out[d][1] = out[d][2] = out[d][3] = 0;
    }
    float max_score[2] = {GEM_NO_MAX, GEM_NO_MAX};
    float denominator[2] = {0, 0};

    for (uint tile = team; tile < tiles; tile += teams) {
        const uint count = min(TILE, end - begin - tile * TILE);
        const uchar *at = ring.take();
        uint values = shared_address(at);
        float parts[4][4];
#pragma unroll
        for (uint i = 0; i < 4; i++) {
            parts[i][0] = parts[i][1] = parts[i][2] = parts[i][3] = 0;
        }
        if constexpr (REBUILT) {
            const uint turning = pairs / 16;
#pragma unroll 1
            for (uint step = 0; step < turning; step++) {
                uint x[4], y[4];
                load_matrices(x, values + key_lane + 32 * step);
                load_matrices(y, values + key_lane + 32 * (step + STEPS / 2));
                const uint4 qx = query[step * GEM_LANES];
                const uint4 qy = query[(step + STEPS / 2) * GEM_LANES];
                float2 kx[4], ky[4];
#pragma unroll
                for (uint r = 0; r < 4; r++) {
                    const uint pair = 16 * step + column + r / 2 * 8;
                    const float *angles = (const float *)(at + TILE * HALF_PITCH + (lane / 4 + r % 2 * 8) * angle_pitch) + pair;
                    const float2 c = *(const float2 *)angles;
                    const float2 s = *(const float2 *)(angles + pairs);
                    const float2 wx = *(const float2 *)(weight + pair);
                    const float2 wy = *(const float2 *)(weight + GEM_DIM / 2 + pair);
                    const float2 vx = Half<T>::unpack(x[r]);
                    const float2 vy = Half<T>::unpack(y[r]);
                    const float2 a = make_float2(wx.x * vx.x, wx.y * vx.y);
                    const float2 b = make_float2(wy.x * vy.x, wy.y * vy.y);
                    kx[r] = make_float2(a.x * c.x - b.x * s.x, a.y * c.y - b.y * s.y);
                    ky[r] = make_float2(a.x * s.x + b.x * c.x, a.y * s.y + b.y * c.y);
                }
#pragma unroll
                for (uint h = 0; h < 2; h++) {
                    // Columns 2 i and 2 i + 1 of eight are columns i and i + 4 of the product.
                    const float2 x0 = kx[2 * h], x1 = kx[2 * h + 1], y0 = ky[2 * h], y1 = ky[2 * h + 1];
                    const float2 hx0 = make_float2(tf32_part(x0.x), tf32_part(x0.y)), hx1 = make_float2(tf32_part(x1.x), tf32_part(x1.y));
                    const float2 hy0 = make_float2(tf32_part(y0.x), tf32_part(y0.y)), hy1 = make_float2(tf32_part(y1.x), tf32_part(y1.y));
                    const uint bx0 = h ? qx.z : qx.x, bx1 = h ? qx.w : qx.y, by0 = h ? qy.z : qy.x, by1 = h ? qy.w : qy.y;
                    multiply_tf32(parts[0], hx0.x, hx1.x, hx0.y, hx1.y, bx0, bx1);
                    multiply_tf32(parts[1], hy0.x, hy1.x, hy0.y, hy1.y, by0, by1);
                    multiply_tf32(parts[2], x0.x - hx0.x, x1.x - hx1.x, x0.y - hx0.y, x1.y - hx1.y, bx0, bx1);
                    multiply_tf32(parts[3], y0.x - hy0.x, y1.x - hy1.x, y0.y - hy0.y, y1.y - hy1.y, by0, by1);
                }
            }
#pragma unroll 2
            for (uint step = turning; step < STEPS / 2; step++) {
                uint x[4], y[4];
                load_matrices(x, values + key_lane + 32 * step);
                load_matrices(y, values + key_lane + 32 * (step + STEPS / 2));
                const uint4 qx = query[step * GEM_LANES];
                const uint4 qy = query[(step + STEPS / 2) * GEM_LANES];
                Half<T>::multiply(parts[0], x, qx.x, qx.y);
                Half<T>::multiply(parts[1], y, qy.x, qy.y);
                Half<T>::multiply(parts[2], x, qx.z, qx.w);
                Half<T>::multiply(parts[3], y, qy.z, qy.w);
            }
        } else {
            const uint keys = values + key_lane;
#pragma unroll
            for (uint step = 0; step < STEPS; step++) {
                uint a[4];
                load_matrices(a, keys + 32 * step);
                const uint2 b = query[step * GEM_LANES];
                Half<T>::multiply(parts[step % 4], a, b.x, b.y);
            }
            done();
        }

        // Element i: token lane / 4 + i / 2 * 8, row column + i % 2.
        float score[4];
        float new_max[2] = {max_score[0], max_score[1]};
        bool seen[2] = {lane / 4 < count, lane / 4 + 8 < count};
#pragma unroll
        for (uint i = 0; i < 4; i++) {
            score[i] = ((parts[0][i] + parts[1][i]) + (parts[2][i] + parts[3][i])) * scale[i % 2];
            // fmaxf passes over a NaN; the weight of its token does not.
            new_max[i % 2] = fmaxf(new_max[i % 2], seen[i / 2] ? score[i] : GEM_NO_MAX);
        }
#pragma unroll
        for (uint offset = 4; offset <= 16; offset *= 2) {
            new_max[0] = fmaxf(new_max[0], __shfl_xor_sync(~0u, new_max[0], offset));
            new_max[1] = fmaxf(new_max[1], __shfl_xor_sync(~0u, new_max[1], offset));
        }
        const float rescale[2] = {expf(max_score[0] - new_max[0]), expf(max_score[1] - new_max[1])};
        float weight_of[4];
#pragma unroll
        for (uint i = 0; i < 4; i++) {
            weight_of[i] = seen[i / 2] ? expf(score[i] - new_max[i % 2]) : 0;
        }
#pragma unroll
        for (uint c = 0; c < 2; c++) {
            denominator[c] = denominator[c] * rescale[c] + (weight_of[c] + weight_of[c + 2]);
            max_score[c] = new_max[c];
        }
        if (__any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) {
#pragma unroll
            for (uint d = 0; d < STEPS; d++) {
#pragma unroll
                for (uint i = 0; i < 4; i++) {
                    out[d][i] *= rescale[i % 2];
                }
            }
        }
        uint high[2], low[2];
#pragma unroll
        for (uint i = 0; i < 2; i++) {
            const float a = weight_of[2 * i] * Half<T>::SCALE;
            const float b = weight_of[2 * i + 1] * Half<T>::SCALE;
            const uint both = Half<T>::pack(a, b);
            const float2 rounded = Half<T>::unpack(both);
            high[i] = transpose(both);
            low[i] = transpose(Half<T>::pack(a - rounded.x, b - rounded.y));
        }
        if (!REBUILT) {
            values = shared_address(ring.take());
        }
#pragma unroll
        for (uint d = 0; d < STEPS; d += 2) {
            uint a[4], b[4];
            load_transposed(a, values + value_lane + 32 * d);
            load_transposed(b, values + value_lane + 32 * (d + 1));
            Half<T>::multiply(out[d], a, high[0], high[1]);
            Half<T>::multiply(out[d + 1], b, high[0], high[1]);
            Half<T>::multiply(out[d], a, low[0], low[1]);
            Half<T>::multiply(out[d + 1], b, low[0], low[1]);
        }
        done();
    }

#pragma unroll
    for (uint offset = 4; offset <= 16; offset *= 2) {
        denominator[0] += __shfl_xor_sync(~0u, denominator[0], offset);
        denominator[1] += __shfl_xor_sync(~0u, denominator[1], offset);
    }
    __syncthreads();
    const BlockStates<ROWS * TEAM> states(shared, header, teams);
    const uint row = member * ROWS + column;
    if (lane < 4) {
        states.max_score(team, row) = max_score[0];
        states.max_score(team, row + 1) = max_score[1];
        states.denominator(team, row) = denominator[0];
        states.denominator(team, row + 1) = denominator[1];
    }
#pragma unroll
    for (uint d = 0; d < STEPS; d++) {
#pragma unroll
        for (uint i = 0; i < 4; i++) {
            states.numerator(team, row + i % 2)[16 * d + lane / 4 + i / 2 * 8] = out[d][i] / Half<T>::SCALE;
        }
    }
    merge_block(states, p, batch, kv_head, block_row, maxima, denominators, numerators);
}

#define GEM_MATRIX(type, name, rows, team)                                                                              \
    extern "C" __global__ void __launch_bounds__(256, 1) attention_d512_matrix_##name##_rows##rows(                     \
        const uchar *q, const type *k, const type *v, float *maxima, float *denominators, float *numerators,            \
        const __grid_constant__ GemAttention p) {                                                                       \
        first_pass<type, team, false>(q, k, v, maxima, denominators, numerators, p, nullptr, nullptr, nullptr);         \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256, 1) attention_d512_shared_kv_matrix_##name##_rows##rows(           \
        const uchar *q, const type *v, const float *weights, const float *table, float *maxima, float *denominators,    \
        float *numerators, const __grid_constant__ GemSharedKv p) {          \
        first_pass<type, team, true>(q, nullptr, v, maxima, denominators, numerators, p.attention, weights, table, &p);      \
    }

GEM_MATRIX(half, f16, 8, 1)
GEM_MATRIX(half, f16, 16, 2)
GEM_MATRIX(bfloat, bf16, 8, 1)
GEM_MATRIX(bfloat, bf16, 16, 2)
