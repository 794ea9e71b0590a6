// The state of one dispatch. A dispatch runs on one OS thread; dispatches of different modules may run at the
// same time on different threads, so that whatever is not per thread here is written once.
#pragma once
#include "abi.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static const size_t PAGE = 4096;
static const size_t STACK = 256 * 1024;
static const size_t ARENA = 1 << 20; // threadgroup memory, with red zones
static const size_t RED_ZONE = 256;  // between threadgroup variables
static const long GUARD = 4l << 20;  // src/buffer.rs: unmapped on both sides of a buffer

enum : uint32_t { MEM_DEVICE = 1, MEM_THREADGROUP = 2 };

// Checked mode: what happened last to one byte of threadgroup or writable device memory.
struct Shadow {
  uint32_t w_epoch, r_epoch;       // 0: never
  uint32_t w_barrier, r_barrier;   // barriers of any kind seen by then: tells a wrong flag from no barrier
  uint32_t w_pc, r_pc, other_r_pc; // other_r: the last reader before the last that was another thread
  uint16_t w_tid, r_tid, other_r_tid;
  uint16_t w_simd_epoch, r_simd_epoch;
  uint8_t read, written;
  uint8_t readers; // bit 0: several of one SIMD group, bit 1: of several
};

struct Variable { // threadgroup memory
  char *data;
  uint32_t bytes, id;
  const char *name;
};

struct Watch {              // Checked mode: one bound buffer
  Shadow *shadow;           // null for inputs: nobody writes them
  uint64_t *read, *written; // a bit for each byte
};

// Barriers order a kind of memory; an access is ordered after another when the epoch of its kind moved on.
struct Epochs {
  uint32_t now, first; // first: of the current threadgroup
  uint16_t simd[MSL_SIMD];
  MslSite passed_by; // the last barrier that did not name this kind
};

// A write that may be harmless: judged when the value is there.
struct PendingWrite {
  const char *p;
  uint32_t bytes;
  unsigned char old[16];
  int buffer;
  uint32_t pc, other_pc;
  uint16_t tid, other;
};

struct Worker {
  MslDispatch *d;
  const MslKernel *kernel;
  MslContext context;
  MslFiber *fibers;
  MslSimdgroup *simdgroups;
  char *stacks;
  void *main_sp;
  uint32_t threads, simd_count, returned;
  uint32_t ready_groups; // mask of SIMD groups with a lane that can run
  uint64_t random;

  uint32_t at_barrier, barrier_flags, barriers_passed;
  MslSite barrier_site;

  char *arena;
  uint32_t arena_used;
  Variable variables[256];
  uint32_t variable_count;

  Epochs device, threadgroup;
  Shadow *arena_shadow;
  Watch watch[MSL_BUFFERS];
  int hot_buffer;
  PendingWrite pending;
  uint64_t reported[64];
  uint32_t report_count;

  jmp_buf abandon;
  volatile int in_group;
  bool failed;
  char error[16384];
  size_t error_bytes;
};

static __thread Worker *W;
__thread MslFiber *msl_self;

// What a kernel gets for a buffer that is not bound: readable, so that the report can name the line.
static char unbound_page[1 << 16] __attribute__((aligned(4096)));

__attribute__((format(printf, 2, 3))) static void say(Worker *w, const char *format, ...) {
  w->failed = true;
  const size_t room = sizeof w->error - w->error_bytes;
  if (room < 512) return;
  va_list list;
  va_start(list, format);
  const int n = vsnprintf(w->error + w->error_bytes, room, format, list);
  va_end(list);
  if (n > 0) w->error_bytes += (size_t)n < room ? (size_t)n : room - 1;
}
// Reports are separated by a form feed, because one report can have several lines.
static void begin_report(Worker *w) {
  if (w->error_bytes) say(w, "\f");
}
static void say_who(Worker *w, const MslFiber *f) {
  const uint32_t *g = w->context.group;
  say(w, "threadgroup (%u,%u,%u) thread %u (SIMD group %u lane %u): ", g[0], g[1], g[2], f->tid, f->simd, f->lane);
}
[[noreturn]] static void abandon_group(Worker *w) { longjmp(w->abandon, 1); }

static bool same_site(const MslSite &a, const MslSite &b) {
  return a.line == b.line && (a.file == b.file || (a.file && b.file && !strcmp(a.file, b.file)));
}

static void *map(size_t bytes) {
  void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    fprintf(stderr, "msl: no address space for %zu bytes\n", bytes);
    abort();
  }
  return p;
}

// Code addresses in messages: `@` and the offset in the module; src/lines.rs puts the line of the text there.
extern "C" const char __ehdr_start __attribute__((visibility("hidden")));
extern "C" char _end __attribute__((visibility("hidden")));
static uint32_t code_offset(const void *return_address) {
  return (uint32_t)((const char *)return_address - &__ehdr_start - 1);
}
