// The boundary activations of a training job. Each use compares every byte of its inputs with the
// expected value. Each use passes on bytes that are computed from the walk, the boundary, the
// micro-batch and the kind. So the next use notices a stale, misplaced, torn or early activation.
// Thread rule: one thread at a time. Any thread may read the results.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include <sluice/engine.h>
#include <sluice/host_device.h>

namespace sluice::test {

class ActivationRelay {
 public:
  struct Use {
    std::uint32_t position = 0;  // in forward order
    std::uint32_t micro_batch = 0;
    Pass pass = Pass::kForward;
  };

  // `device` and the relay must outlive the work on the streams. If two jobs have different `key`s,
  // the jobs pass on different bytes.
  ActivationRelay(HostDevice& device, std::vector<std::uint64_t> boundary_bytes,
                  std::uint64_t key = 0)
      : device_(device), boundary_bytes_(std::move(boundary_bytes)), key_(key) {}

  // This function is called when a step or an evaluation begins.
  void begin_walk() { ++walk_number_; }

  // `walk` is a Step or an Inference. The call enqueues the use's reads and writes on `stream`.
  template <class Walk>
  void run_use(Walk& walk, const Use& use, const Stream& stream) {
    const auto boundaries = static_cast<std::uint32_t>(boundary_bytes_.size());
    const auto ref = [&](std::uint32_t boundary, ActivationKind kind) {
      return ActivationRef{.boundary = boundary, .micro_batch = use.micro_batch, .kind = kind};
    };
    const auto load = [&](const ActivationRef& at) { check(walk.load(at, stream), at, stream); };
    const auto save = [&](const ActivationRef& at) { fill(walk.save(at, stream), at, stream); };
    using enum ActivationKind;
    if (use.position > 0) load(ref(use.position - 1, kValue));
    if (use.pass != Pass::kBackward) {
      if (use.position < boundaries) save(ref(use.position, kValue));
    } else {
      if (use.position < boundaries) load(ref(use.position, kGradient));
      if (use.position > 0) save(ref(use.position - 1, kGradient));
    }
  }

  // wrong() returns the number of wrong activations. seen() returns the number of activations that
  // were checked.
  std::uint64_t wrong() const { return wrong_.load(); }
  std::uint64_t seen() const { return seen_.load(); }

 private:
  std::uint64_t key_of(const ActivationRef& ref) const;
  void fill(ActivationLease lease, const ActivationRef& ref, const Stream& stream);
  void check(ActivationLease lease, const ActivationRef& ref, const Stream& stream);

  HostDevice& device_;
  std::vector<std::uint64_t> boundary_bytes_;
  std::uint64_t key_ = 0;
  std::uint64_t walk_number_ = 0;
  std::atomic<std::uint64_t> wrong_ = 0;
  std::atomic<std::uint64_t> seen_ = 0;
};

}  // namespace sluice::test
