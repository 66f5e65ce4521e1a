// The ranks of a test with the stand-ins for NCCL and for the CUDA runtime. The ranks are threads
// of one process, and each rank has a GPU device. Thread rule: the comment at each function states
// the rule.
#pragma once

#include <gtest/gtest.h>

#include <barrier>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include <sluice/error.h>
#include <sluice/units.h>
#include "gpu/ranks/nccl_collectives.h"
#include "tests/contract/collectives_contract_fixture.h"
#include "tests/gpu/ranks/fake_nccl.h"

namespace sluice {

// Runs `body` on every rank, with one thread per rank, and waits for all threads. The threads wait
// for each other twice. Before they begin: a busy machine may start the last thread so late that a
// test's timeout passes. And before `body`: a rank whose body aborts would otherwise end another
// rank's connection.
inline void run_threads(std::uint32_t rank_count, const NcclOptions& options,
                        const RankBody& body) {
  const NcclId id = make_nccl_id(options.library);
  std::barrier<> together(rank_count);
  std::vector<std::thread> threads;
  for (std::uint32_t rank = 0; rank < rank_count; ++rank) {
    threads.emplace_back([&, rank] {
      const auto device = make_cuda_device({.memory_bytes = 256_MiB});
      together.arrive_and_wait();
      const auto collectives = make_nccl_collectives(*device, options, id, rank, rank_count);
      together.arrive_and_wait();
      body(*collectives, *device);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// This object sets an environment variable during its lifetime. If the value is empty, the
// constructor does not set the variable.
class EnvironmentValue {
 public:
  EnvironmentValue(const char* name, const char* value) : name_(name) {
    if (*value != 0) ::setenv(name, value, 1);
  }
  EnvironmentValue(const EnvironmentValue&) = delete;
  EnvironmentValue& operator=(const EnvironmentValue&) = delete;
  ~EnvironmentValue() { ::unsetenv(name_); }

 private:
  const char* const name_;
};
class Version : EnvironmentValue {
 public:
  explicit Version(const char* text) : EnvironmentValue("FAKE_NCCL_VERSION", text) {}
};
// Returns another name for the file of the stand-in. A library reads its version when the library
// is opened, and keeps this version. Each version therefore needs its own file name.
inline std::string fake_of(const std::string& dots) {
  const std::string path = FAKE_NCCL;
  return path.substr(0, path.rfind('/')) + dots + path.substr(path.rfind('/'));
}

// Any thread may call this function.
inline fake_nccl_counts take_counts() {
  return take_fake_nccl_counts(FAKE_NCCL);
}

// Waits for the stream, and returns the message of the error that the wait throws. If the wait
// throws nothing, the result is "no failure". Any thread may call this function.
inline std::string failure_of(Device& device, const Stream& stream) {
  try {
    device.synchronize(stream.id());
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kRanks);
    return error.what();
  }
  return "no failure";
}

}  // namespace sluice
