// Arrays for the optimizer's tests. The arrays hold random values from a seed. By default, the
// values are ordinary. With Values::kAny, there are also special values of every kind. The memory
// of the arrays begins at a chosen offset from an aligned address. Guard elements lie on both sides
// of the arrays. At first, all copies of one object are equal. So every error of a kernel shows as
// a difference between two copies. A write outside of the kernel's range also shows as a
// difference. The class is not thread-safe.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <sluice/dtype.h>
#include "cpu_optim/update.h"

namespace sluice {

enum class Values {
  kOrdinary,  // values that occur in training
  kAny,       // also denormals, zeros of both signs, infinities, NaNs, rounding ties, random bits
};

inline float special_value(std::mt19937& random) {
  static constexpr std::uint32_t kPatterns[] = {
      0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x00800000,
      0x3f800000, 0xbf800000, 0x3f808000, 0x3f807fff, 0x3f808001, 0x3f818000,
      0xbf808000, 0x7f7f7fff, 0x7f7f8000, 0x7f7fffff, 0xff7fffff, 0x7f800000,
      0xff800000, 0x7fc00000, 0xffc00001, 0x7f800001, 0x7fbfffff, 0x7fffffff,
      0xffffffff, 0x7fff8000, 0x00008000, 0x80008000, 0x5d5e0b6b, 0x1e3ce508};
  const std::uint32_t choice = random() % 64;
  return float_from_bits(choice < std::size(kPatterns) ? kPatterns[choice]
                                                       : static_cast<std::uint32_t>(random()));
}

inline float value(Values values, float scale, std::mt19937& random) {
  if (values == Values::kAny && random() % 2 == 0) return special_value(random);
  return scale * std::normal_distribution<float>()(random);
}

class OptimizerData {
 public:
  struct Options {
    MasterLayout master_layout = MasterLayout::kFp32;
    DType gradient_dtype = DType::kFp32;
    bool keeps_exp_avg = true;
    bool keeps_exp_avg_sq = true;
    std::uint64_t element_count = 0;
    std::uint64_t offset_elements = 0;
    Values values = Values::kOrdinary;
    std::uint32_t seed = 1;
  };

  explicit OptimizerData(const Options& options) : options_(options) {
    std::mt19937 random(options.seed);
    const std::size_t total = options.element_count + options.offset_elements + kGuardElements;
    for (std::size_t i = 0; i < total; ++i) {
      add_master(value(options.values, 0.1f, random));
      exp_avg_.push_back(value(options.values, 0.01f, random));
      exp_avg_sq_.push_back(std::fabs(value(options.values, 0.01f, random)));
      fp32_gradient_.push_back(0.0f);
      half_gradient_.push_back(0);
      set_gradient_at(i, value(options.values, 0.02f, random));
    }
  }

  UpdateArrays arrays() {
    const std::uint64_t offset = options_.offset_elements;
    const bool split = options_.master_layout == MasterLayout::kSplitBf16;
    const bool has_halves = options_.master_layout != MasterLayout::kFp32;
    return {.master_layout = options_.master_layout,
            .gradient_dtype = options_.gradient_dtype,
            .parameter = has_halves ? static_cast<void*>(high_.data() + offset)
                                    : static_cast<void*>(fp32_.data() + offset),
            .low = split ? low_.data() + offset : nullptr,
            .master = has_halves && !split ? fp32_.data() + offset : nullptr,
            .exp_avg = options_.keeps_exp_avg ? exp_avg_.data() + offset : nullptr,
            .exp_avg_sq = options_.keeps_exp_avg_sq ? exp_avg_sq_.data() + offset : nullptr,
            .gradient = options_.gradient_dtype == DType::kFp32
                            ? static_cast<const void*>(fp32_gradient_.data() + offset)
                            : static_cast<const void*>(half_gradient_.data() + offset),
            .element_count = options_.element_count};
  }

  void set_gradient(std::uint64_t i, float gradient) {
    set_gradient_at(i + options_.offset_elements, gradient);
  }

  void set_moments(std::uint64_t i, float exp_avg, float exp_avg_sq) {
    exp_avg_[i + options_.offset_elements] = exp_avg;
    exp_avg_sq_[i + options_.offset_elements] = exp_avg_sq;
  }

  void set_master(std::uint64_t i, float master) {
    const std::size_t at = i + options_.offset_elements;
    if (low_.empty()) {
      fp32_[at] = master;
    } else {
      high_[at] = split_master(master).high;
      low_[at] = split_master(master).low;
    }
  }

  float master(std::uint64_t i) const { return master_at(i + options_.offset_elements); }
  float exp_avg(std::uint64_t i) const { return exp_avg_[i + options_.offset_elements]; }
  float exp_avg_sq(std::uint64_t i) const { return exp_avg_sq_[i + options_.offset_elements]; }

  // Returns a text about the first difference. The text is empty if all bits are equal. Two NaNs
  // count as equal.
  std::string difference(const OptimizerData& other) const {
    for (std::size_t i = 0; i < exp_avg_.size(); ++i) {
      if (!same(master_at(i), other.master_at(i)))
        return text("master", i, master_at(i), other.master_at(i));
      if (!high_.empty() && !same_halves(i, other))
        return text("halves of master", i, master_at(i), other.master_at(i));
      if (!same(exp_avg_[i], other.exp_avg_[i]))
        return text("exp_avg", i, exp_avg_[i], other.exp_avg_[i]);
      if (!same(exp_avg_sq_[i], other.exp_avg_sq_[i]))
        return text("exp_avg_sq", i, exp_avg_sq_[i], other.exp_avg_sq_[i]);
    }
    return "";
  }

