// Checked mode. -fsanitize=thread makes the compiler call __tsan_read4 and its kin for each access to memory, and
// -fsanitize=alignment,bounds,integer-divide-by-zero its own handlers. They are defined here instead of in a
// sanitizer's runtime, because only here the GPU thread, the kind of memory and the barriers passed are known.
#pragma once
#include "schedule.h"

// ---------------------------------------------------------------- reports

static const Variable *variable_near(const Worker *w, const char *p) {
  const Variable *best = nullptr;
  for (uint32_t i = 0; i < w->variable_count; i++) {
    const Variable *v = &w->variables[i];
    if (p >= v->data && (!best || v->data > best->data)) best = v;
  }
  return p < w->arena + ARENA ? best : nullptr;
}
static bool in_arena(const Worker *w, const char *p) { return p >= w->arena && p < w->arena + ARENA; }

static void say_place(Worker *w, int buffer, const char *p) {
  if (buffer >= 0) {
    const MslBuffer &b = w->d->buffers[buffer];
    say(w, "buffer %d byte %ld of %lu", buffer, (long)(p - b.data), (unsigned long)b.bytes);
  } else if (const Variable *v = in_arena(w, p) ? variable_near(w, p) : nullptr) {
    say(w, "threadgroup memory %s byte %ld of %u", v->name, (long)(p - v->data), v->bytes);
  } else {
    say(w, "%p", (const void *)p);
  }
}
// One report for each place in the text and kind of fault. False: this one was reported before.
static bool report(Worker *w, const char *what, int buffer, const char *p, uint32_t bytes, uint32_t pc, uint32_t tid) {
  w->failed = true;
  const uint64_t key = ((uint64_t)pc << 20) ^ (uint64_t)(uintptr_t)what * 31 ^ (uint64_t)buffer;
  for (uint32_t i = 0; i < w->report_count; i++)
    if (w->reported[i] == key) return false;
  if (w->report_count == 64) return false;
  w->reported[w->report_count++] = key;
  begin_report(w);
  say(w, "%s: ", what);
  say_place(w, buffer, p);
  const uint32_t *g = w->context.group;
  say(w, ", %u bytes, threadgroup (%u,%u,%u) thread %u, @%x", bytes, g[0], g[1], g[2], tid, pc);
  return true;
}

static void report_race(Worker *w, const char *what, const Epochs &e, int buffer, const char *p, uint32_t bytes,
                        uint32_t pc, uint32_t tid, uint32_t other, uint32_t other_pc, bool barrier_between) {
  if (!report(w, what, buffer, p, bytes, pc, tid)) return;
  say(w, " against thread %u, @%x", other, other_pc);
  if (barrier_between && e.passed_by.file) {
    const char *kind = &e == &w->threadgroup ? "mem_threadgroup" : "mem_device";
    say(w, "\n  the barrier at %s:%u lies between them, but does not name mem_flags::%s", e.passed_by.file,
        e.passed_by.line, kind);
  }
}
// Threads that store the value that is there already do not race in any way that can be seen.
static void judge_pending(Worker *w) {
  PendingWrite &q = w->pending;
  const uint32_t bytes = q.bytes;
  q.bytes = 0;
  if (memcmp(q.p, q.old, bytes) == 0) return;
  const Epochs &e = q.buffer < 0 ? w->threadgroup : w->device;
  report_race(w, "race (two writes)", e, q.buffer, q.p, bytes, q.pc, q.tid, q.other, q.other_pc, false);
}

// ---------------------------------------------------------------- judging one access

struct Access {
  const char *p;
  uint32_t bytes;
  bool write, atomic;
  uint32_t pc;
};

// Sets bits [at, at + n) and returns how many were clear.
static uint32_t mark(uint64_t *bits, uint64_t at, uint32_t n) {
  uint32_t fresh = 0;
  while (n) {
    const uint32_t shift = at % 64, here = n < 64 - shift ? n : 64 - shift;
    const uint64_t mask = (here == 64 ? ~0ull : (1ull << here) - 1) << shift;
    fresh += __builtin_popcountll(mask & ~bits[at / 64]);
    bits[at / 64] |= mask;
    at += here;
    n -= here;
  }
  return fresh;
}
static bool all_marked(const uint64_t *bits, uint64_t at, uint32_t n) {
  for (uint32_t i = 0; i < n; i++)
    if (!(bits[(at + i) / 64] >> ((at + i) % 64) & 1)) return false;
  return true;
}
static void count(MslFlow &flow, uint32_t bytes, uint32_t fresh) {
  flow.accesses++;
  flow.bytes += bytes;
  flow.unique_bytes += fresh;
}

