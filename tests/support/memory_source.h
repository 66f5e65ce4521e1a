// A copy of an engine's state in plain arrays. The copy is a StateSource for another engine. The
// class counts the elements that are read. Thread rule: one thread at a time.
#pragma once

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <vector>

#include <sluice/engine.h>
#include "engine/engine_access.h"
#include "engine/plan/layout.h"

namespace sluice::test {

inline constexpr StateKind kSourceKinds[] = {StateKind::kMaster, StateKind::kExpAvg,
                                             StateKind::kExpAvgSq};

class MemorySource final : public StateSource {
 public:
  // All ranks take part in this call.
  explicit MemorySource(Engine& engine) : position_(engine.position()) {
    for (const TensorPlace& tensor : engine.tensors()) {
      for (const StateKind kind : kSourceKinds) {
        std::vector<float> values(tensor.element_count);
        if (kind == StateKind::kMaster || !layout_of(engine).unit(tensor.unit).is_frozen)
          engine.read_state(tensor.id, kind, 0, std::as_writable_bytes(std::span(values)));
        values_[{tensor.name, kind}] = std::move(values);
      }
    }
  }

  StatePosition position() const override { return position_; }
  void set_position(const StatePosition& position) { position_ = position; }
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
            std::span<float> values) override {
    const std::vector<float>& all = values_.at({tensor.name, kind});
    std::copy_n(all.begin() + static_cast<std::ptrdiff_t>(first_element), values.size(),
                values.begin());
    elements_read_ += values.size();
  }
  std::uint64_t elements_read() const { return elements_read_; }

 private:
  StatePosition position_;
  std::map<std::pair<std::string, StateKind>, std::vector<float>> values_;
  std::uint64_t elements_read_ = 0;
};

}  // namespace sluice::test
