// Options that are refused before a loop runs, with which words, and that accepted ones reach the
// kernels.
#include "cpu_optim/optimizer_options.h"

#include <cmath>
#include <functional>
#include <utility>

#include <gtest/gtest.h>

#include <sluice/error.h>

namespace sluice {
namespace {

constexpr OptimizerKind kKinds[] = {OptimizerKind::kAdamW, OptimizerKind::kAdam,
                                    OptimizerKind::kLion, OptimizerKind::kAdagrad,
                                    OptimizerKind::kSgd};

// The message of the error that `body` throws.
std::string complaint(ErrorCode code, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "accepted";
  return "";
}

void expect_refusal(const OptimizerOptions& options, const std::string& words) {
  const std::string message = complaint(ErrorCode::kInvalidArgument, [&] { validate(options); });
  EXPECT_NE(message.find(words), std::string::npos) << message;
}

TEST(OptimizerOptions, DefaultsOfEveryKindPass) {
  for (const OptimizerKind kind : kKinds) EXPECT_NO_THROW(validate({.kind = kind, .adam = {}}));
}

TEST(OptimizerOptions, HyperparametersOutOfRangeAreNamed) {
  for (const double beta : {-0.1, 1.0, std::nan("")}) {
    expect_refusal({.adam = {.beta1 = beta}}, "beta1");
    expect_refusal({.kind = OptimizerKind::kLion, .adam = {.beta2 = beta}}, "beta2");
    expect_refusal({.kind = OptimizerKind::kSgd, .adam = {}, .momentum = beta}, "momentum");
  }
  expect_refusal({.adam = {.epsilon = 0.0}}, "epsilon");
  expect_refusal({.adam = {.epsilon = 1e-46}}, "epsilon is 1e-46");  // 0 in fp32
  expect_refusal({.adam = {.epsilon = 1e39}}, "epsilon is 1e+39");   // infinite in fp32
  expect_refusal({.kind = OptimizerKind::kAdagrad, .adam = {.epsilon = -1e-8}},
                 "epsilon is -1e-08");
  for (const OptimizerKind kind : kKinds) {
    expect_refusal({.kind = kind, .adam = {.weight_decay = -0.1}}, "weight_decay is -0.1");
    expect_refusal({.kind = kind, .adam = {.weight_decay = HUGE_VAL}}, "weight_decay");
  }
}

TEST(OptimizerOptions, HyperparametersThatAKindDoesNotReadAreFree) {
  EXPECT_NO_THROW(validate({.kind = OptimizerKind::kSgd, .adam = {.beta1 = 7.0}}));
  EXPECT_NO_THROW(validate({.kind = OptimizerKind::kAdamW, .adam = {}, .momentum = 7.0}));
}

TEST(OptimizerOptions, StepsCountFromOneAndRatesAreNotNegative) {
  for (const OptimizerKind kind : kKinds) {
    const OptimizerOptions options{.kind = kind, .adam = {}};
    const auto refused = [&](double learning_rate, std::uint64_t step, float scale) {
      return complaint(ErrorCode::kInvalidArgument,
                       [&] { (void)coefficients_of(options, learning_rate, step, scale); });
    };
    EXPECT_NE(refused(1e-3, 0, 1.0f).find("step 0"), std::string::npos);
    EXPECT_NE(refused(-1e-3, 1, 1.0f).find("learning rate is -0.001"), std::string::npos);
    EXPECT_NE(refused(HUGE_VAL, 1, 1.0f).find("learning rate"), std::string::npos);
    EXPECT_NE(refused(1e-3, 1, NAN).find("scale"), std::string::npos);
  }
}

TEST(OptimizerOptions, TheKindDecidesCoefficientsAndMoments) {
  for (std::size_t i = 0; i < std::size(kKinds); ++i) {
    const UpdateCoefficients made = coefficients_of({.kind = kKinds[i], .adam = {}}, 1e-3, 1, 1.0f);
    EXPECT_EQ(made.index(), i) << name_of(kKinds[i]);
    EXPECT_EQ(keeps_exp_avg(made), keeps_exp_avg(kKinds[i]));
    EXPECT_EQ(keeps_exp_avg_sq(made), keeps_exp_avg_sq(kKinds[i]));
  }
}

// Counted by hand: what is updated in place, beside it the gradient, and fp16 parameters, which are
// written and never read.
TEST(UpdateBytesOfAnElement, CountEachByteOnce) {
  float moment = 0;
  const auto bytes = [&](MasterLayout layout, DType gradient, int moments) {
    const UpdateBytes found = bytes_per_element({.master_layout = layout,
                                                 .gradient_dtype = gradient,
                                                 .exp_avg = moments > 0 ? &moment : nullptr,
                                                 .exp_avg_sq = moments > 1 ? &moment : nullptr});
    return std::pair(found.read, found.write);
  };
  using Bytes = std::pair<std::uint64_t, std::uint64_t>;
  EXPECT_EQ(bytes(MasterLayout::kFp32, DType::kFp32, 2), Bytes(4 + 8 + 4, 4 + 8));
  EXPECT_EQ(bytes(MasterLayout::kSplitBf16, DType::kBf16, 2), Bytes(2 + 2 + 8 + 2, 2 + 2 + 8));
  EXPECT_EQ(bytes(MasterLayout::kSplitBf16, DType::kFp32, 1), Bytes(2 + 2 + 4 + 4, 2 + 2 + 4));
  EXPECT_EQ(bytes(MasterLayout::kFp16, DType::kFp16, 2), Bytes(4 + 8 + 2, 4 + 8 + 2));
}

}  // namespace
}  // namespace sluice
