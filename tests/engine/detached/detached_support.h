// The tensors of a detached optimizer, and a copy of the tensors' state in plain arrays. The plain
// arrays are the oracle. The call update_reference() updates the plain arrays.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <sluice/detached_optimizer.h>
#include <sluice/units.h>
#include "base/moment_rounding.h"
#include "base/optimizer_math.h"
#include "cpu_optim/moment_codec.h"
#include "cpu_optim/optimizer_options.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {

// One tensor of the application, and the state of this tensor. The scalar definition computes this
// state.
struct DetachedState {
  DType dtype = DType::kFp32;
  std::vector<std::byte> parameter;
  std::vector<std::byte> oracle_parameter;
  std::vector<float> gradient;
  std::vector<float> master;
  std::vector<std::int16_t> low;
  std::vector<float> exp_avg;
  std::vector<float> exp_avg_sq;
  // These vectors hold moments in bf16 or in 8-bit codes. For such moments, exp_avg and exp_avg_sq
  // hold the decoded values.
  std::vector<std::uint16_t> exp_avg_bf16 = {}, exp_avg_sq_bf16 = {};
  std::vector<std::uint8_t> exp_avg_codes = {}, exp_avg_sq_codes = {};
  std::vector<float> exp_avg_scales = {}, exp_avg_sq_scales = {};
  std::uint64_t steps = 0;

  std::uint64_t count() const { return gradient.size(); }
};

inline void set(DetachedState& tensor, std::uint64_t i, float value) {
  if (tensor.dtype == DType::kFp32) {
    std::memcpy(tensor.parameter.data() + 4 * i, &value, 4);
  } else {
    const std::uint16_t bits =
        tensor.dtype == DType::kBf16 ? bf16_from_float(value) : fp16_from_float(value);
    std::memcpy(tensor.parameter.data() + 2 * i, &bits, 2);
  }
}

class DetachedTest : public testing::Test {
 protected:
  Config config(OptimizerKind kind, TierChoice tier) {
    Config made;
    made.optimizer.kind = kind;
    made.optimizer.state = moments_;
    made.optimizer.rounding_seed = kRoundingSeed;
    made.placement.optimizer = tier;
    made.memory.host_bytes = 1_MiB;
    made.storage.paths = {directory_.path()};
    made.storage.block_elements = 4096;
    made.threads = 2;
    return made;
  }

  void make_tensors(DType dtype, const std::vector<std::uint64_t>& counts) {
    tensors_.clear();
    for (const std::uint64_t count : counts) {
      DetachedState tensor{.dtype = dtype,
                           .parameter = std::vector<std::byte>(count * size_of(dtype)),
                           .oracle_parameter = {},
                           .gradient = std::vector<float>(count),
                           .master = std::vector<float>(count),
                           .low = std::vector<std::int16_t>(count),
                           .exp_avg = std::vector<float>(count),
                           .exp_avg_sq = std::vector<float>(count)};
      for (std::uint64_t i = 0; i < count; ++i) set(tensor, i, normal_(random_));
      tensors_.push_back(std::move(tensor));
      adopt(tensors_.back());
    }
  }

  // The oracle copies the application's parameters. If the parameter of an element has not changed,
  // the element's master does not change.
  void adopt(DetachedState& tensor) {
    const std::size_t bytes = size_of(tensor.dtype);
    const bool is_first = tensor.oracle_parameter.empty();
    if (is_first) tensor.oracle_parameter.resize(tensor.parameter.size());
    for (std::uint64_t i = 0; i < tensor.count(); ++i) {
      const bool is_same = std::memcmp(tensor.parameter.data() + bytes * i,
                                       tensor.oracle_parameter.data() + bytes * i, bytes) == 0;
      if (is_same && !is_first) continue;
      tensor.low[i] = 0;
      std::uint16_t bits = 0;
      if (bytes == 2) std::memcpy(&bits, tensor.parameter.data() + 2 * i, 2);
      if (tensor.dtype == DType::kFp16) tensor.master[i] = float_from_fp16(bits);
    }
    tensor.oracle_parameter = tensor.parameter;
  }

