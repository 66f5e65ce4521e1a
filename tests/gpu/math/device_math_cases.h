// Test cases of DeviceMath for any device. The results must have the same bits as the results of
// the scalar definitions on the CPU. A test program includes this header once and instantiates
// DeviceMathTest with the program's machines. Thread rule: one thread.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "cpu_optim/gradient_ops.h"
#include "cpu_optim/optimizer_options.h"
#include "cpu_optim/update.h"
#include "gpu/math/device_math.h"
#include "tests/contract/device_contract_fixture.h"

namespace sluice {

struct MathMachine {
  std::unique_ptr<Device> device;
  std::unique_ptr<DeviceMath> math;
};

struct MathMachineFactory {
  std::string name;
  std::function<std::string()> why_not;  // empty when make() works
  std::function<MathMachine()> make;
};

// Most lengths are near 8 (the elements of one access) or near 256 (the elements of one leaf). The
// longest length needs many blocks of threads.
inline constexpr std::uint64_t kMathCounts[] = {1, 7, 8, 9, 255, 256, 257, 1003, 70001};
inline constexpr DType kMathTypes[] = {DType::kFp32, DType::kBf16, DType::kFp16};

class DeviceMathTest : public testing::TestWithParam<MathMachineFactory> {
 protected:
  using Bytes = std::vector<std::byte>;

  void SetUp() override {
    if (const std::string why = GetParam().why_not(); !why.empty()) GTEST_SKIP() << why;
    machine_ = GetParam().make();
    stream_ = Stream(device(), "test");
  }
  void TearDown() override { stream_ = Stream(); }

  Device& device() { return *machine_.device; }
  DeviceMath& math() { return *machine_.math; }
  StreamId stream() const { return stream_.id(); }

  // An array on the device. A page with a pattern follows the array. No code may write to this
  // page.
  struct OnDevice {
    DeviceBuffer memory;
    std::uint64_t size_bytes = 0;

    template <class T>
    T* as() const {
      return reinterpret_cast<T*>(memory.data());
    }
  };
  OnDevice upload(const Bytes& bytes) {
    OnDevice made{DeviceBuffer(device(), bytes.size() + 4096, "test"), bytes.size()};
    HostArray staging(device(), bytes.size() + 4096);
    std::memset(staging.data(), 0x5c, staging.size_bytes());
    std::memcpy(staging.data(), bytes.data(), bytes.size());
    device().copy(made.memory.data(), staging.data(), staging.size_bytes(), stream());
    device().synchronize(stream());
    return made;
  }
  Bytes download(const OnDevice& array) {
    HostArray staging(device(), array.size_bytes + 4096);
    device().copy(staging.data(), array.memory.data(), staging.size_bytes(), stream());
    device().synchronize(stream());
    for (std::uint64_t i = array.size_bytes; i < staging.size_bytes(); ++i)
      EXPECT_EQ(staging.data()[i], std::byte{0x5c}) << "written beyond the end, at " << i;
    return {staging.data(), staging.data() + array.size_bytes};
  }

  // Returns values of many magnitudes, and zeros. If `with_special` is true, there are also
  // infinities and NaNs.
  Bytes random_values(DType type, std::uint64_t count, bool with_special = false) {
    Bytes bytes(count * size_of(type));
    std::uniform_int_distribution<int> exponent(-149, with_special           ? 127
                                                      : type == DType::kFp16 ? 14
                                                                             : 20);
    std::uniform_real_distribution<float> mantissa(-2.0f, 2.0f);
    for (std::uint64_t i = 0; i < count; ++i) {
      float value = i % 17 == 3 ? 0.0f : std::ldexp(mantissa(random_), exponent(random_));
      if (with_special && i % 29 == 5) value = INFINITY;
      if (with_special && i % 31 == 7) value = NAN;
      put(type, bytes, i, value);
    }
    return bytes;
  }
  static void put(DType type, Bytes& bytes, std::uint64_t i, float value) {
    const std::uint16_t half =
        type == DType::kBf16 ? bf16_from_float(value) : fp16_from_float(value);
    if (type == DType::kFp32) {
      std::memcpy(bytes.data() + 4 * i, &value, 4);
    } else {
      std::memcpy(bytes.data() + 2 * i, &half, 2);
    }
  }
  static float get(DType type, const Bytes& bytes, std::uint64_t i) {
    float value = 0;
    std::uint16_t half = 0;
    if (type == DType::kFp32) {
      std::memcpy(&value, bytes.data() + 4 * i, 4);
      return value;
    }
    std::memcpy(&half, bytes.data() + 2 * i, 2);
    return type == DType::kBf16 ? float_from_bf16(half) : float_from_fp16(half);
  }
  // Expects equal bits, unless both values are NaN.
  static void expect_same(DType type, const Bytes& actual, const Bytes& expected) {
    ASSERT_EQ(actual.size(), expected.size());
    for (std::uint64_t i = 0; i < actual.size() / size_of(type); ++i) {
      const bool same = std::memcmp(actual.data() + i * size_of(type),
                                    expected.data() + i * size_of(type), size_of(type)) == 0;
      ASSERT_TRUE(same || (std::isnan(get(type, actual, i)) && std::isnan(get(type, expected, i))))
          << "element " << i << ": " << get(type, actual, i) << " instead of "
          << get(type, expected, i);
    }
  }

