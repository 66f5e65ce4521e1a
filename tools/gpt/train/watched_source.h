// A source of state that remembers whether it failed itself. A restore can also fail because the
// engine cannot write the state to its own storage, which says nothing of the source.
//
// Thread rule: as the source.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include <sluice/state_source.h>

namespace sluice {

class WatchedSource final : public StateSource {
 public:
  // `source` must outlive the object.
  explicit WatchedSource(StateSource& source) : source_(source) {}

  StatePosition position() const override { return source_.position(); }
  void prepare(const StateDescription& wanted) override {
    watch([&] { source_.prepare(wanted); });
  }
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
            std::span<float> values) override {
    watch([&] { source_.read(tensor, kind, first_element, values); });
  }
  bool allows_threads() const override { return source_.allows_threads(); }

  bool has_failed() const { return has_failed_; }

 private:
  template <class Action>
  void watch(const Action& action) {
    try {
      action();
    } catch (...) {
      has_failed_ = true;
      throw;
    }
  }

  StateSource& source_;
  std::atomic<bool> has_failed_{false};
};

}  // namespace sluice