static void judge_read(Worker *w, const Access &a, int buffer, const Epochs &e, Shadow &s) {
  const MslFiber *f = msl_self;
  const uint16_t simd_epoch = e.simd[f->simd];
  if (s.w_epoch && !a.atomic) {
    const bool own_simd = s.w_tid / MSL_SIMD == f->simd;
    if (s.w_epoch < e.first)
      report_race(w, "race (read of what another threadgroup wrote)", e, buffer, a.p, a.bytes, a.pc, f->tid, s.w_tid,
                  s.w_pc, false);
    else if (s.w_epoch == e.now && s.w_tid != f->tid && !(own_simd && s.w_simd_epoch != simd_epoch))
      report_race(w, "race (read after write)", e, buffer, a.p, a.bytes, a.pc, f->tid, s.w_tid, s.w_pc,
                  s.w_barrier != w->barriers_passed);
  }
  if (a.atomic) return;
  // Earlier reads of the same SIMD group are over once it passed a simdgroup_barrier.
  if (s.r_epoch != e.now)
    s.readers = 0;
  else if (s.r_tid / MSL_SIMD != f->simd)
    s.readers |= 2;
  else if (s.r_simd_epoch != simd_epoch)
    s.readers &= 2;
  else if (s.r_tid != f->tid)
    s.readers |= 1;
  if (s.r_tid != f->tid) {
    s.other_r_tid = s.r_tid;
    s.other_r_pc = s.r_pc;
  }
  s.r_epoch = e.now;
  s.r_barrier = w->barriers_passed;
  s.r_tid = f->tid;
  s.r_simd_epoch = simd_epoch;
  s.r_pc = a.pc;
}
static void judge_write(Worker *w, const Access &a, int buffer, const Epochs &e, Shadow &s) {
  const MslFiber *f = msl_self;
  const uint16_t simd_epoch = e.simd[f->simd];
  if (s.w_epoch && !a.atomic) {
    const bool ordered = s.w_tid == f->tid || (s.w_tid / MSL_SIMD == f->simd && s.w_simd_epoch != simd_epoch);
    if (s.w_epoch < e.first || (s.w_epoch == e.now && !ordered)) {
      if (a.bytes > sizeof w->pending.old) {
        report_race(w, "race (two writes)", e, buffer, a.p, a.bytes, a.pc, f->tid, s.w_tid, s.w_pc, false);
      } else if (!w->pending.bytes) {
        w->pending = {a.p, a.bytes, {}, buffer, a.pc, s.w_pc, (uint16_t)f->tid, s.w_tid};
        memcpy(w->pending.old, a.p, a.bytes);
      }
    }
  }
  if (s.r_epoch) {
    const bool others = s.r_tid != f->tid || s.readers;
    const bool ordered = !(s.readers & 2) && s.r_tid / MSL_SIMD == f->simd && s.r_simd_epoch != simd_epoch;
    if (s.r_epoch < e.first)
      report_race(w, "race (write of what another threadgroup read)", e, buffer, a.p, a.bytes, a.pc, f->tid, s.r_tid,
                  s.r_pc, false);
    else if (s.r_epoch == e.now && others && !ordered) {
      const bool self = s.r_tid == f->tid;
      report_race(w, "race (write after read)", e, buffer, a.p, a.bytes, a.pc, f->tid, self ? s.other_r_tid : s.r_tid,
                  self ? s.other_r_pc : s.r_pc, s.r_barrier != w->barriers_passed);
    }
  }
  s.written = 1;
  if (a.atomic) return;
  s.w_epoch = e.now;
  s.w_barrier = w->barriers_passed;
  s.w_tid = f->tid;
  s.w_simd_epoch = simd_epoch;
  s.w_pc = a.pc;
}

