// qsa_prep: norms, RoPE, 8-bit keys and values and pooled indexer keys of a chunk, in one dispatch.
//
// Ownership. A SIMD group owns a row from its load to its store, and each lane of it the dimensions 32 j + lane. So a load is one
// contiguous run, the two of a rotary pair (i, i + 32) are x[0] and x[1] of one lane, and a group of 64 that shares a scale is x[2 g] and
// x[2 g + 1] of all lanes. No element of a projection is read twice, but ik of position 0, and nothing is shared: no threadgroup
// memory, no barrier.
//
//      threadgroup t < tokens: token t                              threadgroup tokens + i: pooled rows 8 i .. 8 i + 7
//        SIMD group   0    1    2    3    4    5    6    7            SIMD group s: row b = 8 i + s
//        queries      0    1    2    3    4    5    6    7              b < blocks    mean of 4 ik, norm, RoPE
//                     8    9   10   11   12   13   14   15              b = blocks    the dead row; the new state, which
//                    16   17   18   19   20   21   22   23                            nobody else reads or writes
//        and          k0   k1   v0   v1   iq0  iq1  iq2  iq3            b > blocks    nothing
//
// Every sum has one order, which the CPU follows: over j, then over lanes by halves. Every product that is added is an explicit fma,
// so that there is nothing left to contract.

#include <metal_stdlib>
using namespace metal;
#include "gem.h"

#define DIM 256                 // of a head
#define INDEX_DIM 128           // of a head of the indexer
#define HEADS 24
#define KV_HEADS 2
#define INDEX_HEADS 4
#define Q_HEAD_ROWS 512         // query and gate
#define ROPE_DIM 64
#define BLOCK 4                 // tokens that share a pooled key
#define GROUP 64                // dimensions that share a scale
#define SIMD_GROUPS 8

// Where the norm weights lie in their buffer.
#define NORM_Q 0
#define NORM_K 256
#define NORM_IQ 512
#define NORM_IK 640

// By halves of the lanes; every lane gets the sum. simd_sum leaves its order open.
inline float qsa_sum(float x) {
    for (ushort half_of = GEM_LANES / 2; half_of > 0; half_of /= 2) {
        x += simd_shuffle_xor(x, half_of);
    }
    return x;
}

// x / sqrt(mean(x^2) + 1e-6) * weight, for N elements a lane.
template <uint N>
inline void qsa_norm(thread float *x, device const float *weight, uint lane) {
    float squares = 0;
    for (uint j = 0; j < N; j++) {
        squares = fma(x[j], x[j], squares);
    }
    // The length is a power of two: dividing by it does not round. An infinity, or squares past f32, would make the others 0: no
    // row has such a norm.
    const float sum = qsa_sum(squares);
    const float root = isfinite(sum) ? sqrt(sum / float(GEM_LANES * N) + 1e-6f) : NAN;
    for (uint j = 0; j < N; j++) {
        x[j] = x[j] / root * weight[GEM_LANES * j + lane];
    }
}

// Turns pair (lane, lane + 32) by the angles of a position: 32 cosines, 32 sines.
inline void qsa_rotate(thread float *x, device const float *angles, uint lane) {
    const float cosine = angles[lane];
    const float sine = angles[ROPE_DIM / 2 + lane];
    const float first = x[0];
    const float second = x[1];
    x[0] = fma(first, cosine, -(second * sine));
    x[1] = fma(first, sine, second * cosine);
}

// A head of DIM in codes of 8 bits. Magnitudes are compared as integers, which sorts infinity and NaN behind every number.
inline void qsa_quantize(thread const float *x, device uchar *codes, device half *scales, uint lane) {
    for (uint g = 0; g < DIM / GROUP; g++) {
        const uint own = max(as_type<uint>(x[2 * g]) & 0x7fffffff, as_type<uint>(x[2 * g + 1]) & 0x7fffffff);
        const half scale = half(as_type<float>(simd_max(own)) / 127.0f);
        // Infinity, NaN and what passes f16: all exponent bits are set.
        const bool usable = (as_type<ushort>(scale) & 0x7c00) != 0x7c00;
        const float wide = float(scale);
        for (uint j = 2 * g; j < 2 * g + 2; j++) {
            float code = 0;
            if (usable && wide != 0) {
                code = clamp(rint(x[j] / wide), -127.0f, 127.0f);
            }
            codes[GEM_LANES * j + lane] = uchar(char(code));
        }
        if (lane == 0) {
            scales[g] = usable ? scale : as_type<half>(ushort(0x7e00));
        }
    }
}

// The ik of a token of a block, by its distance from the first token of the first block that the chunk has a part in.
inline float qsa_member(
    device const float *ik, ulong row, device const float *state, constant GemQsaPrep &p, uint token, uint dim)
{
    return token < p.phase ? state[token * INDEX_DIM + dim] : ik[p.ik.start + (token - p.phase) * row + dim];
}

