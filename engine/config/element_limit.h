// The largest number of elements that a model, or the tensors of a detached optimizer, may have.
//
// Thread rule: any thread.
#pragma once

#include <cstdint>

namespace sluice {

// Far more than any drives hold, and few enough for every size in bytes.
inline constexpr std::uint64_t kElementsMax = std::uint64_t{1} << 49;

}  // namespace sluice
