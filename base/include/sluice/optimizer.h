// The optimizers by name, and their hyperparameters. Plain data.
#pragma once

#include <cstdint>
#include <string_view>

namespace sluice {

// Hyperparameters of AdamW (Loshchilov & Hutter 2019, decoupled decay) and, with decay as an L2
// term of the gradient, of Adam (Kingma & Ba 2015).
struct AdamOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0.01;
};

enum class OptimizerKind : std::uint8_t {
  kAdamW,    // decoupled decay
  kAdam,     // decay as an L2 term, like the two below
  kLion,     // decoupled decay
  kAdagrad,  // L2
  kSgd,      // L2, with momentum
};

std::string_view name_of(OptimizerKind kind);

// Hyperparameters fixed for a run. Each optimizer reads only its own: Adam and AdamW both betas,
// epsilon and decay; Lion both betas and decay; Adagrad epsilon and decay; SGD momentum and decay.
struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::kAdamW;
  AdamOptions adam;
  double momentum = 0.9;
};

}  // namespace sluice
