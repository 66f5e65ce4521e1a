// Threads that run the iterations of a loop: a oneTBB arena behind an interface without TBB.
// Thread rule: for_each() may be called from several threads; each call blocks until its own
// iterations are done, and helps with them.
//
// libtbb is not built with ThreadSanitizer. The sanitizer therefore sees neither the hand-over of
// work to a worker nor the wait for it, and would report every array as a race. worker_arena.cc is
// compiled without the sanitizer; under it, an atomic here repeats the two edges so that it sees
// them. Races between iterations, or with threads outside, are still found.
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
  // `threads`: how many may run iterations at once, including the calling threads.
  // Requires: threads >= 1.
  explicit WorkerArena(unsigned threads);
  ~WorkerArena();

  unsigned threads() const { return threads_; }

  // Calls body(i), or body(i, worker) if it takes two arguments, for each i in [0, count), in any
  // order, and returns when all calls have returned. Calls that run at the same time have different
  // `worker` numbers, all below threads(): the number selects scratch memory. An exception from an
  // iteration stops those not yet begun and is rethrown here.
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

  // There are two edges and not one, so that iterations are not ordered among themselves.
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
