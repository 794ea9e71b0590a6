// Parameter structs that the kernels and the host share (the Rust mirror asserts size and offsets), and how kernels find rows.
//
// Every compiler that reads this file (Metal, the Linux harness, nvcc) has `uint`, `ulong` and `float` of 4, 8 and 4 bytes.
#ifndef GEM_H
#define GEM_H

// Element types of inputs and outputs that are converted on the way, by number.
#define GEM_F32 0
#define GEM_F16 1
#define GEM_BF16 2

// The one head dimension, and the lanes of a SIMD group.
#define GEM_DIM 512
#define GEM_LANES 32

// The maximum of a state that has seen no key. Finite: under fast math nothing is promised about infinities.
#define GEM_NO_MAX (-3.402823466e+38f)

// The least sum of exponentials that a state can have: the least normal f32.
#define GEM_LEAST_SUM 1.175494351e-38f

// Where the rows of a tensor (batch, heads, rows, GEM_DIM) lie, in elements.
struct GemRows {
    ulong start;
    ulong batch_stride;
    ulong head_stride;
    ulong row_stride;
};

struct GemAttention {
    GemRows q;
    GemRows k;
    GemRows v;
    uint batch;
    uint q_heads;
    uint kv_heads;
    uint group;           // query heads per KV head
    uint q_len;
    uint kv_len;
    uint causal;          // query row i sees keys 0 ..= kv_len - q_len + i; else all
    uint partitions;
    uint partition_len;   // partition p covers [p * partition_len, min(kv_len, (p + 1) * partition_len))
    uint q_type;
    uint out_type;
    float softmax_scale;
};

// Partial states; starts in elements.
struct GemStates {
    ulong max_start;
    ulong denominator_start;
    ulong numerator_start;
    uint rows;
    uint partitions;
    uint dim;
    uint out_type;
    uint given;           // by a caller: may be anything, may have seen no key; else left by a first pass
    uint padding;
};

// Where the rows of a matrix lie, in elements.
struct GemMatrix {
    ulong start;
    ulong row_stride;
};

// y (m, n) = x (m, k) w (n, k)^T, y in f32 and contiguous.
struct GemProjection {
    GemMatrix x;
    GemMatrix w;
    uint m;
    uint n;
    uint k;
    uint band;            // rows of tiles that take turns at a column of tiles
};

struct GemQsaPrep {
    GemMatrix q;
    GemMatrix k;
    GemMatrix v;
    GemMatrix ik;
    GemMatrix iq;
    uint tokens;
    uint phase;           // tokens of the unfinished block before the chunk
    uint blocks;          // that the chunk completes
    uint starts;          // the chunk holds position 0
    uint indexer;         // there is an iq
    uint unused;
};

// Keys that are rebuilt from values: key = turn(weight * value), the rows of `attention.k` are those of `attention.v`.
struct GemSharedKv {
    GemAttention attention;
    ulong weight;         // element of the weights where they begin
    ulong angles;         // element of the angles where the row of the first key begins
    uint pairs;           // dimensions i and i + GEM_DIM / 2 turn for i < pairs, a multiple of 4; a row of angles is that many
    uint unused;          // cosines, then that many sines
};

// What every kernel does with rows. A type by number is resolved where a row is loaded or stored, once a row: not worth
// a kernel of its own.

inline float4 gem_load4(device const uchar *data, uint type, ulong element) {
    switch (type) {
    case GEM_F16: return float4(*(device const half4 *)(data + 2 * element));
    case GEM_BF16: return float4(*(device const bfloat4 *)(data + 2 * element));
    default: return *(device const float4 *)(data + 4 * element);
    }
}

inline void gem_store(device uchar *data, uint type, ulong element, float value) {
    switch (type) {
    case GEM_F16: *(device half *)(data + 2 * element) = half(value); break;
    case GEM_BF16: *(device bfloat *)(data + 2 * element) = bfloat(value); break;
    default: *(device float *)(data + 4 * element) = value;
    }
}

// A query row of a KV head: one query head of one query position, numbered position first, head second.
struct GemQuery {
    uint head;
    uint position;
    ulong element;      // of q: where the row begins
    uint sees;          // keys that it sees, counted from the first
    ulong partial;      // its row in the partial buffers and the output: batch first, then head, then position
};

inline GemQuery gem_query(constant GemAttention &p, uint batch, uint kv_head, uint row) {
    GemQuery query;
    query.head = kv_head * p.group + row % p.group;
    query.position = row / p.group;
    query.element = p.q.start + batch * p.q.batch_stride + query.head * p.q.head_stride + query.position * p.q.row_stride;
    query.sees = p.causal ? p.kv_len - p.q_len + query.position + 1 : p.kv_len;
    query.partial = (ulong(batch) * p.q_heads + query.head) * p.q_len + query.position;
    return query;
}

inline ulong gem_rows(constant GemAttention &p) {
    return ulong(p.batch) * p.q_heads * p.q_len;
}

// Where the rows of a KV head begin, in elements.
inline ulong gem_head(constant GemRows &rows, uint batch, uint kv_head) {
    return rows.start + batch * rows.batch_stride + kv_head * rows.head_stride;
}

#endif
