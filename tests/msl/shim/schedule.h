// Every GPU thread is a fiber. They switch only where threads can meet: barriers and SIMD functions. Whatever
// else a kernel relies on is luck, which another seed's order takes away.
#pragma once
#include "state.h"

#if !defined(__x86_64__)
#error "msl: the context switch is written for x86-64"
#endif

extern "C" void msl_switch(void **save, void *load);
__asm__(".text\n.globl msl_switch\n.hidden msl_switch\n.type msl_switch,@function\nmsl_switch:\n"
        "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
        "movq %rsp,(%rdi)\nmovq %rsi,%rsp\n"
        "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n"
        ".size msl_switch,.-msl_switch\n");

static void judge_pending(Worker *w); // access.h

static uint64_t next_random(Worker *w) {
  uint64_t x = w->random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return w->random = x;
}
static uint32_t nth_bit(uint32_t mask, uint32_t n) {
  while (n--) mask &= mask - 1;
  return __builtin_ctz(mask);
}
static uint32_t bits_after(uint32_t i) { return i >= 31 ? 0 : ~((2u << i) - 1); }
static MslFiber *fiber(Worker *w, const MslSimdgroup *sg, uint32_t lane) {
  return &w->fibers[sg->index * MSL_SIMD + lane];
}

// The fiber to run next, or null when none can.
static MslFiber *pick(Worker *w, const MslFiber *current) {
  if (!w->ready_groups) return nullptr;
  MslSimdgroup *sg;
  uint32_t lane;
  if (!w->d->seed) { // lanes in order
    sg = current ? current->group : &w->simdgroups[__builtin_ctz(w->ready_groups)];
    uint32_t after = current ? bits_after(current->lane) : ~0u;
    if (!sg->ready) {
      const uint32_t later = w->ready_groups & bits_after(sg->index);
      sg = &w->simdgroups[__builtin_ctz(later ? later : w->ready_groups)];
      after = ~0u;
    }
    const uint32_t later = sg->ready & after;
    lane = __builtin_ctz(later ? later : sg->ready);
  } else {
    const uint64_t r = next_random(w);
    // Stays in the SIMD group seven times of eight: orders lanes within a group as well as groups.
    if (current && current->group->ready && (r & 0x700))
      sg = current->group;
    else
      sg = &w->simdgroups[nth_bit(w->ready_groups, (r >> 16) % __builtin_popcount(w->ready_groups))];
    lane = nth_bit(sg->ready, (r >> 32) % __builtin_popcount(sg->ready));
  }
  sg->ready &= ~(1u << lane);
  if (!sg->ready) w->ready_groups &= ~(1u << sg->index);
  return fiber(w, sg, lane);
}
static void wake(Worker *w, MslSimdgroup *sg, uint32_t lanes) {
  sg->ready |= lanes;
  if (sg->ready) w->ready_groups |= 1u << sg->index;
}
static void leave(Worker *w, MslFiber *me, void **save) {
  MslFiber *next = pick(w, me);
  if (next == me) return;
  void *to = w->main_sp;
  if (next) {
    msl_self = next;
    to = next->sp;
  }
  msl_switch(save, to);
}
static void block(Worker *w, MslFiber *me) {
  if (w->pending.bytes) judge_pending(w);
  leave(w, me, &me->sp);
}

// ---------------------------------------------------------------- who waits where

static const char *wait_name(uint32_t wait) {
  static const char *names[] = {"running",          "threadgroup_barrier", "simdgroup_barrier",
                                "a SIMD reduction", "a SIMD shuffle",      "simdgroup_multiply_accumulate"};
  return wait < 6 ? names[wait] : "?";
}
static void say_waits(Worker *w) {
  uint32_t shown = 0;
  for (uint32_t i = 0; i < w->threads && shown < 6; shown++) {
    const MslFiber *a = &w->fibers[i];
    uint32_t j = i + 1;
    for (; j < w->threads; j++) {
      const MslFiber *b = &w->fibers[j];
      if (b->returned != a->returned || b->wait != a->wait || !same_site(b->site, a->site)) break;
    }
    say(w, "\n  threads %u..%u ", i, j - 1);
    if (a->returned)
      say(w, "returned");
    else if (a->wait == MSL_RUNNING)
      say(w, "are elsewhere");
    else
      say(w, "wait at %s, %s:%u", wait_name(a->wait), a->site.file, a->site.line);
    i = j;
  }
}
static bool all_at_one_place(Worker *w, const MslSimdgroup *sg) {
  const MslFiber *a = fiber(w, sg, __builtin_ctz(sg->waiting));
  for (uint32_t m = sg->waiting; m; m &= m - 1) {
    const MslFiber *b = fiber(w, sg, __builtin_ctz(m));
    if (b->wait != a->wait || !same_site(b->site, a->site)) return false;
  }
  return true;
}

// ---------------------------------------------------------------- SIMD functions

