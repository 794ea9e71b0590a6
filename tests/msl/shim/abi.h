// What the translated unit, the runtime and the Rust side agree on. src/ffi.rs mirrors the structs that
// cross the language border; both sides are built from this repository, so there is no version to check.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum : uint32_t {
  MSL_SIMD = 32,      // lanes of a SIMD group
  MSL_THREADS = 1024, // most threads of a threadgroup
  MSL_BUFFERS = 31,   // Metal's buffer argument table
  MSL_SLOT = 64,      // bytes one lane can hand to a SIMD function
};

// A place in the `.metal` text.
struct MslSite {
  const char *file;
  uint32_t line;
};
// Parameters that take the caller's place by themselves: default arguments are evaluated there, though not within
// braces. MSL_CALLER hands them on, MSL_HERE is the place.
#define MSL_SITE const char *msl_file = __builtin_FILE(), uint32_t msl_line = __builtin_LINE()
#define MSL_CALLER msl_file, msl_line
#define MSL_HERE (MslSite{msl_file, msl_line})

enum MslWait : uint32_t {
  MSL_RUNNING,
  MSL_BARRIER,
  MSL_SIMD_BARRIER,
  MSL_REDUCTION,
  MSL_SHUFFLE,
  MSL_MATRIX,
};

struct MslSimdgroup;

// One GPU thread.
struct MslFiber {
  void *sp; // saved stack pointer while it does not run
  MslSimdgroup *group;
  char *stack_lo, *stack_hi;
  MslSite site;         // of the wait
  uint32_t lane;        // thread_index_in_simdgroup
  uint32_t simd;        // simdgroup_index_in_threadgroup
  uint32_t tid;         // thread_index_in_threadgroup
  uint32_t position[3]; // thread_position_in_threadgroup
  uint32_t returned;
  uint32_t wait;   // MslWait
  uint32_t parity; // which of the two slot sets the current SIMD function uses
  uint32_t leader; // woken to finish a SIMD function for the others
};

// Lanes leave their operand in `slot`; the last one to arrive computes and leaves `result`. Two slot sets,
// because a lane may enter the next SIMD function before the slowest has read from this one.
struct MslSimdgroup {
  alignas(64) unsigned char slot[2][MSL_SIMD][MSL_SLOT];
  alignas(64) unsigned char result[MSL_SIMD][MSL_SLOT];
  uint32_t took_part[MSL_SIMD]; // lanes of the SIMD function that each lane left last
  uint32_t generation;
  uint32_t existing, alive, ready, waiting, at_barrier; // masks of lanes
  uint32_t index;
};

// One threadgroup's view of the dispatch.
struct MslContext {
  void *buffer[MSL_BUFFERS];
  void *threadgroup[MSL_BUFFERS];
  uint32_t group[3], groups[3], threads[3];
  uint32_t simdgroups;
};

enum MslArgKind : uint32_t {
  MSL_ARG_BUFFER,
  MSL_ARG_CONSTANT, // a buffer in the constant address space
  MSL_ARG_THREADGROUP,
  MSL_ARG_THREAD_POSITION_IN_GRID,
  MSL_ARG_THREAD_POSITION_IN_THREADGROUP,
  MSL_ARG_THREADGROUP_POSITION_IN_GRID,
  MSL_ARG_THREADS_PER_THREADGROUP,
  MSL_ARG_THREADGROUPS_PER_GRID,
  MSL_ARG_THREADS_PER_GRID,
  MSL_ARG_THREAD_INDEX_IN_THREADGROUP,
  MSL_ARG_SIMDGROUP_INDEX_IN_THREADGROUP,
  MSL_ARG_THREAD_INDEX_IN_SIMDGROUP,
  MSL_ARG_SIMDGROUPS_PER_THREADGROUP,
  MSL_ARG_THREADS_PER_SIMDGROUP,
};
struct MslArg {
  uint32_t kind, index;
};
struct MslKernel {
  const char *name;
  void (*run)(const MslContext *, const MslArg *, const MslFiber *);
  const MslArg *args;
  uint32_t arg_count;
};
struct MslConstant { // a function constant
  uint32_t index;
  void *value;
  uint32_t size;
  uint32_t *defined;
};

// ---- between the runtime and Rust

enum MslRole : uint32_t { MSL_UNBOUND, MSL_INPUT, MSL_OUTPUT, MSL_INOUT };
struct MslFlow {
  uint64_t accesses, bytes, unique_bytes;
};
struct MslTraffic {
  MslFlow read, written;
};
struct MslBuffer {
  char *data;
  uint64_t bytes;
  uint64_t *initialised; // a bit for each byte; null: all of them
  uint64_t first_bit;    // of `data` in `initialised`
  uint32_t role;
  uint32_t constant_space; // result: the kernel takes it as `constant`
};
enum MslTolerance : uint32_t {
  MSL_MEM_NONE_ORDERS = 1,
  MSL_UNBOUND_READS = 2,
};
struct MslDispatch {
  const char *entry;
  uint32_t groups[3], threads[3];
  MslBuffer *buffers;                // MSL_BUFFERS of them
  const uint32_t *threadgroup_bytes; // MSL_BUFFERS of them
  uint64_t seed;
  uint32_t tolerate; // MslTolerance
  uint32_t max_threads, max_threadgroup_bytes;
  uint32_t used_threadgroup_bytes; // results from here on
  char *error;
  uint64_t error_capacity;
  uint64_t barriers, simd_barriers, collectives, matrix_multiplies;
  MslTraffic traffic[MSL_BUFFERS];
  MslTraffic threadgroup_traffic;
};

extern "C" {
// Defined by the translated unit.
extern const MslKernel msl_kernels[];
extern const uint32_t msl_kernel_count;
extern const MslConstant msl_constants[];
extern const uint32_t msl_constant_count;
extern const uint32_t msl_checked;
void msl_derive_constants(void);

// Defined by the runtime.
extern __thread MslFiber *msl_self;
// True for the lane that has to compute for all that wait, and then to call msl_release.
bool msl_arrive(uint32_t wait, MslSite site);
void msl_release(void);
void msl_barrier(uint32_t flags, MslSite site);
void msl_simd_barrier(uint32_t flags, MslSite site);
void *msl_threadgroup_variable(uint32_t id, uint32_t bytes, uint32_t align, const char *name);
void msl_atomic_load(const volatile void *p, void *to, uint32_t bytes);
void msl_atomic_store(volatile void *p, const void *from, uint32_t bytes);
[[noreturn]] void msl_absent_lane(uint32_t lane, MslSite site);
[[noreturn]] void msl_incomplete_simdgroup(MslSite site);
}
