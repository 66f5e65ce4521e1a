// The requests that an application makes in a step: uses of units, and boundary activations. Plain
// data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include <sluice/device.h>
#include <sluice/export.h>
#include <sluice/ids.h>

namespace sluice {

enum class Pass : std::uint8_t { kForward, kBackward, kInference };

SLUICE_EXPORT std::string_view name_of(Pass pass);

enum class ActivationKind : std::uint8_t { kValue, kGradient };

// The name of a boundary activation. Boundary number b lies between forward use number b and the
// next forward use.
struct ActivationRef {
  std::uint32_t boundary = 0;
  std::uint32_t micro_batch = 0;
  ActivationKind kind = ActivationKind::kValue;

  bool operator==(const ActivationRef&) const = default;
};

SLUICE_EXPORT std::string describe(const ActivationRef& ref);

// The memory to which a lease refers.
struct LeasedUse {
  std::uint32_t use = 0;
  UnitId unit{};
  const std::byte* parameters = nullptr;  // device memory
  std::byte* gradients = nullptr;         // device memory; null except in backward of trained units
};

struct LeasedActivation {
  std::uint32_t access = 0;
  StreamId stream{};
  std::byte* data = nullptr;  // device memory
};

}  // namespace sluice
