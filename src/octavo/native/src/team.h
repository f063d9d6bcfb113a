// The threads of one parallel region: a spinning barrier, and tickets by which they share work.
#pragma once
#include <omp.h>
#include <sched.h>
#include <time.h>

#include <atomic>

#include "vec.h"

namespace OCTAVO_ISA {

constexpr int MOST_THREADS = 256;

// Memory that will be read soon, fetched a few lines at a time between other work: a burst of prefetches would fill the
// core's queue of misses and make it wait.
struct Stream {
  const char *at, *end;
  ALWAYS void step(int lines) {
    for (; lines > 0 && at < end; lines--, at += 64) prefetch(at);
  }
};

// Made once per parallel region and shared by its threads. Work is dealt by tickets and not in fixed shares, so that a
// thread that another process holds up does not hold up the rest. There is one queue of tickets per thread: a thread
// empties its own first (what it works on is then likely to be in its cache) and helps the others afterwards.
class Team {
 public:
  explicit Team(int threads) : threads_(threads) {}

  // To be called by every thread at the start of the region: the runtime may have given fewer threads than asked for.
  void gather() {
#pragma omp single
    threads_ = omp_get_num_threads();
  }

  int threads() const { return threads_; }
  static int me() { return omp_get_thread_num(); }

  // Every thread waits for all others, fetching `warm` meanwhile. `alone` runs on one of them before the others go on.
  template <class Alone>
  void barrier(Alone alone, Stream warm = {nullptr, nullptr}) {
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (waiting_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      waiting_.store(0, std::memory_order_relaxed);
      for (int q = 0; q < threads_; q++) queues_[q].next.store(0, std::memory_order_relaxed);
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

  // The items of every queue, count(q) in queue q: f(q, item, the item this thread will probably have next, or -1).
  template <class Count, class F>
  void drain(Count count, F f) {
    const int first = me();
    for (int i = 0; i < threads_; i++) {
      const int q = (first + i) % threads_, n = count(q);
      for (int item = take(q), next; item < n; item = next) {
        next = take(q);
        f(q, item, next < n ? next : -1);
      }
    }
  }

  // Item i of n dealt to queue i % threads: neighbours are worked on at the same time. f(item, next item or -1).
  template <class F>
  void deal(int n, F f) {
    drain([&](int q) { return (n - q + threads_ - 1) / threads_; },
          [&](int q, int item, int next) { f(item * threads_ + q, next < 0 ? -1 : next * threads_ + q); });
  }

  // Runs of `grain` items, the first of them to the first thread and so on: the same rows to the same thread in every
  // phase. f(first, last). A barrier follows.
  template <class F, class Alone>
  void share(int n, int grain, F f, Alone alone, Stream warm = {nullptr, nullptr}) {
    const int runs = (n + grain - 1) / grain;
    drain([&](int q) { return part(runs, q + 1) - part(runs, q); }, [&](int q, int item, int) {
      const int at = (part(runs, q) + item) * grain;
      f(at, at + grain < n ? at + grain : n);
    });
    barrier(alone, warm);
  }

  // Where the share of thread q begins of n runs.
  int part(int n, int q) const { return (int)((int64_t)n * q / threads_); }

 private:
  struct alignas(64) Queue {
    std::atomic<int> next{0};
  };

  int take(int q) { return queues_[q].next.fetch_add(1, std::memory_order_relaxed); }

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  int threads_;
  Queue queues_[MOST_THREADS];
  alignas(64) std::atomic<int> waiting_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

inline double seconds_now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

}  // namespace OCTAVO_ISA