// Grid (tokens + ceil((blocks + 1) / 8)), 256 threads. Q is the type of q and qcur. The row strides of k, v, ik and iq are constants,
// or 0: taken from the parameters.
template <typename Q, uint K_ROW, uint V_ROW, uint IK_ROW, uint IQ_ROW>
[[kernel]] void qsa_prep(
    device const Q *q [[buffer(0)]],
    device const float *k [[buffer(1)]],
    device const float *v [[buffer(2)]],
    device const float *ik [[buffer(3)]],
    device const float *norms [[buffer(4)]],
    device const float *angles [[buffer(5)]],
    device const float *state [[buffer(6)]],
    device const float *iq [[buffer(7)]],
    device Q *qcur [[buffer(8)]],
    device uchar *kq [[buffer(9)]],
    device half *ksc [[buffer(10)]],
    device uchar *vq [[buffer(11)]],
    device half *vsc [[buffer(12)]],
    device float *pooled [[buffer(13)]],
    device float *new_state [[buffer(14)]],
    device float *qidx [[buffer(15)]],
    constant GemQsaPrep &p [[buffer(16)]],
    uint where [[threadgroup_position_in_grid]],
    uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]])
{
    const ulong k_row = K_ROW == 0 ? p.k.row_stride : K_ROW;
    const ulong v_row = V_ROW == 0 ? p.v.row_stride : V_ROW;
    const ulong ik_row = IK_ROW == 0 ? p.ik.row_stride : IK_ROW;
    const ulong iq_row = IQ_ROW == 0 ? p.iq.row_stride : IQ_ROW;
    float x[DIM / GEM_LANES];

    if (where < p.tokens) {
        const ulong token = where;
        device const float *turn = angles + (p.phase + token) * ROPE_DIM;
        for (uint head = simd; head < HEADS; head += SIMD_GROUPS) {
            device const Q *from = q + p.q.start + token * p.q.row_stride + head * Q_HEAD_ROWS;
            device Q *to = qcur + (token * HEADS + head) * DIM;
            for (uint j = 0; j < DIM / GEM_LANES; j++) {
                x[j] = float(from[GEM_LANES * j + lane]);
            }
            qsa_norm<DIM / GEM_LANES>(x, norms + NORM_Q, lane);
            qsa_rotate(x, turn, lane);
            for (uint j = 0; j < DIM / GEM_LANES; j++) {
                to[GEM_LANES * j + lane] = Q(x[j]);
            }
        }
        if (simd < 2 * KV_HEADS) {
            const bool key = simd < KV_HEADS;
            const uint head = simd % KV_HEADS;
            const ulong row = token * KV_HEADS + head;
            device const float *from = key ? k + p.k.start + token * k_row : v + p.v.start + token * v_row;
            for (uint j = 0; j < DIM / GEM_LANES; j++) {
                x[j] = from[head * DIM + GEM_LANES * j + lane];
            }
            if (key) {
                qsa_norm<DIM / GEM_LANES>(x, norms + NORM_K, lane);
                qsa_rotate(x, turn, lane);
            }
            qsa_quantize(x, (key ? kq : vq) + row * DIM, (key ? ksc : vsc) + row * (DIM / GROUP), lane);
        } else if (p.indexer) {
            const uint head = simd - 2 * KV_HEADS;
            device const float *from = iq + p.iq.start + token * iq_row + head * INDEX_DIM;
            device float *to = qidx + (token * INDEX_HEADS + head) * INDEX_DIM;
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

    const uint block = (where - p.tokens) * SIMD_GROUPS + simd;
    if (block > p.blocks) {
        return;
    }
    const bool dead = block == p.blocks;
    for (uint j = 0; j < INDEX_DIM / GEM_LANES; j++) {
        const uint dim = GEM_LANES * j + lane;
        if (dead) {
            x[j] = p.starts ? ik[p.ik.start + dim] : state[(BLOCK - 1) * INDEX_DIM + dim];
        } else {
            float sum = qsa_member(ik, ik_row, state, p, BLOCK * block, dim);
            for (uint m = 1; m < BLOCK; m++) {
                sum += qsa_member(ik, ik_row, state, p, BLOCK * block + m, dim);
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
                new_state[slot * INDEX_DIM + dim] = open ? qsa_member(ik, ik_row, state, p, token, dim) : 0;
            }
            new_state[(BLOCK - 1) * INDEX_DIM + dim] = x[j];
        }
    }
}

#define GEM_QSA_PREP(type, name, strides, k, v, ik, iq)                                                                \
    template [[host_name("qsa_prep_" #name "_" #strides)]] [[kernel]] void qsa_prep<type, k, v, ik, iq>(               \
        device const type *, device const float *, device const float *, device const float *, device const float *,   \
        device const float *, device const float *, device const float *, device type *, device uchar *,               \
        device half *, device uchar *, device half *, device float *, device float *, device float *,                  \
        constant GemQsaPrep &, uint, uint, uint);

#define GEM_QSA_PREPS(type, name)                                                                                      \
    GEM_QSA_PREP(type, name, separate, 512, 512, 128, 512)                                                             \
    GEM_QSA_PREP(type, name, fused1152, 1152, 1152, 1152, 1152)                                                        \
    GEM_QSA_PREP(type, name, fused1664, 1664, 1664, 1664, 1664)                                                        \
    GEM_QSA_PREP(type, name, strided, 0, 0, 0, 0)

GEM_QSA_PREPS(float, f32)
GEM_QSA_PREPS(half, f16)
