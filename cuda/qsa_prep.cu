// qsa_prep: norms, RoPE, 8-bit keys and values and pooled indexer keys of a chunk, in one launch; as metal/qsa_prep.metal, which says
// who owns what, with warps for SIMD groups. Every sum has the order of the CPU, every product that is added is an explicit fma, and
// divisions and roots are rounded as IEEE 754 says: the same bits.

#include "gem.cuh"

template <typename T>
__device__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float(float x) {
    return x;
}
template <>
__device__ __forceinline__ half from_float(float x) {
    return __float2half_rn(x);
}

#define DIM 256                 // of a head
#define INDEX_DIM 128           // of a head of the indexer
#define HEADS 24
#define KV_HEADS 2
#define INDEX_HEADS 4
#define Q_HEAD_ROWS 512         // query and gate
#define ROPE_DIM 64
#define BLOCK 4                 // tokens that share a pooled key
#define GROUP 64                // dimensions that share a scale
#define WARPS 8

// Where the norm weights lie in their buffer.
#define NORM_Q 0
#define NORM_K 256
#define NORM_IQ 512
#define NORM_IK 640

// By halves of the lanes; every lane gets the sum.
__device__ __forceinline__ float qsa_sum(float x) {
    for (uint offset = GEM_LANES / 2; offset > 0; offset /= 2) {
        x += __shfl_xor_sync(~0u, x, offset);
    }
    return x;
}

// x / sqrt(mean(x^2) + 1e-6) * weight, for N elements a lane.
template <uint N>
__device__ __forceinline__ void qsa_norm(float *x, const float *weight, uint lane) {
    float squares = 0;
    for (uint j = 0; j < N; j++) {
        squares = fmaf(x[j], x[j], squares);
    }
    // The length is a power of two: dividing by it does not round. An infinity, or squares past f32, would make the others 0: no
    // row has such a norm.
    const float sum = qsa_sum(squares);
    const float root = isfinite(sum) ? sqrtf(sum / float(GEM_LANES * N) + 1e-6f) : NAN;
    for (uint j = 0; j < N; j++) {
        x[j] = x[j] / root * weight[GEM_LANES * j + lane];
    }
}

// Turns pair (lane, lane + 32) by the angles of a position: 32 cosines, 32 sines.
__device__ __forceinline__ void qsa_rotate(float *x, const float *angles, uint lane) {
    const float cosine = angles[lane];
    const float sine = angles[ROPE_DIM / 2 + lane];
    const float first = x[0];
    const float second = x[1];
    x[0] = fmaf(first, cosine, -(second * sine));
    x[1] = fmaf(first, sine, second * cosine);
}

// A head of DIM in codes of 8 bits. Magnitudes are compared as integers, which sorts infinity and NaN behind every number.
__device__ __forceinline__ void qsa_quantize(const float *x, uchar *codes, half *scales, uint lane) {
    for (uint g = 0; g < DIM / GROUP; g++) {
        const uint own = max(__float_as_uint(x[2 * g]) & 0x7fffffff, __float_as_uint(x[2 * g + 1]) & 0x7fffffff);
        const half scale = __float2half_rn(__uint_as_float(__reduce_max_sync(~0u, own)) / 127.0f);
        // Infinity, NaN and what passes f16: all exponent bits are set.
        const bool usable = (__half_as_ushort(scale) & 0x7c00) != 0x7c00;
        const float wide = to_float(scale);
        for (uint j = 2 * g; j < 2 * g + 2; j++) {
            float code = 0;
            if (usable && wide != 0) {
                code = fminf(fmaxf(rintf(x[j] / wide), -127.0f), 127.0f);
            }
            codes[GEM_LANES * j + lane] = (uchar)(signed char)code;
        }
        if (lane == 0) {
            scales[g] = usable ? scale : __ushort_as_half(0x7e00);
        }
    }
}

// The ik of a token of a block, by its distance from the first token of the first block that the chunk has a part in.
__device__ __forceinline__ float qsa_member(
    const float *ik, ulong row, const float *state, const GemQsaPrep &p, uint token, uint dim)
{
    return token < p.phase ? state[token * INDEX_DIM + dim] : ik[p.ik.start + (token - p.phase) * row + dim];
}