static void complete(Worker *w, MslSimdgroup *sg, uint32_t wait) {
  for (uint32_t m = sg->waiting; m; m &= m - 1) sg->took_part[__builtin_ctz(m)] = sg->waiting;
  if (wait == MSL_SIMD_BARRIER)
    w->d->simd_barriers++;
  else if (wait == MSL_MATRIX)
    w->d->matrix_multiplies++;
  else
    w->d->collectives++;
}
// Lanes that returned do not take part, as on the device; a live lane elsewhere is an error.
extern "C" bool msl_arrive(uint32_t wait, MslSite site) {
  Worker *w = W;
  MslFiber *me = msl_self;
  MslSimdgroup *sg = me->group;
  me->wait = wait;
  me->site = site;
  sg->waiting |= 1u << me->lane;
  if (sg->waiting == sg->alive) {
    if (!all_at_one_place(w, sg)) {
      begin_report(w);
      say_who(w, me);
      say(w, "the lanes of one SIMD group diverge:");
      say_waits(w);
      abandon_group(w);
    }
    complete(w, sg, wait);
    me->wait = MSL_RUNNING;
    return true;
  }
  block(w, me);
  me->wait = MSL_RUNNING;
  const bool leader = me->leader;
  me->leader = 0;
  return leader;
}
extern "C" void msl_release(void) {
  MslSimdgroup *sg = msl_self->group;
  const uint32_t lanes = sg->took_part[msl_self->lane];
  sg->waiting &= ~lanes;
  sg->generation++;
  wake(W, sg, lanes & ~(1u << msl_self->lane));
}
extern "C" void msl_absent_lane(uint32_t lane, MslSite site) {
  begin_report(W);
  say_who(W, msl_self);
  say(W, "the shuffle at %s:%u reads lane %u, which does not take part", site.file, site.line, lane);
  abandon_group(W);
}
extern "C" void msl_incomplete_simdgroup(MslSite site) {
  begin_report(W);
  say_who(W, msl_self);
  say(W, "the matrix operation at %s:%u lacks some of the 32 lanes", site.file, site.line);
  abandon_group(W);
}

// ---------------------------------------------------------------- barriers

static bool orders(const Worker *w, uint32_t flags, uint32_t kind) {
  return (flags & kind) || (kind == MEM_THREADGROUP && (w->d->tolerate & MSL_MEM_NONE_ORDERS));
}
extern "C" void msl_simd_barrier(uint32_t flags, MslSite site) {
  Worker *w = W;
  if (!msl_arrive(MSL_SIMD_BARRIER, site)) return;
  if (w->pending.bytes) judge_pending(w);
  const uint32_t s = msl_self->simd;
  if (orders(w, flags, MEM_THREADGROUP)) w->threadgroup.simd[s]++;
  if (orders(w, flags, MEM_DEVICE)) w->device.simd[s]++;
  msl_release();
}
static void pass_barrier(Worker *w, Epochs &e, uint32_t kind) {
  if (orders(w, w->barrier_flags, kind))
    e.now++;
  else
    e.passed_by = w->barrier_site;
}
extern "C" void msl_barrier(uint32_t flags, MslSite site) {
  Worker *w = W;
  MslFiber *me = msl_self;
  me->wait = MSL_BARRIER;
  me->site = site;
  if (!w->at_barrier) {
    w->barrier_site = site;
    w->barrier_flags = flags;
  } else if (!same_site(w->barrier_site, site) || w->barrier_flags != flags) {
    begin_report(w);
    say_who(w, me);
    say(w, "the threads of one threadgroup meet different barriers:");
    say_waits(w);
    abandon_group(w);
  }
  w->at_barrier++;
  me->group->at_barrier |= 1u << me->lane;
  if (w->at_barrier < w->threads) {
    block(w, me);
  } else {
    if (w->pending.bytes) judge_pending(w);
    w->d->barriers++;
    w->barriers_passed++;
    pass_barrier(w, w->threadgroup, MEM_THREADGROUP);
    pass_barrier(w, w->device, MEM_DEVICE);
    me->group->at_barrier &= ~(1u << me->lane);
    for (uint32_t s = 0; s < w->simd_count; s++) {
      MslSimdgroup *sg = &w->simdgroups[s];
      const uint32_t lanes = sg->at_barrier;
      sg->at_barrier = 0;
      wake(w, sg, lanes);
    }
    w->at_barrier = 0;
  }
  me->wait = MSL_RUNNING;
}

// ---------------------------------------------------------------- threadgroup memory

