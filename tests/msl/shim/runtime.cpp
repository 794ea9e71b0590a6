// Runs one dispatch of a translated unit: the entry points that src/module.rs calls.
#include "faults.h"

// -1: no such constant; -2: another size.
extern "C" int msl_set_constant(uint32_t index, const void *value, uint32_t size) {
  for (uint32_t i = 0; i < msl_constant_count; i++) {
    const MslConstant &c = msl_constants[i];
    if (c.index != index) continue;
    if (c.size != size) return -2;
    memcpy(c.value, value, size);
    *c.defined = 1;
    return 0;
  }
  return -1;
}
extern "C" void msl_clear_constants(void) {
  for (uint32_t i = 0; i < msl_constant_count; i++) {
    memset(msl_constants[i].value, 0, msl_constants[i].size);
    *msl_constants[i].defined = 0;
  }
}

static void prepare_process(void) {
  memset(unbound_page, 0xff, sizeof unbound_page);
  mprotect(unbound_page, sizeof unbound_page, PROT_READ);
  install_handlers();
}

static size_t bitmap_bytes(uint64_t bits) { return (bits / 64 + 1) * 8; }

static void watch_memory(Worker *w) {
  w->arena_shadow = (Shadow *)map(sizeof(Shadow) * ARENA);
  for (uint32_t i = 0; i < MSL_BUFFERS; i++) {
    const MslBuffer &b = w->d->buffers[i];
    if (!b.role) continue;
    w->watch[i].read = (uint64_t *)map(bitmap_bytes(b.bytes));
    w->watch[i].written = (uint64_t *)map(bitmap_bytes(b.bytes));
    if (b.role != MSL_INPUT) w->watch[i].shadow = (Shadow *)map(sizeof(Shadow) * (b.bytes + 1));
  }
}
static void unwatch_memory(Worker *w) {
  munmap(w->arena_shadow, sizeof(Shadow) * ARENA);
  for (uint32_t i = 0; i < MSL_BUFFERS; i++) {
    const uint64_t bytes = w->d->buffers[i].bytes;
    if (w->watch[i].read) munmap(w->watch[i].read, bitmap_bytes(bytes));
    if (w->watch[i].written) munmap(w->watch[i].written, bitmap_bytes(bytes));
    if (w->watch[i].shadow) munmap(w->watch[i].shadow, sizeof(Shadow) * (bytes + 1));
  }
}

static uint64_t gcd(uint64_t a, uint64_t b) { return b ? gcd(b, a % b) : a; }

static void run_groups(Worker *w) {
  const uint32_t *n = w->d->groups;
  const uint64_t total = (uint64_t)n[0] * n[1] * n[2];
  uint64_t at = 0, step = 1;
  if (w->d->seed && total > 1) { // any start, any step that visits all
    at = next_random(w) % total;
    step = 1 + next_random(w) % (total - 1);
    while (gcd(step, total) != 1) step = step % total + 1;
  }
  for (uint64_t i = 0; i < total && !w->failed; i++, at = (at + step) % total) {
    w->context.group[0] = at % n[0];
    w->context.group[1] = at / n[0] % n[1];
    w->context.group[2] = at / n[0] / n[1];
    if (setjmp(w->abandon) == 0) {
      w->in_group = 1;
      run_group(w);
    } else {
      unblock_signals();
    }
    w->in_group = 0;
    msl_self = nullptr;
  }
}