// Grid (tokens + ceil((blocks + 1) / 8)), 256 threads. Q is the type of q and qcur.
template <typename Q>
__device__ void qsa_prep(const Q *q, const float *k, const float *v, const float *ik, const float *norms, const float *angles,
                         const float *state, const float *iq, Q *qcur, uchar *kq, half *ksc, uchar *vq, half *vsc, float *pooled,
                         float *new_state, float *qidx, const GemQsaPrep &p) {
    const uint where = blockIdx.x;
    const uint lane = threadIdx.x % GEM_LANES;
    const uint warp = threadIdx.x / GEM_LANES;
    float x[DIM / GEM_LANES];

    if (where < p.tokens) {
        const ulong token = where;
        const float *turn = angles + (p.phase + token) * ROPE_DIM;
        for (uint head = warp; head < HEADS; head += WARPS) {
            const Q *from = q + p.q.start + token * p.q.row_stride + head * Q_HEAD_ROWS;
            Q *to = qcur + (token * HEADS + head) * DIM;
            for (uint j = 0; j < DIM / GEM_LANES; j++) {
                x[j] = to_float(from[GEM_LANES * j + lane]);
            }
            qsa_norm<DIM / GEM_LANES>(x, norms + NORM_Q, lane);
            qsa_rotate(x, turn, lane);
            for (uint j = 0; j < DIM / GEM_LANES; j++) {
                to[GEM_LANES * j + lane] = from_float<Q>(x[j]);
            }
        }
        if (warp < 2 * KV_HEADS) {
            const bool key = warp < KV_HEADS;
            const uint head = warp % KV_HEADS;
            const ulong row = token * KV_HEADS + head;
            const float *from = key ? k + p.k.start + token * p.k.row_stride : v + p.v.start + token * p.v.row_stride;
            for (uint j = 0; j < DIM / GEM_LANES; j++) {
                x[j] = from[head * DIM + GEM_LANES * j + lane];
            }
            if (key) {
                qsa_norm<DIM / GEM_LANES>(x, norms + NORM_K, lane);
                qsa_rotate(x, turn, lane);
            }
            qsa_quantize(x, (key ? kq : vq) + row * DIM, (key ? ksc : vsc) + row * (DIM / GROUP), lane);
        } else if (p.indexer) {
            const uint head = warp - 2 * KV_HEADS;
            const float *from = iq + p.iq.start + token * p.iq.row_stride + head * INDEX_DIM;
            float *to = qidx + (token * INDEX_HEADS + head) * INDEX_DIM;
            for (uint j = 0; j < INDEX_DIM / GEM_LANES; j++) {
                x[j] = from[GEM_LANES * j + lane];
            }
            qsa_norm<INDEX_DIM / GEM_LANES>(x, norms + NORM_IQ, lane);
            qsa_rotate(x, turn, lane);
            for (uint j = 0; j < INDEX_DIM / GEM_LANES; j++) {
                to[GEM_LANES * j + lane] = x[j];
            }
        }
        return;
    }

    const uint block = (where - p.tokens) * WARPS + warp;
    if (block > p.blocks) {
        return;
    }
    const bool dead = block == p.blocks;
    for (uint j = 0; j < INDEX_DIM / GEM_LANES; j++) {
        const uint dim = GEM_LANES * j + lane;
        if (dead) {
            x[j] = p.starts ? ik[p.ik.start + dim] : state[(BLOCK - 1) * INDEX_DIM + dim];
        } else {
            float sum = qsa_member(ik, p.ik.row_stride, state, p, BLOCK * block, dim);
            for (uint m = 1; m < BLOCK; m++) {
                sum += qsa_member(ik, p.ik.row_stride, state, p, BLOCK * block + m, dim);
            }
            x[j] = sum / BLOCK;
        }
    }
    // A dead row that an earlier chunk made is only handed on.
    if (!dead || p.starts) {
        qsa_norm<INDEX_DIM / GEM_LANES>(x, norms + NORM_IK, lane);
        qsa_rotate(x, dead ? angles : angles + ulong(block) * BLOCK * ROPE_DIM, lane);
    }
    for (uint j = 0; j < INDEX_DIM / GEM_LANES; j++) {
        const uint dim = GEM_LANES * j + lane;
        pooled[ulong(block) * INDEX_DIM + dim] = x[j];
        if (dead) {
            for (uint slot = 0; slot < BLOCK - 1; slot++) {
                const uint token = BLOCK * block + slot;
                const bool open = token < p.phase + p.tokens;
                new_state[slot * INDEX_DIM + dim] = open ? qsa_member(ik, p.ik.row_stride, state, p, token, dim) : 0;
            }
            new_state[(BLOCK - 1) * INDEX_DIM + dim] = x[j];
        }
    }
}

#define GEM_QSA_PREP(type, name)                                                                                        \
    extern "C" __global__ void __launch_bounds__(WARPS *GEM_LANES) qsa_prep_##name(                                     \
        const type *q, const float *k, const float *v, const float *ik, const float *norms, const float *angles,        \
        const float *state, const float *iq, type *qcur, uchar *kq, half *ksc, uchar *vq, half *vsc, float *pooled,     \
        float *new_state, float *qidx, const __grid_constant__ GemQsaPrep p) {                                          \
        qsa_prep<type>(q, k, v, ik, norms, angles, state, iq, qcur, kq, ksc, vq, vsc, pooled, new_state, qidx, p);      \
    }

GEM_QSA_PREP(float, f32)
GEM_QSA_PREP(half, f16)
