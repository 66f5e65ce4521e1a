#include "tools/report/state_hash.h"

#include <algorithm>
#include <array>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>
#include "engine/engine_access.h"
#include "engine/plan/layout.h"
#include "tools/report/sha256.h"

namespace sluice {
namespace {

constexpr std::uint64_t kChunkElements = 64 << 10;

}  // namespace

std::string state_sha256(Engine& engine) {
  Sha256 hash;
  std::array<std::byte, 8> step{};
  for (std::size_t i = 0; i < step.size(); ++i)
    step[i] = static_cast<std::byte>(engine.applied_step() >> (8 * i));
  hash.update(step);
  std::vector<std::byte> chunk(kChunkElements * sizeof(float));
  for (const TensorPlace& tensor : engine.tensors()) {
    for (const StateKind kind :
         {StateKind::kParameter, StateKind::kMaster, StateKind::kExpAvg, StateKind::kExpAvgSq}) {
      const std::uint64_t element_bytes = kind == StateKind::kParameter
                                              ? layout_of(engine).format().parameter_bytes()
                                              : sizeof(float);
      const bool is_moment = kind == StateKind::kExpAvg || kind == StateKind::kExpAvgSq;
      const bool is_absent = is_moment && layout_of(engine).unit(tensor.unit).is_frozen;
      if (is_absent) std::ranges::fill(chunk, std::byte{0});  // hashed as zeros
      for (std::uint64_t first = 0; first < tensor.element_count; first += kChunkElements) {
        const std::uint64_t count = std::min(kChunkElements, tensor.element_count - first);
        const auto bytes = std::span(chunk).first(count * element_bytes);
        if (!is_absent) engine.read_state(tensor.id, kind, first, bytes);
        hash.update(bytes);
      }
    }
  }
  return hash.hex();
}

}  // namespace sluice