// All threads of a threadgroup get one address; the first to ask allocates.
extern "C" void *msl_threadgroup_variable(uint32_t id, uint32_t bytes, uint32_t align, const char *name) {
  Worker *w = W;
  uint32_t sum = (bytes + 15) / 16 * 16;
  for (uint32_t i = 0; i < w->variable_count; i++) {
    if (w->variables[i].id == id) return w->variables[i].data;
    sum += (w->variables[i].bytes + 15) / 16 * 16;
  }
  if (sum > w->d->used_threadgroup_bytes) w->d->used_threadgroup_bytes = sum;
  if (sum > w->d->max_threadgroup_bytes || w->variable_count == 256) {
    begin_report(w);
    say(w, "%u bytes of threadgroup memory with %s, the limit is %u", sum, name, w->d->max_threadgroup_bytes);
    abandon_group(w);
  }
  if (align < 16) align = 16;
  const uint32_t at = (w->arena_used + align - 1) / align * align;
  if (at + bytes + RED_ZONE > ARENA) {
    begin_report(w);
    say(w, "threadgroup memory: %s of %u bytes does not fit the host's %zu", name, bytes, ARENA);
    abandon_group(w);
  }
  w->variables[w->variable_count++] = {w->arena + at, bytes, id, name};
  w->arena_used = at + bytes + RED_ZONE;
  return w->arena + at;
}

// ---------------------------------------------------------------- one threadgroup

static void fiber_main(void) {
  Worker *w = W;
  MslFiber *me = msl_self;
  w->kernel->run(&w->context, w->kernel->args, me);
  if (w->pending.bytes) judge_pending(w);
  me->returned = 1;
  w->returned++;
  MslSimdgroup *sg = me->group;
  sg->alive &= ~(1u << me->lane);
  // The others may have waited for this lane only.
  if (sg->waiting && sg->waiting == sg->alive && all_at_one_place(w, sg)) {
    MslFiber *leader = fiber(w, sg, __builtin_ctz(sg->waiting));
    complete(w, sg, leader->wait);
    leader->leader = 1;
    wake(w, sg, 1u << leader->lane);
  }
  void *unused;
  leave(w, me, &unused);
  __builtin_trap();
}
static void start_fiber(Worker *w, uint32_t i) {
  MslFiber *f = &w->fibers[i];
  const uint32_t *shape = w->context.threads;
  *f = {};
  f->stack_hi = w->stacks + (size_t)(i + 1) * (STACK + PAGE);
  f->stack_lo = f->stack_hi - STACK;
  f->tid = i;
  f->lane = i % MSL_SIMD;
  f->simd = i / MSL_SIMD;
  f->group = &w->simdgroups[f->simd];
  f->position[0] = i % shape[0];
  f->position[1] = i / shape[0] % shape[1];
  f->position[2] = i / shape[0] / shape[1];
  // Stacks a power of two apart would all fall into one cache set.
  uint64_t *sp = (uint64_t *)((uintptr_t)(f->stack_hi - 64 - (i * 7 % 61) * 64) & ~(uintptr_t)15);
  *--sp = 0;
  *--sp = (uint64_t)(uintptr_t)fiber_main;
  for (int r = 0; r < 6; r++) *--sp = 0; // the registers that msl_switch pops
  f->sp = sp;
}
static void start_simdgroup(Worker *w, uint32_t s) {
  MslSimdgroup *sg = &w->simdgroups[s];
  const uint32_t lanes = w->threads - s * MSL_SIMD;
  sg->existing = lanes >= MSL_SIMD ? ~0u : (1u << lanes) - 1;
  sg->alive = sg->ready = sg->existing;
  sg->waiting = sg->at_barrier = sg->generation = 0;
  sg->index = s;
  w->ready_groups |= 1u << s;
}
static void bind_threadgroup_memory(Worker *w) {
  static const char *names[] = {"threadgroup(0)", "threadgroup(1)", "threadgroup(2)", "threadgroup(3)"};
  for (uint32_t i = 0; i < MSL_BUFFERS; i++) {
    const uint32_t bytes = w->d->threadgroup_bytes[i];
    w->context.threadgroup[i] =
        bytes ? msl_threadgroup_variable(0x80000000u + i, bytes, 16, i < 4 ? names[i] : "threadgroup(n)") : nullptr;
  }
}
static void run_group(Worker *w) {
  // Each threadgroup starts on memory that holds nothing of the last one's.
  memset(w->arena, 0xff, w->arena_used);
  if (w->arena_shadow) memset(w->arena_shadow, 0, w->arena_used * sizeof(Shadow));
  w->arena_used = w->variable_count = 0;
  w->returned = w->at_barrier = w->ready_groups = 0;
  w->threadgroup.first = ++w->threadgroup.now;
  w->device.first = ++w->device.now;
  bind_threadgroup_memory(w);
  for (uint32_t s = 0; s < w->simd_count; s++) start_simdgroup(w, s);
  for (uint32_t i = 0; i < w->threads; i++) start_fiber(w, i);
  while (MslFiber *next = pick(w, nullptr)) {
    msl_self = next;
    msl_switch(&w->main_sp, next->sp);
    msl_self = nullptr;
  }
  if (w->returned == w->threads) return;
  begin_report(w);
  const uint32_t *g = w->context.group;
  say(w, "threadgroup (%u,%u,%u): the threads cannot meet:", g[0], g[1], g[2]);
  say_waits(w);
  abandon_group(w);
}
