#include "gpu/cuda/cuda_environment.h"

#include <cstdlib>
#include <string_view>

#include <fmt/format.h>

namespace sluice {
namespace {

constexpr const char* kLoading = "CUDA_MODULE_LOADING";
constexpr const char* kConnections = "CUDA_DEVICE_MAX_CONNECTIONS";
constexpr int kConnectionsWanted = 32;  // as many as CUDA takes

std::string value_of(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

}  // namespace

void prepare_cuda_environment() {
  (void)::setenv(kLoading, "EAGER", /*overwrite=*/0);
  (void)::setenv(kConnections, std::to_string(kConnectionsWanted).c_str(), /*overwrite=*/0);
}

CudaEnvironment look_at_cuda_environment() {
  const std::string loading = value_of(kLoading);
  const std::string connections = value_of(kConnections);
  CudaEnvironment found{
      .description = fmt::format("{}={}, {}={}", kLoading, loading, kConnections, connections),
      .advice = ""};
  if (loading != "EAGER") {
    found.description += "; a kernel that is loaded behind a collective can stop all ranks";
    found.advice = fmt::format("unset {}", kLoading);
  } else if (std::atoi(connections.c_str()) < kConnectionsWanted) {
    found.description += "; a copy that waits can hold up computation";
    found.advice = fmt::format("unset {}", kConnections);
  }
  return found;
}

}  // namespace sluice
