// Which GPUs a build has code for.
#include "gpu/cuda/cuda_architectures.h"

#include <gtest/gtest.h>

#include <string_view>

namespace sluice {
namespace {

struct CapabilityCase {
  std::string_view architectures;
  int major;
  int minor;
  bool runs;
};

TEST(CudaArchitectures, RunOnTheCapabilitiesThatCudaSays) {
  for (const auto& [architectures, major, minor, runs] : {
           CapabilityCase{"90-real", 9, 0, true},
           {"90-real", 8, 9, false},
           {"90-real", 10, 0, false},
           {"90-real", 7, 5, false},
           {"80-real", 8, 0, true},
           {"80-real", 8, 9, true},
           {"86-real", 8, 0, false},
           {"80-real", 9, 0, false},
           {"80-virtual", 7, 5, false},
           {"80-virtual", 8, 0, true},
           {"80-virtual", 12, 0, true},
           {"80", 8, 6, true},
           {"80", 12, 1, true},
           {"80", 7, 5, false},
           {"100-real", 10, 3, true},
           {"100-real", 12, 0, false},
           {"90a-real", 9, 0, true},
           {"90a-virtual", 10, 0, false},
           {"100a", 10, 3, false},
           {"100f-real", 10, 3, true},
           {"103f", 10, 0, false},
           {"100f-virtual", 12, 0, false},
           {"80-real, 90-real, 100-real, 120-virtual", 8, 9, true},
           {"80-real, 90-real, 100-real, 120-virtual", 12, 1, true},
           {"80-real, 90-real, 100-real, 120-virtual", 11, 0, false},
           {"80-real, 90-real, 100-real, 120-virtual", 7, 5, false},
       }) {
    EXPECT_EQ(runs_on_capability(architectures, major, minor), runs)
        << architectures << " on " << major << "." << minor;
  }
}

TEST(CudaArchitectures, NamesThatSayNoCapabilityRefuseNothing) {
  for (const std::string_view name :
       {"native", "all", "all-major", "80-real, native", "90x-real", "90-later", ""})
    EXPECT_TRUE(runs_on_capability(name, 7, 5)) << name;
}

}  // namespace
}  // namespace sluice
