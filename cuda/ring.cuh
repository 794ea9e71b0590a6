// How rows get from device memory to the warps that use them.
//
// A block is teams of warps; tile i of the partition belongs to team i % teams, and all warps of the team use it. Each team has a
// ring of slots in shared memory, which its first warp fills: while one slot is read, the others are on their way. How many there are
// follows from the shared memory that the launch gives. Nothing is common to the teams: each has a softmax of its own, and they
// merge at the end.
#ifndef GEM_RING_CUH
#define GEM_RING_CUH

#include "gem.cuh"

#define MOST_SLOTS 32                       // of all teams together
#define BARRIER_BYTES (2 * MOST_SLOTS * 8)

// Rows of one tensor as they go into a slot.
struct Rows {
    const uchar *first;     // of the partition
    ulong stride;           // bytes
    uint bytes;             // of a row: a multiple of 16
    uint pitch;             // from row to row of a slot, bytes
    uint offset;            // in the slot
    uint unit;              // bytes of an element
    bool zeroed;            // rows past the end are zeros, else whatever they were
    bool whole;             // every row starts at a multiple of 16 bytes

    __device__ Rows(const void *data, ulong start, ulong row_stride, uint elements, uint unit, uint pitch, uint offset, bool zeroed)
        : first((const uchar *)data + start * unit), stride(row_stride * unit), bytes(elements * unit), pitch(pitch),
          offset(offset), unit(unit), zeroed(zeroed), whole(((ulong)first | stride) % 16 == 0) {}
};

struct Ring {
    uint landed;            // barriers: bytes of a slot are there
    uint free;              // barriers: all warps of the team have read them
    uchar *base;
    uint slots;
    uint slot_bytes;
    // The slot in use, and whether its turn is an even or an odd one.
    uint slot = 0;
    uint parity = 0;

    __device__ Ring(uchar *shared, uint header, uint slot_bytes, uint team, uint teams) : slot_bytes(slot_bytes) {
        slots = min((dynamic_shared_bytes() - header) / slot_bytes, MOST_SLOTS) / teams;
        landed = shared_address(shared) + 8 * team * slots;
        free = landed + 8 * MOST_SLOTS;
        base = shared + header + team * slots * slot_bytes;
    }

    // One warp.
    __device__ void init(uint warps) const {
        const uint lane = threadIdx.x % GEM_LANES;
        if (lane < slots) {
            barrier_init(landed + 8 * lane, GEM_LANDED_ARRIVALS);
            barrier_init(free + 8 * lane, warps);
            barriers_made();
        }
    }

    // What is in the slot, once it is there.
    __device__ const uchar *take() const {
        barrier_wait(landed + 8 * slot, parity);
        return base + slot * slot_bytes;
    }

    // This warp has read all it needs of it.
    __device__ void give() const {
        __syncwarp();
        if (threadIdx.x % GEM_LANES == 0) {
            barrier_arrive(free + 8 * slot);
        }
    }

    // All warps of the team have.
    __device__ void wait_until_free() const { barrier_wait(free + 8 * slot, parity); }

    __device__ void advance() {
        slot++;
        if (slot == slots) {
            slot = 0;
            parity = 1 - parity;
        }
    }

    // Asks for `count` rows from row `first` on of each tensor. One warp, into a slot that is free.
    //
    // No proxy fence: a byte that threads store is not filled by the copy engine afterwards. All rows of a tensor go one way, and
    // zeros fill what a partition's last tile leaves, after which its slot is not filled again.
    template <uint TILE, uint N>
    __device__ void fill(uint slot, const Rows *tensors, uint first, uint count) const {
        const uint lane = threadIdx.x % GEM_LANES;
        const uint there = landed + 8 * slot;
        uchar *at = base + slot * slot_bytes;
        uint announced = 0;
        bool stored = false;
#pragma unroll
        for (uint n = 0; n < N; n++) {
            const Rows &rows = tensors[n];
            if (rows.zeroed && count < TILE) {
                stored = true;
                for (uint i = 16 * lane; i < (TILE - count) * rows.pitch; i += 16 * GEM_LANES) {
                    *(uint4 *)(at + rows.offset + count * rows.pitch + i) = make_uint4(0, 0, 0, 0);
                }
            }
            if (rows.whole) {
                announced += count * rows.bytes;
            } else {
                stored = true;
                copy_elements(at, rows, first, count, lane);
            }
        }
        __syncwarp();
#if GEM_BULK
        if (elected()) {
            barrier_expect(there, announced);
#pragma unroll
            for (uint n = 0; n < N; n++) {
                const Rows &rows = tensors[n];
                if (rows.whole) {
                    const uchar *from = rows.first + first * rows.stride;
                    uint to = shared_address(at + rows.offset);
#pragma unroll 4
                    for (uint row = 0; row < count; row++) {
                        copy_row(to, from, rows.bytes, there);
                        from += rows.stride;
                        to += rows.pitch;
                    }
                }
            }
        }
        __syncwarp();
#else
#pragma unroll
        for (uint n = 0; n < N; n++) {
            const Rows &rows = tensors[n];
            if (rows.whole) {
                for (uint row = 0; row < count; row++) {
                    for (uint i = 16 * lane; i < rows.bytes; i += 16 * GEM_LANES) {
                        copy_16(shared_address(at + rows.offset + row * rows.pitch + i), rows.first + (first + row) * rows.stride + i);
                    }
                }
            }
        }
        if (stored) {
            // Only an arrival of the lane's own orders what it stored.
            asm volatile("cp.async.wait_all;" ::: "memory");
            barrier_arrive(there);
        } else {
            barrier_arrive_when_copied(there);
        }
#endif
    }

    // Rows that no wide load may touch: views that start anywhere.
    __device__ static void copy_elements(uchar *at, const Rows &rows, uint first, uint count, uint lane) {
        for (uint row = 0; row < count; row++) {
            const uchar *from = rows.first + (first + row) * rows.stride;
            uchar *to = at + rows.offset + row * rows.pitch;
            if (rows.unit == 4) {
#pragma unroll 8
                for (uint i = 4 * lane; i < rows.bytes; i += 4 * GEM_LANES) {
                    *(uint *)(to + i) = *(const uint *)(from + i);
                }
            } else {
#pragma unroll 8
                for (uint i = 2 * lane; i < rows.bytes; i += 2 * GEM_LANES) {
                    *(ushort *)(to + i) = *(const ushort *)(from + i);
                }
            }
        }
    }
};

#endif