static void access_threadgroup(Worker *w, const Access &a) {
  const Variable *v = variable_near(w, a.p);
  if (!v || a.p + a.bytes > v->data + v->bytes) {
    report(w, a.write ? "write out of bounds" : "read out of bounds", -1, a.p, a.bytes, a.pc, msl_self->tid);
    abandon_group(w);
  }
  Shadow *s = w->arena_shadow + (a.p - w->arena);
  bool uninitialised = false;
  uint32_t fresh = 0;
  for (uint32_t i = 0; i < a.bytes; i++) {
    if (a.write) {
      fresh += !s[i].written;
      judge_write(w, a, -1, w->threadgroup, s[i]);
    } else {
      fresh += !s[i].read;
      s[i].read = 1;
      uninitialised |= !s[i].written;
      judge_read(w, a, -1, w->threadgroup, s[i]);
    }
  }
  if (uninitialised) report(w, "read of uninitialised memory", -1, a.p, a.bytes, a.pc, msl_self->tid);
  MslTraffic &t = w->d->threadgroup_traffic;
  count(a.write ? t.written : t.read, a.bytes, fresh);
}

static bool inside(const MslBuffer &b, const char *p, uint32_t bytes) {
  return b.role && p >= b.data && p + bytes <= b.data + b.bytes;
}

static void access_buffer(Worker *w, const Access &a, int i) {
  const MslBuffer &b = w->d->buffers[i];
  Watch &watch = w->watch[i];
  const uint64_t at = a.p - b.data;
  MslTraffic &t = w->d->traffic[i];
  if (a.write) {
    count(t.written, a.bytes, mark(watch.written, at, a.bytes));
    if (b.role == MSL_INPUT) {
      report(w, "write to an input", i, a.p, a.bytes, a.pc, msl_self->tid);
      abandon_group(w); // the caller owns that memory
    }
    if (b.initialised) mark(b.initialised, b.first_bit + at, a.bytes);
  } else {
    count(t.read, a.bytes, mark(watch.read, at, a.bytes));
    if (b.initialised && !all_marked(b.initialised, b.first_bit + at, a.bytes))
      report(w, "read of uninitialised memory", i, a.p, a.bytes, a.pc, msl_self->tid);
  }
  if (!watch.shadow) return;
  for (uint32_t k = 0; k < a.bytes; k++) {
    if (a.write)
      judge_write(w, a, i, w->device, watch.shadow[at + k]);
    else
      judge_read(w, a, i, w->device, watch.shadow[at + k]);
  }
}

static bool own_state(const Worker *w, const char *p) {
  if (p >= &__ehdr_start && p < &_end) return true; // tables and program-scope constants of the module
  return (p >= (const char *)w && p < (const char *)(w + 1)) ||
         (p >= (const char *)w->fibers && p < (const char *)(w->fibers + MSL_THREADS)) ||
         (p >= (const char *)w->simdgroups && p < (const char *)(w->simdgroups + MSL_SIMD)) ||
         p == (const char *)&msl_self;
}
static void access_nothing(Worker *w, const Access &a) {
  if (own_state(w, a.p)) return;
  if (a.p >= unbound_page && a.p < unbound_page + sizeof unbound_page) {
    if (!(w->d->tolerate & MSL_UNBOUND_READS) || a.write)
      report(w, a.write ? "write to a buffer that is not bound" : "read of a buffer that is not bound", -1, a.p,
             a.bytes, a.pc, msl_self->tid);
    if (a.write) abandon_group(w);
    return;
  }
  int nearest = -1;
  long distance = GUARD;
  for (int i = 0; i < (int)MSL_BUFFERS; i++) {
    const MslBuffer &b = w->d->buffers[i];
    if (!b.role) continue;
    const long past = a.p - (b.data + b.bytes), before = b.data - a.p, d = past > before ? past : before;
    if (d < distance) {
      distance = d;
      nearest = i;
    }
  }
  report(w, a.write ? "write out of bounds" : "read out of bounds", nearest, a.p, a.bytes, a.pc, msl_self->tid);
  abandon_group(w);
}

