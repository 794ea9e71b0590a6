// How the teams of a block merge their states, and what a block leaves.
#ifndef GEM_STATES_CUH
#define GEM_STATES_CUH

#include "ring.cuh"

// States of ROWS query rows of each team, where the stages were: (max, denominator, numerator) as in the buffers.
template <uint ROWS>
struct BlockStates {
    static const uint PITCH = GEM_DIM + 4;      // floats of a numerator: columns of rows fall into different banks

    float *base;
    uint teams;

    __device__ BlockStates(uchar *shared, uint header, uint teams) : base((float *)(shared + header)), teams(teams) {}

    __device__ float *numerator(uint team, uint row) const { return base + (team * ROWS + row) * PITCH; }
    __device__ float &max_score(uint team, uint row) const { return base[(teams * PITCH + team) * ROWS + row]; }
    __device__ float &denominator(uint team, uint row) const { return base[(teams * (PITCH + 1) + team) * ROWS + row]; }
    // What a state weighs.
    __device__ float &weight(uint team, uint row) const { return base[(teams * (PITCH + 2) + team) * ROWS + row]; }
};

// All threads, once every team has written its states: merges them in ascending order and leaves the states of the partition.
template <uint ROWS>
__device__ void merge_block(const BlockStates<ROWS> &states, const GemAttention &p, uint batch, uint kv_head, uint block_row,
                            float *maxima, float *denominators, float *numerators) {
    const uint rows = p.group * p.q_len;
    const ulong first = blockIdx.x * gem_rows(p);
    __syncthreads();
    for (uint i = threadIdx.x; i < ROWS * states.teams; i += blockDim.x) {
        const uint row = i % ROWS;
        const uint own = i / ROWS;
        float all = GEM_NO_MAX;
        for (uint team = 0; team < states.teams; team++) {
            all = fmaxf(all, states.max_score(team, row));
        }
        states.weight(own, row) = expf(states.max_score(own, row) - all);
        if (own == 0 && block_row + row < rows) {
            maxima[first + gem_query(p, batch, kv_head, block_row + row).partial] = all;
        }
    }
    __syncthreads();
    for (uint i = threadIdx.x; i < ROWS * GEM_DIM / 4; i += blockDim.x) {
        const uint row = i / (GEM_DIM / 4);
        const uint dim = 4 * (i % (GEM_DIM / 4));
        if (block_row + row >= rows) {
            break;
        }
        float denominator = 0;
        float4 numerator = make_float4(0, 0, 0, 0);
        for (uint team = 0; team < states.teams; team++) {
            const float weight = states.weight(team, row);
            const float4 part = *(const float4 *)(states.numerator(team, row) + dim);
            denominator = fmaf(states.denominator(team, row), weight, denominator);
            numerator.x = fmaf(part.x, weight, numerator.x);
            numerator.y = fmaf(part.y, weight, numerator.y);
            numerator.z = fmaf(part.z, weight, numerator.z);
            numerator.w = fmaf(part.w, weight, numerator.w);
        }
        const ulong at = first + gem_query(p, batch, kv_head, block_row + row).partial;
        if (dim == 0) {
            denominators[at] = denominator;
        }
        *(float4 *)(numerators + at * GEM_DIM + dim) = numerator;
    }
}

#endif
