// Test cases for updates by DeviceMath. The moments are in bf16, or are stored as 8-bit codes. The
// cases are for test programs that instantiate DeviceMathTest (device_math_cases.h).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "cpu_optim/moment_codec.h"
#include "tests/gpu/math/device_math_cases.h"

namespace sluice {

// A moment as codes. The codes are made from random values.
struct CodedMoment {
  CodedMoment(CodeBook book, const std::vector<std::byte>& values, std::uint64_t count)
      : codes(count), scales((count + 255) / 256 * sizeof(float)) {
    std::vector<float> moments(count);
    std::memcpy(moments.data(), values.data(), count * sizeof(float));
    for (float& moment : moments) {
      if (!std::isfinite(moment)) moment = 1;
      if (book == CodeBook::kUnsigned) moment = std::fabs(moment);
    }
    encode_moments(book, moments, view());
  }
  MomentCodes view() {
    return {.codes = reinterpret_cast<std::uint8_t*>(codes.data()),
            .scales = reinterpret_cast<float*>(scales.data())};
  }

  std::vector<std::byte> codes;
  std::vector<std::byte> scales;
};

TEST_P(DeviceMathTest, UpdatesCodesAsTheCpu) {
  for (const DType parameter_type : kMathTypes) {
    for (const DeviceCoefficients& c : all_device_coefficients()) {
      for (const std::uint64_t count : {9ull, 256ull, 1003ull, 5120ull}) {
        UpdateState state{parameter_type,
                          DType::kBf16,
                          random_values(parameter_type, count),
                          random_values(DType::kFp16, count),
                          random_values(DType::kFp32, count),
                          {},
                          {},
                          random_values(DType::kBf16, count)};
        CodedMoment m(CodeBook::kSigned, random_values(DType::kFp32, count), count);
        CodedMoment v(CodeBook::kUnsigned, random_values(DType::kFp32, count), count);
        const OnDevice parameter = upload(state.parameter);
        const OnDevice low = upload(state.low);
        const OnDevice master = upload(state.master);
        const OnDevice m_codes = upload(m.codes);
        const OnDevice m_scales = upload(m.scales);
        const OnDevice v_codes = upload(v.codes);
        const OnDevice v_scales = upload(v.scales);
        const OnDevice gradient = upload(state.gradient);
        const OnDevice flag = upload(Bytes(4));
        DeviceUpdate update{.parameter_type = parameter_type,
                            .gradient_type = DType::kBf16,
                            .parameter = parameter.memory.data(),
                            .low = low.as<std::int16_t>(),
                            .master = master.as<float>(),
                            .gradient = gradient.memory.data(),
                            .element_count = count,
                            .non_finite = flag.as<std::uint32_t>()};
        UpdateArrays arrays = state.arrays(c, count);
        arrays.exp_avg = arrays.exp_avg_sq = nullptr;
        if (keeps_exp_avg(c)) {
          update.exp_avg_codes = m_codes.as<std::uint8_t>();
          update.exp_avg_scales = m_scales.as<float>();
          arrays.exp_avg_codes = m.view();
        }
        if (keeps_exp_avg_sq(c)) {
          update.exp_avg_sq_codes = v_codes.as<std::uint8_t>();
          update.exp_avg_sq_scales = v_scales.as<float>();
          arrays.exp_avg_sq_codes = v.view();
        }
        math().update(c, update, stream());
        const NewState expected = update_reference(c, arrays);
        SCOPED_TRACE(testing::Message() << name_of(parameter_type) << " optimizer " << c.index()
                                        << " count " << count);
        expect_same(parameter_type, download(parameter), state.parameter);
        expect_same_low(parameter_type, state.parameter, download(low), state.low);
        expect_same(DType::kFp32, download(master), state.master);
        EXPECT_EQ(download(m_codes), m.codes);
        EXPECT_EQ(download(m_scales), m.scales);
        EXPECT_EQ(download(v_codes), v.codes);
        EXPECT_EQ(download(v_scales), v.scales);
        EXPECT_EQ(flag_of(flag), expected == NewState::kFinite ? 0u : 1u);
      }
    }
  }
}

// The moments are in bf16. The runs begin at different places in a tensor.
TEST_P(DeviceMathTest, UpdatesBf16MomentsAsTheCpu) {
  for (const DType parameter_type : kMathTypes) {
    for (const DeviceCoefficients& c : all_device_coefficients()) {
      for (const MomentRounding rounding :
           {MomentRounding{.key = 3, .first_element = 512},
            MomentRounding{.key = 0xfedcba9876543210u, .first_element = (1ull << 32) - 256}}) {
        constexpr std::uint64_t kCount = 1003;
        UpdateState state{parameter_type,
                          DType::kBf16,
                          random_values(parameter_type, kCount),
                          random_values(DType::kFp16, kCount),
                          random_values(DType::kFp32, kCount),
                          {},
                          {},
                          random_values(DType::kBf16, kCount)};
        Bytes m = random_values(DType::kBf16, kCount);
        Bytes v = random_values(DType::kBf16, kCount);
        const OnDevice parameter = upload(state.parameter);
        const OnDevice low = upload(state.low);
        const OnDevice master = upload(state.master);
        const OnDevice m_device = upload(m);
        const OnDevice v_device = upload(v);
        const OnDevice gradient = upload(state.gradient);
        const OnDevice flag = upload(Bytes(4));
        UpdateArrays arrays = state.arrays(c, kCount);
        arrays.exp_avg = arrays.exp_avg_sq = nullptr;
        arrays.rounding = rounding;
        if (keeps_exp_avg(c)) arrays.exp_avg_bf16 = reinterpret_cast<std::uint16_t*>(m.data());
        if (keeps_exp_avg_sq(c))
          arrays.exp_avg_sq_bf16 = reinterpret_cast<std::uint16_t*>(v.data());
        math().update(
            c,
            {.parameter_type = parameter_type,
             .gradient_type = DType::kBf16,
             .parameter = parameter.memory.data(),
             .low = low.as<std::int16_t>(),
             .master = master.as<float>(),
             .exp_avg_bf16 = keeps_exp_avg(c) ? m_device.as<std::uint16_t>() : nullptr,
             .exp_avg_sq_bf16 = keeps_exp_avg_sq(c) ? v_device.as<std::uint16_t>() : nullptr,
             .rounding = rounding,
             .gradient = gradient.memory.data(),
             .element_count = kCount,
             .non_finite = flag.as<std::uint32_t>()},
            stream());
        const NewState expected = update_reference(c, arrays);
        SCOPED_TRACE(testing::Message() << name_of(parameter_type) << " optimizer " << c.index());
        expect_same(parameter_type, download(parameter), state.parameter);
        expect_same_low(parameter_type, state.parameter, download(low), state.low);
        expect_same(DType::kFp32, download(master), state.master);
        expect_same(DType::kBf16, download(m_device), m);
        expect_same(DType::kBf16, download(v_device), v);
        EXPECT_EQ(flag_of(flag), expected == NewState::kFinite ? 0u : 1u);
      }
    }
  }
}

}  // namespace sluice
