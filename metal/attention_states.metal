// Partial states of attention: their merge into one state, their quotient, the logarithm of their sum, and their packing.
//
// A state is (max, denominator, numerator[dim]) in f32. States are partition-major: the one of row r in partition i is number
// i * rows + r of three buffers. Every kernel merges in ascending order, so results repeat bit for bit, and never weighs
// the numerator of an empty state.
//
// Ownership. A threadgroup owns a row; each thread owns every (threads)th dimension of it and walks the partitions alone, so
// the lanes of a SIMD group read neighbours. No threadgroup memory, no barrier, any number of partitions. Packing copies.

#include <metal_stdlib>
using namespace metal;
#include "gem.h"

// What the states of a row weigh against each other.
struct RowMax {
    float value;
    bool can_be;    // no state of the row is one that no scores have
};

// States of a first pass are what they are. Those that a caller gave can be anything: an error would have to wait for the
// device, so a row with a state that cannot be becomes NaN.
inline bool can_be(float max_score, float denominator) {
    if (denominator == 0) {
        return max_score == GEM_NO_MAX;
    }
    return denominator >= GEM_LEAST_SUM && isfinite(denominator) && isfinite(max_score) && max_score != GEM_NO_MAX;
}

inline RowMax row_max(device const float *maxima, device const float *denominators, constant GemStates &p, uint row) {
    RowMax found = {GEM_NO_MAX, true};
    for (uint i = 0; i < p.partitions; i++) {
        const ulong at = ulong(i) * p.rows + row;
        const float max_score = maxima[p.max_start + at];
        found.can_be = found.can_be && (!p.given || can_be(max_score, denominators[p.denominator_start + at]));
        found.value = max(found.value, max_score);
    }
    return found;
}

// One dimension of a row, over all partitions.
struct Merged {
    float denominator;
    float numerator;
};

inline Merged merge(device const float *maxima, device const float *denominators, device const float *numerators,
                    constant GemStates &p, uint row, uint dim, RowMax all) {
    // -0: the first addend passes unchanged, be it -0 itself, so that merging with an empty state is the identity.
    Merged merged = {all.can_be ? 0 : NAN, all.can_be ? -0.0f : NAN};
    for (uint i = 0; i < p.partitions; i++) {
        const ulong at = ulong(i) * p.rows + row;
        const float denominator = denominators[p.denominator_start + at];
        if (denominator != 0) {
            const float weight = exp(maxima[p.max_start + at] - all.value);
            merged.denominator += denominator * weight;
            merged.numerator += numerators[p.numerator_start + at * p.dim + dim] * weight;
        }
    }
    // Given states in range can add up past it, and a numerator can be anything.
    if (p.given && !isfinite(merged.denominator)) {
        merged.denominator = NAN;
    }
    if (p.given && !(isfinite(merged.denominator) && isfinite(merged.numerator))) {
        merged.numerator = NAN;
    }
    return merged;
}

// Numerator over denominator of each row, rounded once. Grid (rows), 256 threads.
[[kernel]] void attention_states_finish(
    device const float *maxima [[buffer(0)]],
    device const float *denominators [[buffer(1)]],
    device const float *numerators [[buffer(2)]],
    device uchar *out [[buffer(3)]],
    constant GemStates &p [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]])
{
    const RowMax all = row_max(maxima, denominators, p, row);
    for (uint dim = thread_index; dim < p.dim; dim += threads) {
        const Merged merged = merge(maxima, denominators, numerators, p, row, dim, all);
        // Rows of a caller may have seen no key. Those of a first pass saw one at least: if all of them scored -inf, softmax has
        // no value, and neither has the row.
        const float none = p.given ? 0 : NAN;
        const float value = merged.denominator == 0 ? none : merged.numerator / merged.denominator;
        gem_store(out, p.out_type, ulong(row) * p.dim + dim, value);
    }
}

// One state a row, packed: maxima, then denominators, then numerators. Grid (rows), 256 threads.
[[kernel]] void attention_states_merge(
    device const float *maxima [[buffer(0)]],
    device const float *denominators [[buffer(1)]],
    device const float *numerators [[buffer(2)]],
    device float *packed [[buffer(3)]],
    constant GemStates &p [[buffer(4)]],
    uint row [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]])
{
    const RowMax all = row_max(maxima, denominators, p, row);
    for (uint dim = thread_index; dim < p.dim; dim += threads) {
        const Merged merged = merge(maxima, denominators, numerators, p, row, dim, all);
        if (dim == 0) {
            packed[row] = all.can_be ? all.value : NAN;
            packed[p.rows + row] = merged.denominator;
        }
        packed[2 * ulong(p.rows) + ulong(row) * p.dim + dim] = merged.denominator == 0 ? 0 : merged.numerator;
    }
}

// The natural logarithm of the sum of exp(score) of each row, -inf for one that saw no key. Grid (rows / 256), a thread a row.
[[kernel]] void attention_states_log_sum_exp(
    device const float *maxima [[buffer(0)]],
    device const float *denominators [[buffer(1)]],
    device float *out [[buffer(2)]],
    constant GemStates &p [[buffer(3)]],
    uint row [[thread_position_in_grid]])
{
    if (row >= p.rows) {
        return;
    }
    const RowMax all = row_max(maxima, denominators, p, row);
    float denominator = all.can_be ? 0 : NAN;
    for (uint i = 0; i < p.partitions; i++) {
        const ulong at = ulong(i) * p.rows + row;
        denominator += denominators[p.denominator_start + at] * exp(maxima[p.max_start + at] - all.value);
    }
    // Past the range of f32 it has no value.
    const float value = isfinite(denominator) ? all.value + log(denominator) : NAN;
    out[row] = denominator == 0 ? -INFINITY : value;
}

// The three buffers of a first pass in one, in this order, as they are. Grid (rows * partitions), 256 threads.
[[kernel]] void attention_states_pack(
    device const float *maxima [[buffer(0)]],
    device const float *denominators [[buffer(1)]],
    device const float *numerators [[buffer(2)]],
    device float *packed [[buffer(3)]],
    constant GemStates &p [[buffer(4)]],
    uint state [[threadgroup_position_in_grid]],
    uint thread_index [[thread_index_in_threadgroup]],
    uint threads [[threads_per_threadgroup]])
{
    const ulong states = ulong(p.partitions) * p.rows;
    if (thread_index == 0) {
        packed[state] = maxima[state];
        packed[states + state] = denominators[state];
    }
    for (uint dim = thread_index; dim < p.dim; dim += threads) {
        packed[2 * states + ulong(state) * p.dim + dim] = numerators[ulong(state) * p.dim + dim];
    }
}