  // Expects that the remainders of all masters are equal, except for masters that are NaN.
  // Processors make different NaNs, and the remainder holds the low bits of a NaN.
  static void expect_same_low(DType type, const Bytes& parameter, const Bytes& actual,
                              const Bytes& expected) {
    ASSERT_EQ(actual.size(), expected.size());
    for (std::uint64_t i = 0; i < actual.size() / sizeof(std::int16_t); ++i) {
      const bool is_nan = type == DType::kBf16 && std::isnan(get(type, parameter, i));
      ASSERT_TRUE(is_nan || std::memcmp(actual.data() + 2 * i, expected.data() + 2 * i, 2) == 0)
          << "the remainder of element " << i;
    }
  }

  std::uint32_t flag_of(const OnDevice& flag) {
    std::uint32_t value = 0;
    std::memcpy(&value, download(flag).data(), sizeof(value));
    return value;
  }

  MathMachine machine_;
  Stream stream_;
  std::mt19937 random_{7};
};

inline std::string math_machine_name(const testing::TestParamInfo<MathMachineFactory>& info) {
  return info.param.name;
}

TEST_P(DeviceMathTest, AccumulatesAsTheCpu) {
  for (const DType type : kMathTypes) {
    for (const std::uint64_t count : kMathCounts) {
      Bytes expected = random_values(type, count, /*with_special=*/true);
      const Bytes addend = random_values(type, count);
      const OnDevice target = upload(expected);
      const OnDevice source = upload(addend);
      math().accumulate(type, target.memory.data(), source.memory.data(), count, stream());
      accumulate_gradient_reference(type, expected.data(), addend.data(), count);
      expect_same(type, download(target), expected);
    }
  }
}

TEST_P(DeviceMathTest, SquaredNormHasTheBitsOfTheCpu) {
  for (const DType type : kMathTypes) {
    for (const std::uint64_t count : kMathCounts) {
      const Bytes values = random_values(type, count);
      const std::uint64_t leaf_count = (count + kNormLeafElements - 1) / kNormLeafElements;
      const OnDevice gradient = upload(values);
      const OnDevice leaves = upload(Bytes(leaf_count * sizeof(double)));
      math().norm_leaves(type, gradient.memory.data(), count, leaves.as<double>(), stream());
      const Bytes sums = download(leaves);
      NormAccumulator actual;
      for (std::uint64_t i = 0; i < leaf_count; ++i) {
        double leaf = 0;
        std::memcpy(&leaf, sums.data() + i * sizeof(double), sizeof(leaf));
        actual.add(leaf);
      }
      NormAccumulator expected;
      add_squared_norm_reference(type, values.data(), count, expected);
      EXPECT_EQ(actual.sum_of_squares(), expected.sum_of_squares()) << name_of(type) << count;
    }
  }
}

TEST_P(DeviceMathTest, DigestsNoticeEveryChange) {
  const auto digests_of = [&](const Bytes& values) {
    const OnDevice source = upload(values);
    const OnDevice target = upload(Bytes((values.size() + kDigestBytes - 1) / kDigestBytes * 8));
    math().digest(source.memory.data(), values.size(), target.as<std::uint64_t>(), stream());
    return download(target);
  };
  for (const std::uint64_t size : {2ul, 14ul, 16ul, 130ul, 8190ul, 8192ul, 8194ul, 40'002ul}) {
    SCOPED_TRACE(size);
    Bytes values(size);
    for (std::byte& value : values) value = static_cast<std::byte>(random_());
    const Bytes before = digests_of(values);
    EXPECT_EQ(digests_of(values), before) << "the same values";
    for (int i = 0; i < 40; ++i) {
      const std::uint64_t at = i == 0 ? 0 : i == 1 ? size - 1 : random_() % size;
      const Bytes old = values;
      values[at] ^= static_cast<std::byte>(1u << random_() % 8);
      const Bytes after = digests_of(values);
      values = old;
      const std::uint64_t piece = at / kDigestBytes * 8;
      for (std::uint64_t other = 0; other < before.size(); other += 8)
        EXPECT_EQ(std::memcmp(after.data() + other, before.data() + other, 8) != 0, other == piece)
            << "a bit of byte " << at << ", digest " << other / 8;
    }
    if (size < 130) continue;
    Bytes swapped = values;
    std::swap_ranges(swapped.begin(), swapped.begin() + 8, swapped.begin() + 16);
    EXPECT_NE(digests_of(swapped), before) << "two words have changed places";
  }
}

// Coefficients of every optimizer. The list has coefficients of several steps only for Adam. The
// coefficients of the other optimizers do not depend on the step.
inline std::vector<DeviceCoefficients> all_device_coefficients() {
  std::vector<DeviceCoefficients> all = {lion_coefficients({.weight_decay = 0.1}, 1e-3, 0.37f),
                                         adagrad_coefficients({.weight_decay = 0.1}, 1e-3, 0.37f),
                                         sgd_coefficients({.weight_decay = 0.1}, 1e-3, 0.37f)};
  for (const std::uint64_t step : {1u, 1000u}) {
    all.emplace_back(adam_coefficients({.weight_decay = 0.1}, 1e-3, step, 0.37f));
    all.emplace_back(adam_l2_coefficients({.weight_decay = 0.1}, 1e-3, step, 0.37f));
  }
  return all;
}

// The state of one update, in host arrays.
struct UpdateState {
  DType parameter_type;
  DType gradient_type;
  std::vector<std::byte> parameter, low, master, exp_avg, exp_avg_sq, gradient;

  UpdateArrays arrays(const UpdateCoefficients& c, std::uint64_t count) {
    return {
        .master_layout = parameter_type == DType::kFp32   ? MasterLayout::kFp32
                         : parameter_type == DType::kBf16 ? MasterLayout::kSplitBf16
                                                          : MasterLayout::kFp16,
        .gradient_dtype = gradient_type,
        .parameter = parameter.data(),
        .low =
            parameter_type == DType::kBf16 ? reinterpret_cast<std::int16_t*>(low.data()) : nullptr,
        .master =
            parameter_type == DType::kFp16 ? reinterpret_cast<float*>(master.data()) : nullptr,
        .exp_avg = keeps_exp_avg(c) ? reinterpret_cast<float*>(exp_avg.data()) : nullptr,
        .exp_avg_sq = keeps_exp_avg_sq(c) ? reinterpret_cast<float*>(exp_avg_sq.data()) : nullptr,
        .gradient = gradient.data(),
        .element_count = count};
  }
};

TEST_P(DeviceMathTest, UpdatesAsTheCpu) {
  for (const DType parameter_type : kMathTypes) {
    for (const DType gradient_type : kMathTypes) {
      for (const DeviceCoefficients& c : all_device_coefficients()) {
        for (const std::uint64_t count : {9ull, 1003ull, 20001ull}) {
          UpdateState state{parameter_type,
                            gradient_type,
                            random_values(parameter_type, count),
                            random_values(DType::kFp16, count),
                            random_values(DType::kFp32, count),
                            random_values(DType::kFp32, count),
                            random_values(DType::kFp32, count),
                            random_values(gradient_type, count)};
          for (std::uint64_t i = 0; i < count; ++i)  // a variance is not negative
            put(DType::kFp32, state.exp_avg_sq, i,
                std::fabs(get(DType::kFp32, state.exp_avg_sq, i)));
          const OnDevice parameter = upload(state.parameter);
          const OnDevice low = upload(state.low);
          const OnDevice master = upload(state.master);
          const OnDevice exp_avg = upload(state.exp_avg);
          const OnDevice exp_avg_sq = upload(state.exp_avg_sq);
          const OnDevice gradient = upload(state.gradient);
          const OnDevice flag = upload(Bytes(4));
          math().update(c,
                        {.parameter_type = parameter_type,
                         .gradient_type = gradient_type,
                         .parameter = parameter.memory.data(),
                         .low = low.as<std::int16_t>(),
                         .master = master.as<float>(),
                         .exp_avg = keeps_exp_avg(c) ? exp_avg.as<float>() : nullptr,
                         .exp_avg_sq = keeps_exp_avg_sq(c) ? exp_avg_sq.as<float>() : nullptr,
                         .gradient = gradient.memory.data(),
                         .element_count = count,
                         .non_finite = flag.as<std::uint32_t>()},
                        stream());
          const NewState expected = update_reference(c, state.arrays(c, count));
          SCOPED_TRACE(testing::Message()
                       << name_of(parameter_type) << " " << name_of(gradient_type) << " optimizer "
                       << c.index() << " count " << count);
          expect_same(parameter_type, download(parameter), state.parameter);
          expect_same_low(parameter_type, state.parameter, download(low), state.low);
          expect_same(DType::kFp32, download(master), state.master);
          expect_same(DType::kFp32, download(exp_avg), state.exp_avg);
          expect_same(DType::kFp32, download(exp_avg_sq), state.exp_avg_sq);
          EXPECT_EQ(flag_of(flag), expected == NewState::kFinite ? 0u : 1u);
        }
      }
    }
  }
}

// One master is too large for its parameter's type. This master belongs to the last access, which
// has fewer elements than the other accesses.
TEST_P(DeviceMathTest, NoticesAMasterThatIsNotFinite) {
  const SgdCoefficients c{.gradient_scale = 1, .l2 = 0, .momentum = 0, .learning_rate = -1};
  for (const DType type : kMathTypes) {
    // The number `largest` is still finite in the parameter's type. The number `beyond` is
    // infinite, or becomes infinite by rounding to the parameter's type.
    const float largest = type == DType::kFp32   ? 3.4e38f
                          : type == DType::kBf16 ? 3.39e38f
                                                 : 65519.0f;
    const float beyond = type == DType::kFp32   ? INFINITY
                         : type == DType::kBf16 ? 3.4e38f
                                                : 65520.0f;
    for (const bool overflows : {false, true}) {
      constexpr std::uint64_t kCount = 11;
      const OnDevice parameter = upload(Bytes(kCount * size_of(type)));
      const OnDevice low = upload(Bytes(kCount * 2));
      const OnDevice master = upload(Bytes(kCount * 4));
      const OnDevice exp_avg = upload(Bytes(kCount * 4));
      Bytes gradient(kCount * 4);
      put(DType::kFp32, gradient, kCount - 1, overflows ? beyond : largest);
      const OnDevice gradients = upload(gradient);
      const OnDevice flag = upload(Bytes(4));
      math().update(c,
                    {.parameter_type = type,
                     .gradient_type = DType::kFp32,
                     .parameter = parameter.memory.data(),
                     .low = low.as<std::int16_t>(),
                     .master = master.as<float>(),
                     .exp_avg = exp_avg.as<float>(),
                     .gradient = gradients.memory.data(),
                     .element_count = kCount,
                     .non_finite = flag.as<std::uint32_t>()},
                    stream());
      EXPECT_EQ(flag_of(flag), overflows ? 1u : 0u) << name_of(type);
    }
  }
}

// One moment is infinite, but its master is finite. This moment belongs to the last access, which
// has fewer elements than the other accesses.
TEST_P(DeviceMathTest, NoticesAMomentThatIsNotFinite) {
  for (const DeviceCoefficients& c : {DeviceCoefficients(adam_coefficients({}, 1e-3, 1, 1.0f)),
                                      DeviceCoefficients(adam_l2_coefficients({}, 1e-3, 1, 1.0f)),
                                      DeviceCoefficients(lion_coefficients({}, 1e-3, 2.0f)),
                                      DeviceCoefficients(adagrad_coefficients({}, 1e-3, 1.0f))}) {
    for (const bool overflows : {false, true}) {
      constexpr std::uint64_t kCount = 11;
      const OnDevice parameter = upload(Bytes(kCount * 4));
      const OnDevice exp_avg = upload(Bytes(kCount * 4));
      const OnDevice exp_avg_sq = upload(Bytes(kCount * 4));
      Bytes gradient(kCount * 4);
      put(DType::kFp32, gradient, kCount - 1, overflows ? -3e38f : -1.0f);
      const OnDevice gradients = upload(gradient);
      const OnDevice flag = upload(Bytes(4));
      math().update(c,
                    {.parameter = parameter.memory.data(),
                     .exp_avg = keeps_exp_avg(c) ? exp_avg.as<float>() : nullptr,
                     .exp_avg_sq = keeps_exp_avg_sq(c) ? exp_avg_sq.as<float>() : nullptr,
                     .gradient = gradients.memory.data(),
                     .element_count = kCount,
                     .non_finite = flag.as<std::uint32_t>()},
                    stream());
      EXPECT_EQ(flag_of(flag), overflows ? 1u : 0u) << "optimizer " << c.index();
    }
  }
}

}  // namespace sluice