  static bool same(float a, float b) {
    return bits_from_float(a) == bits_from_float(b) || (std::isnan(a) && std::isnan(b));
  }

 private:
  static constexpr std::size_t kGuardElements = 17;

  void add_master(float master) {
    if (options_.master_layout == MasterLayout::kSplitBf16) {
      const SplitMaster halves = split_master(master);
      high_.push_back(halves.high);
      low_.push_back(halves.low);
      return;
    }
    fp32_.push_back(master);
    if (options_.master_layout == MasterLayout::kFp16) high_.push_back(fp16_from_float(master));
  }
  float master_at(std::size_t i) const {
    return low_.empty() ? fp32_[i] : join_master({high_[i], low_[i]});
  }
  void set_gradient_at(std::size_t i, float gradient) {
    fp32_gradient_[i] = gradient;
    half_gradient_[i] = options_.gradient_dtype == DType::kFp16 ? fp16_from_float(gradient)
                                                                : bf16_from_float(gradient);
  }
  // If a master is NaN, the two copies may hold different halves. In this case, the compute
  // parameter of each copy has to be NaN.
  bool same_halves(std::size_t i, const OptimizerData& other) const {
    if (std::isnan(master_at(i))) return is_nan_half(high_[i]) && is_nan_half(other.high_[i]);
    return high_[i] == other.high_[i] && (low_.empty() || low_[i] == other.low_[i]);
  }
  bool is_nan_half(std::uint16_t half) const {
    return std::isnan(low_.empty() ? float_from_fp16(half) : float_from_bf16(half));
  }
  std::string text(const char* what, std::size_t i, float a, float b) const {
    return fmt::format("{} of element {} (of {}): {:08x} against {:08x}", what,
                       static_cast<std::int64_t>(i - options_.offset_elements),
                       options_.element_count, bits_from_float(a), bits_from_float(b));
  }

  Options options_;
  std::vector<float> fp32_;
  std::vector<std::uint16_t> high_;  // empty if the master is the compute parameter
  std::vector<std::int16_t> low_;
  std::vector<float> exp_avg_;
  std::vector<float> exp_avg_sq_;
  std::vector<float> fp32_gradient_;
  std::vector<std::uint16_t> half_gradient_;
};

// Returns the gradient of an element in a step. There are eight kinds of gradient sequences, and
// consecutive elements get different kinds in turn. Elements of the same kind differ in magnitude
// and sign.
inline float adversarial_gradient(std::uint64_t element, std::uint64_t step, std::mt19937& random) {
  const float magnitude = std::ldexp(1.0f, static_cast<int>(element / 8 % 24) * 3 - 50);
  const auto since = static_cast<int>(step);
  switch (element % 8) {
    case 0: return step % 2 == 0 ? magnitude : -magnitude;              // cancels in exp_avg
    case 1: return step == 1 ? magnitude : 0.0f;                        // one spike, then decay
    case 2: return magnitude;                                           // constant
    case 3: return step % 100 == 0 ? magnitude : magnitude * 0x1p-20f;  // rare and huge
    case 4: return std::ldexp(magnitude, -std::min(since, 140));        // fades into denormals
    case 5: return std::ldexp(magnitude, since / 20 - 20);              // grows without end
    case 6: return float_from_bits(static_cast<std::uint32_t>(random()) & 0x807fffffu);  // denormal
    default: return magnitude * std::normal_distribution<float>()(random);
  }
}

inline constexpr MasterLayout kMasterLayouts[] = {MasterLayout::kFp32, MasterLayout::kSplitBf16,
                                                  MasterLayout::kFp16};

// Returns options for the data of an optimizer. The values are ordinary. The layout determines the
// type of the gradients.
inline OptimizerData::Options options_for(const UpdateCoefficients& coefficients,
                                          MasterLayout layout, std::uint64_t count) {
  return {.master_layout = layout,
          .gradient_dtype = layout == MasterLayout::kSplitBf16 ? DType::kBf16 : DType::kFp32,
          .keeps_exp_avg = keeps_exp_avg(coefficients),
          .keeps_exp_avg_sq = keeps_exp_avg_sq(coefficients),
          .element_count = count,
          .seed = static_cast<std::uint32_t>(count)};
}

// Coefficients of every optimizer.
inline std::vector<UpdateCoefficients> all_test_coefficients() {
  return {adam_coefficients({.weight_decay = 0.1}, 1e-3, 3, 0.37f),
          adam_l2_coefficients({.weight_decay = 0.1}, 1e-3, 3, 0.37f),
          lion_coefficients({.weight_decay = 0.1}, 1e-3, 0.37f),
          adagrad_coefficients({.weight_decay = 0.1}, 1e-3, 0.37f),
          sgd_coefficients({.weight_decay = 0.1}, 1e-3, 0.37f)};
}

inline AdamCoefficients test_coefficients(std::uint64_t step = 3, float gradient_scale = 0.37f) {
  return adam_coefficients({.weight_decay = 0.1}, 1e-3, step, gradient_scale);
}

}  // namespace sluice
