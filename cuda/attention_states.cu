// Partial states of attention: their merge into one state, their quotient, the logarithm of their sum, and their packing; as
// metal/attention_states.metal, which says what a state is and what becomes of one that cannot be.
//
// A block owns 128 dimensions of a row. Its threads first share out the partitions to know what each state weighs, then each walks
// them in ascending order for its own dimension.

#include "gem.cuh"

#define THREADS 128
#define TOGETHER 48     // partitions whose numerators a thread asks for at once: those of a device with 132 multiprocessors and 4 KV heads

__device__ __forceinline__ bool can_be(float max_score, float denominator) {
    if (denominator == 0) {
        return max_score == GEM_NO_MAX;
    }
    return denominator >= GEM_LEAST_SUM && isfinite(denominator) && isfinite(max_score) && max_score != GEM_NO_MAX;
}

// What the states of a row weigh against each other.
struct RowMax {
    float value;
    bool can_be;
};

__device__ RowMax row_max(const float *maxima, const float *denominators, const GemStates &p, uint row) {
    __shared__ float warp_max[THREADS / GEM_LANES];
    float most = GEM_NO_MAX;
    bool all = true;
    for (uint i = threadIdx.x; i < p.partitions; i += THREADS) {
        const ulong at = ulong(i) * p.rows + row;
        const float max_score = maxima[p.max_start + at];
        all = all && (!p.given || can_be(max_score, denominators[p.denominator_start + at]));
        most = fmaxf(most, max_score);
    }
    for (uint offset = GEM_LANES / 2; offset > 0; offset /= 2) {
        most = fmaxf(most, __shfl_xor_sync(~0u, most, offset));
    }
    if (threadIdx.x % GEM_LANES == 0) {
        warp_max[threadIdx.x / GEM_LANES] = most;
    }
    all = __syncthreads_and(all);
    for (uint i = 0; i < THREADS / GEM_LANES; i++) {
        most = fmaxf(most, warp_max[i]);
    }
    return {most, all};
}

// One dimension of a row, over all partitions.
struct Merged {
    float denominator;
    float numerator;
    RowMax all;
};

__device__ __forceinline__ Merged merge(const float *maxima, const float *denominators, const float *numerators, const GemStates &p,
                                        uint row, uint dim) {
    // Of TOGETHER partitions: what each weighs, and its denominator; 0 for an empty one, whose numerator nobody uses.
    __shared__ float weights[TOGETHER];
    __shared__ float sums[TOGETHER];
    const ulong stride = ulong(p.rows) * p.dim;
    const float *own = numerators + p.numerator_start + ulong(row) * p.dim + dim;
    const uint ours = dim < p.dim ? p.partitions : 0;
    // They are on their way before anybody knows what they weigh.
    float parts[TOGETHER];
#pragma unroll
    for (uint i = 0; i < TOGETHER; i++) {
        parts[i] = i < ours ? own[i * stride] : 0;
    }
    const auto sum_of = [&](uint i) { return denominators[p.denominator_start + ulong(i) * p.rows + row]; };
    if (threadIdx.x < TOGETHER && threadIdx.x < p.partitions) {
        sums[threadIdx.x] = sum_of(threadIdx.x);
    }
    const RowMax all = row_max(maxima, denominators, p, row);
    // -0: the first addend passes unchanged, be it -0 itself, so that merging with an empty state is the identity.
    Merged merged = {all.can_be ? 0 : NAN, all.can_be ? -0.0f : NAN, all};
    for (uint first = 0;;) {
        if (threadIdx.x < TOGETHER && first + threadIdx.x < p.partitions) {
            weights[threadIdx.x] = expf(maxima[p.max_start + ulong(first + threadIdx.x) * p.rows + row] - all.value);
        }
        __syncthreads();
#pragma unroll
        for (uint i = 0; i < TOGETHER; i++) {
            if (first + i < p.partitions && sums[i] != 0) {
                merged.denominator = fmaf(sums[i], weights[i], merged.denominator);
                merged.numerator = fmaf(parts[i], weights[i], merged.numerator);
            }
        }
        first += TOGETHER;
        if (first >= p.partitions) {
            return merged;
        }
        __syncthreads();
        if (threadIdx.x < TOGETHER && first + threadIdx.x < p.partitions) {
            sums[threadIdx.x] = sum_of(first + threadIdx.x);
        }
#pragma unroll
        for (uint i = 0; i < TOGETHER; i++) {
            parts[i] = first + i < ours ? own[(first + i) * stride] : 0;
        }
    }
}