  std::vector<DetachedTensor> description() const {
    std::vector<DetachedTensor> made;
    for (std::size_t i = 0; i < tensors_.size(); ++i)
      made.push_back({.name = fmt::format("t{}", i),
                      .element_count = tensors_[i].count(),
                      .parameter = tensors_[i].dtype});
    return made;
  }

  // Returns the next update of tensor `id`. The oracle makes this update immediately.
  DetachedUpdate next(OptimizerKind kind, std::uint32_t id) {
    DetachedState& tensor = tensors_[id];
    for (float& g : tensor.gradient) g = normal_(random_);
    adopt(tensor);
    DetachedUpdate update{.tensor = id,
                          .parameter = tensor.parameter.data(),
                          .gradient = tensor.gradient.data(),
                          .step = ++tensor.steps,
                          .learning_rate = 1e-2 * (1 + id),
                          .adam = {.beta1 = 0.8, .weight_decay = 0.1},
                          .momentum = 0.7,
                          .gradient_scale = 0.5};
    const OptimizerOptions options{.kind = kind, .adam = update.adam, .momentum = update.momentum};
    UpdateArrays arrays{.parameter = tensor.oracle_parameter.data(),
                        .gradient = tensor.gradient.data(),
                        .element_count = tensor.count()};
    if (tensor.dtype == DType::kBf16) {
      arrays.master_layout = MasterLayout::kSplitBf16;
      arrays.low = tensor.low.data();
    } else if (tensor.dtype == DType::kFp16) {
      arrays.master_layout = MasterLayout::kFp16;
      arrays.master = tensor.master.data();
    }
    give_moments(kind, id, update.step, arrays);
    update_reference(coefficients_of(options, update.learning_rate, update.step, 0.5f), arrays);
    take_moments(kind, tensor);
    return update;
  }

  // The function passes the moments of tensor `id` to the oracle's update. The moments have the
  // format that moments_ selects.
  void give_moments(OptimizerKind kind, std::uint32_t id, std::uint64_t step,
                    UpdateArrays& arrays) {
    DetachedState& tensor = tensors_[id];
    const std::uint64_t groups = (tensor.count() + kMomentGroupElements - 1) / kMomentGroupElements;
    arrays.rounding.key = rounding_key_of_tensor(rounding_key_of_step(kRoundingSeed, step), id);
    const auto give = [&](auto& values, auto& halves, auto& codes, auto& scales, float*& as_fp32,
                          std::uint16_t*& as_bf16, MomentCodes& as_codes, CodeBook book) {
      if (moments_ == OptimizerState::kFp32) as_fp32 = values.data();
      halves.resize(tensor.count());
      if (moments_ == OptimizerState::kBf16) as_bf16 = halves.data();
      codes.resize(tensor.count(), zero_code(book));
      scales.resize(groups);
      if (moments_ == OptimizerState::k8bit)
        as_codes = {.codes = codes.data(), .scales = scales.data()};
    };
    if (keeps_exp_avg(kind))
      give(tensor.exp_avg, tensor.exp_avg_bf16, tensor.exp_avg_codes, tensor.exp_avg_scales,
           arrays.exp_avg, arrays.exp_avg_bf16, arrays.exp_avg_codes, CodeBook::kSigned);
    if (keeps_exp_avg_sq(kind))
      give(tensor.exp_avg_sq, tensor.exp_avg_sq_bf16, tensor.exp_avg_sq_codes,
           tensor.exp_avg_sq_scales, arrays.exp_avg_sq, arrays.exp_avg_sq_bf16,
           arrays.exp_avg_sq_codes, CodeBook::kUnsigned);
  }
  void take_moments(OptimizerKind kind, DetachedState& tensor) {
    const auto take = [&](auto& values, auto& halves, auto& codes, auto& scales, CodeBook book) {
      if (moments_ == OptimizerState::kBf16)
        std::ranges::transform(halves, values.begin(), float_from_bf16);
      if (moments_ == OptimizerState::k8bit)
        decode_moments(book, {.codes = codes.data(), .scales = scales.data()}, 0, values);
    };
    if (keeps_exp_avg(kind))
      take(tensor.exp_avg, tensor.exp_avg_bf16, tensor.exp_avg_codes, tensor.exp_avg_scales,
           CodeBook::kSigned);
    if (keeps_exp_avg_sq(kind))
      take(tensor.exp_avg_sq, tensor.exp_avg_sq_bf16, tensor.exp_avg_sq_codes,
           tensor.exp_avg_sq_scales, CodeBook::kUnsigned);
  }

