// The fixture of the collectives contract (collectives_contract.h). The fixture runs a case on
// every rank. The fixture has device memory that the host can fill. The fixture also computes
// values from rank and index. In each rank, one thread at a time uses the fixture.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include <sluice/collectives.h>
#include <sluice/dtype.h>
#include <sluice/units.h>
#include "tests/contract/device_contract_fixture.h"

namespace sluice {

using RankBody = std::function<void(Collectives& collectives, Device& device)>;

struct CollectivesFactory {
  std::string name;
  // Runs the body on every rank, or only on this process's rank.
  std::function<void(const RankBody& body)> run;
};

class CollectivesContract : public testing::TestWithParam<CollectivesFactory> {
 protected:
  static constexpr std::uint64_t kMemoryBytes = 256_MiB;

  void run(const RankBody& body) { GetParam().run(body); }
};

inline std::string collectives_factory_name(
    const testing::TestParamInfo<CollectivesFactory>& info) {
  return info.param.name;
}

// An array in device memory, and an array of the same size in host memory. push() and pull() copy
// between the two arrays.
class RankArray {
 public:
  RankArray(Device& device, std::uint64_t size_bytes)
      : device_(device), memory_(device, size_bytes, "a test"), host_(device, size_bytes) {}

  std::byte* data() const { return memory_.data(); }
  HostArray& host() { return host_; }
  void push(StreamId stream) {
    if (host_.size_bytes() != 0)
      device_.copy(memory_.data(), host_.data(), host_.size_bytes(), stream);
  }
  void pull(StreamId stream) {
    if (host_.size_bytes() != 0)
      device_.copy(host_.data(), memory_.data(), host_.size_bytes(), stream);
    device_.synchronize(stream);
  }

 private:
  Device& device_;
  DeviceBuffer memory_;
  HostArray host_;
};

inline std::byte rank_byte(std::uint32_t rank, std::uint64_t i) {
  return static_cast<std::byte>((rank + 1) * 73 + i * 29 + (i >> 8) * 7);
}

// The magnitudes are so uneven that fp32 cannot hold the exact sum of two values. So the sum of
// three values depends on the order of the additions. The sum of four values stays within the range
// of fp16. The cases call this function for each element and rank, so the function has no division.
inline float rank_value(std::uint32_t rank, std::uint64_t i, std::uint32_t salt = 0) {
  std::uint32_t key = (static_cast<std::uint32_t>(i) + 1) * 2654435761u;
  key ^= rank * 0x9e3779b1u + salt * 0x85ebca77u;
  key = (key ^ (key >> 15)) * 0x2c1b3c6du;
  key ^= key >> 13;
  const float mantissa = static_cast<float>(static_cast<int>((key >> 16) * 2001 >> 16) - 1000);
  return mantissa * ((key & 0xff) < 51 ? 0x1p4f : 0x1p-20f);
}

inline void save_value(DType type, std::byte* data, std::uint64_t i, float value) {
  if (type == DType::kFp32) {
    reinterpret_cast<float*>(data)[i] = value;
  } else {
    reinterpret_cast<std::uint16_t*>(data)[i] =
        type == DType::kBf16 ? bf16_from_float(value) : fp16_from_float(value);
  }
}
inline float load_value(DType type, const std::byte* data, std::uint64_t i) {
  if (type == DType::kFp32) return reinterpret_cast<const float*>(data)[i];
  const std::uint16_t bits = reinterpret_cast<const std::uint16_t*>(data)[i];
  return type == DType::kBf16 ? float_from_bf16(bits) : float_from_fp16(bits);
}
inline float rounded(DType type, float value) {
  std::byte bits[4];
  save_value(type, bits, 0, value);
  return load_value(type, bits, 0);
}
// Returns the result that a reduction must have. The values are added in rank order in fp32, and
// the sum is rounded once at the end.
inline float expected_sum(DType source, DType target, std::uint32_t ranks, std::uint64_t i,
                          std::uint32_t salt = 0) {
  float sum = rounded(source, rank_value(0, i, salt));
  for (std::uint32_t rank = 1; rank < ranks; ++rank)
    sum += rounded(source, rank_value(rank, i, salt));
  return rounded(target, sum);
}

}  // namespace sluice