// What is bound and what the kernel takes must agree; Metal itself would ignore the difference.
static void check_arguments(Worker *w) {
  bool buffer[MSL_BUFFERS] = {}, threadgroup[MSL_BUFFERS] = {};
  for (uint32_t i = 0; i < w->kernel->arg_count; i++) {
    const MslArg &a = w->kernel->args[i];
    if (a.kind == MSL_ARG_THREADGROUP) threadgroup[a.index] = true;
    if (a.kind == MSL_ARG_BUFFER || a.kind == MSL_ARG_CONSTANT) buffer[a.index] = true;
    if (a.kind == MSL_ARG_CONSTANT) w->d->buffers[a.index].constant_space = 1;
  }
  for (uint32_t i = 0; i < MSL_BUFFERS; i++) {
    if (w->d->buffers[i].role && !buffer[i]) {
      begin_report(w);
      say(w, "buffer %u is bound, but is no argument of the kernel", i);
    }
    if (!w->d->threadgroup_bytes[i] != !threadgroup[i]) {
      begin_report(w);
      say(w,
          threadgroup[i] ? "threadgroup(%u) has no size"
                         : "threadgroup(%u) has a size, but is no argument of the kernel",
          i);
    }
  }
}

static void run(Worker *w) {
  const size_t stack_bytes = (size_t)w->threads * (STACK + PAGE);
  w->fibers = (MslFiber *)map(sizeof(MslFiber) * MSL_THREADS);
  w->simdgroups = (MslSimdgroup *)map(sizeof(MslSimdgroup) * MSL_SIMD);
  w->arena = (char *)map(ARENA);
  memset(w->arena, 0xff, ARENA);
  w->stacks = (char *)map(stack_bytes);
  for (uint32_t i = 0; i < w->threads; i++) mprotect(w->stacks + (size_t)i * (STACK + PAGE), PAGE, PROT_NONE);
  if (msl_checked) watch_memory(w);

  stack_t alternate = {}, old = {};
  alternate.ss_size = 65536;
  alternate.ss_sp = map(alternate.ss_size);
  sigaltstack(&alternate, &old);
  W = w;
  run_groups(w);
  W = nullptr;
  sigaltstack(&old, nullptr);

  munmap(alternate.ss_sp, alternate.ss_size);
  if (msl_checked) unwatch_memory(w);
  munmap(w->stacks, stack_bytes);
  munmap(w->arena, ARENA);
  munmap(w->simdgroups, sizeof(MslSimdgroup) * MSL_SIMD);
  munmap(w->fibers, sizeof(MslFiber) * MSL_THREADS);
}

// 0: done. 1: `error` holds the reports. 2: no such entry. 3: `error` says what does not fit.
extern "C" int msl_dispatch(MslDispatch *d) {
  const MslKernel *kernel = nullptr;
  for (uint32_t i = 0; i < msl_kernel_count; i++)
    if (!strcmp(msl_kernels[i].name, d->entry)) kernel = &msl_kernels[i];
  if (!kernel) return 2;
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, prepare_process);
  msl_derive_constants();

  Worker *w = (Worker *)map(sizeof(Worker));
  w->d = d;
  w->kernel = kernel;
  w->random = d->seed * 0x9e3779b97f4a7c15ull + 1;
  w->threads = d->threads[0] * d->threads[1] * d->threads[2];
  w->simd_count = (w->threads + MSL_SIMD - 1) / MSL_SIMD;
  w->context.simdgroups = w->simd_count;
  memcpy(w->context.groups, d->groups, sizeof d->groups);
  memcpy(w->context.threads, d->threads, sizeof d->threads);
  for (uint32_t i = 0; i < MSL_BUFFERS; i++)
    w->context.buffer[i] = d->buffers[i].role ? d->buffers[i].data : unbound_page;
  check_arguments(w);
  const bool fits = !w->failed;
  if (fits) run(w);
  const int status = w->failed ? (fits ? 1 : 3) : 0;
  if (status) snprintf(d->error, d->error_capacity, "%s", w->error);
  munmap(w, sizeof(Worker));
  return status;
}

#if defined(__clang__)
// clang's __bf16 calls these, and libgcc before 13 lacks them.
extern "C" __bf16 __truncsfbf2(float f) {
  const uint32_t u = __builtin_bit_cast(uint32_t, f);
  const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
  return __builtin_bit_cast(__bf16, (uint16_t)(nan ? u >> 16 | 0x40 : (u + 0x7fffu + (u >> 16 & 1)) >> 16));
}
extern "C" __bf16 __truncdfbf2(double d) { return __truncsfbf2((float)d); }
#endif
