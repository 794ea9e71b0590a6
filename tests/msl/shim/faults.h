// Fast mode sees an access only when it meets a page that the machine protects: the guard zones, and inputs that
// are written. Here the fault becomes a report.
#pragma once
#include "access.h"
#include <pthread.h>
#include <signal.h>
#include <ucontext.h>

static const int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
static struct sigaction previous[4];

static void say_fault(Worker *w, int sig, const char *p, uint32_t pc) {
  begin_report(w);
  const MslFiber *f = msl_self;
  if (f) say_who(w, f);
  if (sig == SIGFPE) return say(w, "integer division by zero, @%x", pc);
  if (sig == SIGILL) return say(w, "illegal instruction, @%x", pc);
  if (f && p >= f->stack_lo - PAGE && p < f->stack_lo)
    return say(w, "private memory exceeds the host's %zu bytes, @%x", STACK, pc);
  int nearest = -1;
  long offset = 0, distance = GUARD;
  for (int i = 0; i < (int)MSL_BUFFERS; i++) {
    const MslBuffer &b = w->d->buffers[i];
    if (!b.role) continue;
    const long o = p - b.data, out = o < 0 ? -o : o - (long)b.bytes;
    if (out < distance) {
      nearest = i;
      offset = o;
      distance = out;
    }
  }
  if (nearest >= 0 && distance <= 0 && offset < (long)w->d->buffers[nearest].bytes)
    say(w, "write to an input: buffer %d byte %ld of %lu, @%x", nearest, offset,
        (unsigned long)w->d->buffers[nearest].bytes, pc);
  else if (nearest >= 0)
    say(w, "access out of bounds: buffer %d byte %ld of %lu, @%x", nearest, offset,
        (unsigned long)w->d->buffers[nearest].bytes, pc);
  else if (p >= unbound_page && p < unbound_page + sizeof unbound_page)
    say(w, "write to a buffer that is not bound, @%x", pc);
  else
    say(w, "access to %p, which is no memory of this dispatch, @%x", (const void *)p, pc);
}
static void on_fault(int sig, siginfo_t *info, void *context) {
  Worker *w = W;
  if (w && w->in_group) {
    const char *pc = (const char *)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
    say_fault(w, sig, (const char *)info->si_addr, (uint32_t)(pc - &__ehdr_start));
    longjmp(w->abandon, 2); // the fibers of this threadgroup are given up
  }
  // Not ours: another module's, or a real crash of the test.
  int k = 0;
  while (SIGNALS[k] != sig) k++;
  if (previous[k].sa_flags & SA_SIGINFO)
    previous[k].sa_sigaction(sig, info, context);
  else if (previous[k].sa_handler == SIG_DFL || previous[k].sa_handler == SIG_IGN)
    signal(sig, SIG_DFL); // faults again on return
  else
    previous[k].sa_handler(sig);
}
static void install_handlers(void) {
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (int k = 0; k < 4; k++) sigaction(SIGNALS[k], &action, &previous[k]);
}
static void unblock_signals(void) {
  sigset_t set;
  sigemptyset(&set);
  for (int sig : SIGNALS) sigaddset(&set, sig);
  pthread_sigmask(SIG_UNBLOCK, &set, nullptr);
}
