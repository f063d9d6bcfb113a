// The threads of one parallel region: a spinning barrier, and tickets by which they share work.
#pragma once
#include <omp.h>
#include <sched.h>
#include <time.h>

#include <atomic>

#include "vec.h"

namespace OCTAVO_ISA {

// Memory that will be read soon, fetched a few lines at a time between other work: a burst of prefetches would fill the
// core's queue of misses and make it wait.
struct Stream {
  const char *at, *end;
  ALWAYS void step(int lines) {
    for (; lines > 0 && at < end; lines--, at += 64) prefetch(at);
  }
};

// Made once per parallel region and shared by its threads. Work is dealt by tickets and not in fixed shares, so that a
// thread that another process holds up does not hold up the rest. Only the first ticket is fixed (thread i has ticket
// i), so that a thread can fetch what it will begin with while it waits.
class Team {
 public:
  explicit Team(int threads) : threads_(threads), next_(threads) {}

  int threads() const { return threads_; }
  static int me() { return omp_get_thread_num(); }

  // The next ticket after the fixed one.
  int take() { return next_.fetch_add(1, std::memory_order_relaxed); }

  // Every thread waits for all others, fetching `warm` meanwhile. `alone` runs on one of them before the others go on.
  template <class Alone>
  void barrier(Alone alone, Stream warm = {nullptr, nullptr}) {
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (waiting_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      waiting_.store(0, std::memory_order_relaxed);
      next_.store(threads_, std::memory_order_relaxed);
      alone();
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
      if (warm.at < warm.end) warm.step(2);
      else if (spins < 4000) pause();
      else sched_yield();  // somebody else has the core that the last thread needs
    }
  }

  // Items [0, n) in runs of `grain`, each to one thread; a barrier follows. f(first, last).
  template <class F, class Alone>
  void share(int n, int grain, F f, Alone alone, Stream warm = {nullptr, nullptr}) {
    for (int run = me(); run * grain < n; run = take()) f(run * grain, (run + 1) * grain < n ? (run + 1) * grain : n);
    barrier(alone, warm);
  }

 private:
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  const int threads_;
  alignas(64) std::atomic<int> waiting_{0};
  alignas(64) std::atomic<int> next_;
  alignas(64) std::atomic<uint32_t> phase_{0};
};

inline double seconds_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

}  // namespace OCTAVO_ISA