  void expect_equal(DetachedOptimizer& optimizer, OptimizerKind kind) {
    for (std::uint32_t id = 0; id < tensors_.size(); ++id) {
      const DetachedState& tensor = tensors_[id];
      EXPECT_TRUE(tensor.parameter == tensor.oracle_parameter) << "parameter of " << id;
      std::vector<float> state(tensor.count());
      if (keeps_exp_avg(kind)) {
        optimizer.read(id, StateKind::kExpAvg, 0, state);
        EXPECT_EQ(state, tensor.exp_avg) << "exp_avg of " << id;
      }
      if (keeps_exp_avg_sq(kind)) {
        optimizer.read(id, StateKind::kExpAvgSq, 0, state);
        EXPECT_EQ(state, tensor.exp_avg_sq) << "exp_avg_sq of " << id;
      }
      if (tensor.dtype == DType::kFp32 || tensor.steps == 0) continue;
      optimizer.read(id, StateKind::kMaster, 0, state);
      for (std::uint64_t i = 0; i < tensor.count(); ++i) {
        std::uint16_t high = 0;
        std::memcpy(&high, tensor.oracle_parameter.data() + 2 * i, 2);
        ASSERT_EQ(state[i], tensor.dtype == DType::kFp16 ? tensor.master[i]
                                                         : join_master({high, tensor.low[i]}))
            << "master of " << id << " at " << i;
      }
    }
  }

  // Runs eight steps. In these steps, some tensors have no gradient, and the order of the tensors
  // changes. The test itself also changes one parameter between steps.
  void train(DetachedOptimizer& optimizer, OptimizerKind kind) {
    for (int step = 0; step < 8; ++step) {
      std::vector<std::uint32_t> order;
      for (std::uint32_t id = 0; id < tensors_.size(); ++id)
        if (step == 0 || (step == 5 && id == 1) || random_() % 4 != 0) order.push_back(id);
      if (step % 2 != 0) std::ranges::reverse(order);
      if (step == 5 && tensors_[1].count() > 7) set(tensors_[1], 7, 3.25f);
      std::vector<DetachedUpdate> updates;
      for (const std::uint32_t id : order) updates.push_back(next(kind, id));
      // Some steps pass all tensors in one call. Other steps make one call per tensor, as a program
      // does when gradients arrive one by one.
      if (step % 3 == 0) {
        optimizer.begin(updates);
      } else {
        for (const DetachedUpdate& update : updates) optimizer.begin({&update, 1});
      }
      if (step % 2 == 0) optimizer.wait_parameters();
      for (const std::uint32_t id : order) optimizer.wait(id);
      for (const DetachedState& tensor : tensors_)
        ASSERT_TRUE(tensor.parameter == tensor.oracle_parameter) << "in step " << step;
      EXPECT_EQ(optimizer.pending_tensors(), 0u);
    }
    optimizer.wait_all();
  }

  static constexpr std::uint64_t kRoundingSeed = 77;

  TempDirectory directory_;
  OptimizerState moments_ = OptimizerState::kFp32;
  std::mt19937 random_{7};
  std::normal_distribution<float> normal_;
  std::vector<DetachedState> tensors_;
  // The number of elements of each tensor. One tensor has no elements, and large tensors have
  // several blocks and a short last block.
  const std::vector<std::uint64_t> counts_{40'000, 20'001, 0, 1, 300, 65'536};
};

}  // namespace sluice::test
