#include "cpu_optim/optimizer_options.h"

#include <cmath>
#include <limits>

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice {
namespace {

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

void require(bool condition, const char* name, double value, const char* range) {
  if (!condition) refuse(fmt::format("optimizer: {} is {}, but must be {}", name, value, range));
}

void require_beta(const char* name, double value) {
  require(value >= 0 && value < 1, name, value, "in [0, 1)");
}

}  // namespace

std::string_view name_of(OptimizerKind kind) {
  switch (kind) {
    case OptimizerKind::kAdamW: return "adamw";
    case OptimizerKind::kAdam: return "adam";
    case OptimizerKind::kLion: return "lion";
    case OptimizerKind::kAdagrad: return "adagrad";
    case OptimizerKind::kSgd: return "sgd";
  }
  return "unknown";
}

std::string_view name_of(OptimizerState state) {
  switch (state) {
    case OptimizerState::kFp32: return "fp32";
    case OptimizerState::kBf16: return "bf16";
    case OptimizerState::k8bit: return "8bit";
  }
  return "unknown";
}

bool keeps_exp_avg(OptimizerKind kind) {
  return kind != OptimizerKind::kAdagrad;
}

bool keeps_exp_avg_sq(OptimizerKind kind) {
  return kind != OptimizerKind::kLion && kind != OptimizerKind::kSgd;
}

void validate(const OptimizerOptions& options) {
  const OptimizerKind kind = options.kind;
  const bool is_adam = kind == OptimizerKind::kAdamW || kind == OptimizerKind::kAdam;
  if (is_adam || kind == OptimizerKind::kLion) {
    require_beta("beta1", options.adam.beta1);
    require_beta("beta2", options.adam.beta2);
  }
  if (is_adam || kind == OptimizerKind::kAdagrad)
    require(options.adam.epsilon >= kEpsilonMin && options.adam.epsilon <= kEpsilonMax, "epsilon",
            options.adam.epsilon, "in 1.2e-38..3.4e38, which fp32 has");
  if (kind == OptimizerKind::kSgd) require_beta("momentum", options.momentum);
  require(options.adam.weight_decay >= 0 && std::isfinite(options.adam.weight_decay),
          "weight_decay", options.adam.weight_decay, "finite and not negative");
}

UpdateCoefficients coefficients_of(const OptimizerOptions& options, double learning_rate,
                                   std::uint64_t step, float gradient_scale) {
  if (step == 0) refuse("optimizer: step 0; steps count from 1");
  require(learning_rate >= 0 && std::isfinite(learning_rate), "the learning rate", learning_rate,
          "finite and not negative");
  require(learning_rate <= std::numeric_limits<float>::max(), "the learning rate", learning_rate,
          "at most 3.4e38, where fp32 ends");
  require(std::isfinite(gradient_scale), "the gradient's scale",
          static_cast<double>(gradient_scale), "finite");
  const AdamOptions& adam = options.adam;
  switch (options.kind) {
    case OptimizerKind::kAdamW: break;
    case OptimizerKind::kAdam:
      return adam_l2_coefficients(adam, learning_rate, step, gradient_scale);
    case OptimizerKind::kLion:
      return lion_coefficients(
          {.beta1 = adam.beta1, .beta2 = adam.beta2, .weight_decay = adam.weight_decay},
          learning_rate, gradient_scale);
    case OptimizerKind::kAdagrad:
      return adagrad_coefficients({.epsilon = adam.epsilon, .weight_decay = adam.weight_decay},
                                  learning_rate, gradient_scale);
    case OptimizerKind::kSgd:
      return sgd_coefficients({.momentum = options.momentum, .weight_decay = adam.weight_decay},
                              learning_rate, gradient_scale);
  }
  return adam_coefficients(adam, learning_rate, step, gradient_scale);
}

}  // namespace sluice