// Numerator over denominator of each row, rounded once. Grid (rows, blocks of 128 dimensions), 128 threads.
extern "C" __global__ void __launch_bounds__(THREADS) attention_states_finish(
    const float *maxima, const float *denominators, const float *numerators, uchar *out, const __grid_constant__ GemStates p) {
    const uint row = blockIdx.x;
    const uint dim = blockIdx.y * THREADS + threadIdx.x;
    const Merged merged = merge(maxima, denominators, numerators, p, row, dim);
    if (dim < p.dim) {
        // Rows of a caller may have seen no key. Those of a first pass saw one at least: if all of them scored -inf, softmax has
        // no value, and neither has the row.
        const float none = p.given ? 0 : NAN;
        gem_store(out, p.out_type, ulong(row) * p.dim + dim, merged.denominator == 0 ? none : merged.numerator / merged.denominator);
    }
}

// One state a row, packed: maxima, then denominators, then numerators. Grid (rows, blocks of 128 dimensions), 128 threads.
extern "C" __global__ void __launch_bounds__(THREADS) attention_states_merge(
    const float *maxima, const float *denominators, const float *numerators, float *packed, const __grid_constant__ GemStates p) {
    const uint row = blockIdx.x;
    const uint dim = blockIdx.y * THREADS + threadIdx.x;
    const Merged merged = merge(maxima, denominators, numerators, p, row, dim);
    if (dim == 0) {
        packed[row] = merged.all.can_be ? merged.all.value : NAN;
        packed[p.rows + row] = merged.denominator;
    }
    if (dim < p.dim) {
        packed[2 * ulong(p.rows) + ulong(row) * p.dim + dim] = merged.denominator == 0 ? 0 : merged.numerator;
    }
}

// The natural logarithm of the sum of exp(score) of each row, -inf for one that saw no key. Grid (rows), 128 threads.
extern "C" __global__ void __launch_bounds__(THREADS) attention_states_log_sum_exp(
    const float *maxima, const float *denominators, float *out, const __grid_constant__ GemStates p) {
    const uint row = blockIdx.x;
    const RowMax all = row_max(maxima, denominators, p, row);
    if (threadIdx.x == 0) {
        float denominator = all.can_be ? 0 : NAN;
        for (uint i = 0; i < p.partitions; i++) {
            const ulong at = ulong(i) * p.rows + row;
            denominator = fmaf(denominators[p.denominator_start + at], expf(maxima[p.max_start + at] - all.value), denominator);
        }
        out[row] = denominator == 0 ? -INFINITY : all.value + logf(denominator);
    }
}

// The three buffers of a first pass in one, in this order, as they are. Grid (rows * partitions), 128 threads.
extern "C" __global__ void __launch_bounds__(THREADS) attention_states_pack(
    const float *maxima, const float *denominators, const float *numerators, float *packed, const __grid_constant__ GemStates p) {
    const uint state = blockIdx.x;
    const ulong states = ulong(p.partitions) * p.rows;
    if (threadIdx.x == 0) {
        packed[state] = maxima[state];
        packed[states + state] = denominators[state];
    }
    for (uint dim = threadIdx.x; dim < p.dim; dim += THREADS) {
        packed[2 * states + ulong(state) * p.dim + dim] = numerators[ulong(state) * p.dim + dim];
    }
}
