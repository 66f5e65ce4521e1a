// Threads that run the iterations of a loop. The class wraps a oneTBB arena behind an interface
// without TBB. Thread rule: several threads may call for_each() at the same time. Each call blocks
// until its own iterations are done. The calling thread runs some of these iterations.
//
// libtbb is not compiled with ThreadSanitizer. So the sanitizer does not see that work goes to a
// worker, or that a thread waits for the worker. Without further measures, the sanitizer would
// report a race on every array. The file worker_arena.cc is compiled without the sanitizer. In
// builds with the sanitizer, this header has two atomics. The first atomic tells the sanitizer that
// each iteration begins after the call of for_each(). The second atomic tells the sanitizer that
// for_each() returns after the end of all iterations. The sanitizer still finds races between
// iterations, and races with other threads.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

#if defined(__SANITIZE_THREAD__)
#include <atomic>
#endif

namespace sluice {

class WorkerArena {
 public:
  // `threads` is the number of threads that may run iterations at the same time, including the
  // calling threads.
  // Requires: threads >= 1.
  explicit WorkerArena(unsigned threads);
  ~WorkerArena();

  unsigned threads() const { return threads_; }

  // Calls body(i) for each i in [0, count), in any order. for_each() returns when all calls of
  // `body` have returned. A body that takes two arguments is called as body(i, worker). If several
  // calls run at the same time, each call gets a different value of `worker`. All values are below
  // threads(). So `worker` can select scratch memory. If an iteration throws, iterations that have
  // not begun are cancelled, and for_each() rethrows the exception.
  template <class Body>
  void for_each(std::uint64_t count, const Body& body) {
    publish(begun_);
    run(count, &invoke<Body>, &body);
    observe(ended_);
  }

 private:
  using Call = void (*)(const void* body, std::uint64_t index, unsigned worker);

  template <class Body>
  static void invoke(const void* body, std::uint64_t index, unsigned worker) {
    observe(begun_);
    if constexpr (std::is_invocable_v<const Body&, std::uint64_t, unsigned>) {
      (*static_cast<const Body*>(body))(index, worker);
    } else {
      (*static_cast<const Body*>(body))(index);
    }
    publish(ended_);
  }

  void run(std::uint64_t count, Call call, const void* body);

  // Two atomics are needed, because a single atomic would also order the iterations among
  // themselves.
#if defined(__SANITIZE_THREAD__)
  using Edge = std::atomic<std::uint64_t>;
  static void publish(Edge& edge) {
    edge.fetch_add(1, std::memory_order_release);
  }
  static void observe(Edge& edge) {
    static_cast<void>(edge.load(std::memory_order_acquire));
  }
#else
  struct Edge {};
  static void publish(Edge) {}
  static void observe(Edge) {}
#endif
  static inline Edge begun_{};
  static inline Edge ended_{};

  // Constant after construction.
  unsigned threads_;
  struct Tbb;
  std::unique_ptr<Tbb> tbb_;
};

}  // namespace sluice