__attribute__((always_inline)) static inline void judge(const volatile void *address, uint32_t bytes, bool write,
                                                        bool atomic, const void *return_address) {
  Worker *w = W;
  const MslFiber *f = msl_self;
  const char *p = (const char *)address;
  if (!w || !f || !bytes) return;
  if (p >= f->stack_lo && p < f->stack_hi) return; // private memory
  if (!w->arena_shadow) return;                    // an atomic in fast mode
  if (w->pending.bytes) judge_pending(w);
  const Access a = {p, bytes, write, atomic, code_offset(return_address)};
  if (in_arena(w, p)) return access_threadgroup(w, a);
  if (inside(w->d->buffers[w->hot_buffer], p, bytes)) return access_buffer(w, a, w->hot_buffer);
  for (int i = 0; i < (int)MSL_BUFFERS; i++)
    if (inside(w->d->buffers[i], p, bytes)) {
      w->hot_buffer = i;
      return access_buffer(w, a, i);
    }
  access_nothing(w, a);
}
extern "C" void msl_atomic_load(const volatile void *p, void *to, uint32_t bytes) {
  judge(p, bytes, false, true, __builtin_return_address(0));
  memcpy(to, (const void *)p, bytes);
}
extern "C" void msl_atomic_store(volatile void *p, const void *from, uint32_t bytes) {
  judge(p, bytes, true, true, __builtin_return_address(0));
  memcpy((void *)p, from, bytes);
}

// ---------------------------------------------------------------- what the instrumented code calls

#define CALLER __builtin_return_address(0)
#define HOOKS(n)                                                                \
  void __tsan_read##n(void *p) { judge(p, n, false, false, CALLER); }           \
  void __tsan_write##n(void *p) { judge(p, n, true, false, CALLER); }           \
  void __tsan_unaligned_read##n(void *p) { judge(p, n, false, false, CALLER); } \
  void __tsan_unaligned_write##n(void *p) { judge(p, n, true, false, CALLER); } \
  void __tsan_volatile_read##n(void *p) { judge(p, n, false, false, CALLER); }  \
  void __tsan_volatile_write##n(void *p) { judge(p, n, true, false, CALLER); }
extern "C" {
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void *p, size_t n) { judge(p, n, false, false, CALLER); }
void __tsan_write_range(void *p, size_t n) { judge(p, n, true, false, CALLER); }
void *__tsan_memcpy(void *to, const void *from, size_t n) {
  judge(from, n, false, false, CALLER);
  judge(to, n, true, false, CALLER);
  return memcpy(to, from, n);
}
void *__tsan_memmove(void *to, const void *from, size_t n) {
  judge(from, n, false, false, CALLER);
  judge(to, n, true, false, CALLER);
  return memmove(to, from, n);
}
void *__tsan_memset(void *to, int value, size_t n) {
  judge(to, n, true, false, CALLER);
  return memset(to, value, n);
}
void __tsan_init(void) {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit(void) {}

struct TypeMismatch { // the compilers' layout of what -fsanitize=alignment passes
  const char *file;
  uint32_t line, column;
  const void *type;
  unsigned char log_alignment, kind;
};
void __ubsan_handle_type_mismatch_v1(TypeMismatch *m, void *p) {
  Worker *w = W;
  const uint32_t pc = code_offset(CALLER);
  int buffer = -1;
  for (int i = 0; i < (int)MSL_BUFFERS; i++)
    if (inside(w->d->buffers[i], (const char *)p, 1)) buffer = i;
  if (!report(w, "misaligned access", buffer, (const char *)p, 1u << m->log_alignment, pc, msl_self->tid)) return;
  say(w, "\n  the type needs an address divisible by %u, this one leaves %u", 1u << m->log_alignment,
      (uint32_t)((uintptr_t)p & ((1u << m->log_alignment) - 1)));
}
void __ubsan_handle_out_of_bounds(void *, void *index) {
  begin_report(W);
  say_who(W, msl_self);
  say(W, "index %ld is outside a fixed array, @%x", (long)(intptr_t)index, code_offset(CALLER));
  abandon_group(W);
}
void __ubsan_handle_divrem_overflow(void *, void *, void *) {
  begin_report(W);
  say_who(W, msl_self);
  say(W, "integer division by zero, @%x", code_offset(CALLER));
  abandon_group(W);
}
}
