// The library as a program loads and unloads it. This program is not linked with it.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <string>

#include "capi/sluice.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

// The functions of the library under their own names.
struct Library {
  void* const handle = ::dlopen(SLUICE_TEST_LIBRARY, RTLD_NOW | RTLD_LOCAL);
#define SLUICE_TEST_FUNCTION(name) \
  decltype(&::name) name = reinterpret_cast<decltype(&::name)>(::dlsym(handle, #name))
  SLUICE_TEST_FUNCTION(sluice_engine_create);
  SLUICE_TEST_FUNCTION(sluice_engine_destroy);
  SLUICE_TEST_FUNCTION(sluice_initialize);
  SLUICE_TEST_FUNCTION(sluice_begin_step);
  SLUICE_TEST_FUNCTION(sluice_acquire);
  SLUICE_TEST_FUNCTION(sluice_release);
  SLUICE_TEST_FUNCTION(sluice_finish_step);
  SLUICE_TEST_FUNCTION(sluice_close);
  SLUICE_TEST_FUNCTION(sluice_last_error);
#undef SLUICE_TEST_FUNCTION
};

int ones(void*, std::uint32_t, std::uint64_t, float* values, std::uint64_t count) {
  std::fill(values, values + count, 1.0f);
  return 0;
}

// The update is large enough for threads of oneTBB.
void train_a_step(const Library& library, const std::string& directory) {
  const std::uint64_t shape[1] = {3'000'000};
  const sluice_tensor tensor{"weight", shape, 1, 1};
  const sluice_unit unit{"only", &tensor, 1, 0};
  sluice_model model{};
  model.units = &unit;
  model.unit_count = 1;
  model.concurrent_leases = 1;
  const std::string config = R"({"precision": {"parameters": "fp32"}, "run": {"threads": 4},
      "memory": {"device": "64MiB", "host": "64MiB"}, "storage": {"paths": [")" +
                             directory + R"("]},
      "placement": {"parameters": "nvme", "optimizer": "nvme"}})";
  sluice_engine* engine = nullptr;
  ASSERT_EQ(library.sluice_engine_create(config.c_str(), &model, &engine), SLUICE_OK)
      << library.sluice_last_error();
  ASSERT_EQ(library.sluice_initialize(engine, ones, nullptr), SLUICE_OK);
  sluice_step_options options{};
  options.learning_rate = 0.01;
  options.micro_batches = 1;
  ASSERT_EQ(library.sluice_begin_step(engine, &options), SLUICE_OK);
  for (const sluice_pass pass : {SLUICE_FORWARD, SLUICE_BACKWARD}) {
    sluice_lease lease{};
    ASSERT_EQ(library.sluice_acquire(engine, 0, pass, &lease), SLUICE_OK);
    ASSERT_EQ(library.sluice_release(engine, lease.id), SLUICE_OK);
  }
  sluice_step_report report{};
  ASSERT_EQ(library.sluice_finish_step(engine, nullptr, &report), SLUICE_OK);
  ASSERT_EQ(library.sluice_close(engine), SLUICE_OK);
  library.sluice_engine_destroy(engine);
}

bool is_mapped(const std::string& file) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);)
    if (line.find(file) != std::string::npos) return true;
  return false;
}

// Threads of oneTBB live on after the last engine: the library and oneTBB stay for them.
TEST(CApiLoaded, TheLibraryStaysAfterDlclose) {
  const TempDirectory directory;
  for (int round = 0; round < 2; ++round) {
    const Library library;
    ASSERT_NE(library.handle, nullptr) << ::dlerror();
    train_a_step(library, directory.path());
    if (HasFatalFailure()) return;
    EXPECT_EQ(::dlclose(library.handle), 0);
    ASSERT_TRUE(is_mapped("/libsluice.so"));
    ASSERT_TRUE(is_mapped("/libtbb.so"));
  }
}

}  // namespace
}  // namespace sluice::test
