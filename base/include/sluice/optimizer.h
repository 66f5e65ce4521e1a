// The names and the hyperparameters of the optimizers. Plain data.
#pragma once

#include <cstdint>
#include <string_view>

#include <sluice/export.h>

namespace sluice {

// Hyperparameters of AdamW (Loshchilov & Hutter 2019) and Adam (Kingma & Ba 2015). AdamW decays the
// weights directly (decoupled decay). Adam adds the decay to the gradient as an L2 term.
struct AdamOptions {
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  double weight_decay = 0.01;
};

enum class OptimizerKind : std::uint8_t {
  kAdamW,    // decoupled decay
  kAdam,     // decay as an L2 term
  kLion,     // decoupled decay
  kAdagrad,  // decay as an L2 term
  kSgd,      // momentum; decay as an L2 term
};

SLUICE_EXPORT std::string_view name_of(OptimizerKind kind);

// The format in which the moments are stored between updates. Every update computes in fp32.
enum class OptimizerState : std::uint8_t {
  kFp32,
  kBf16,  // rounded stochastically, so that small changes add up
  k8bit,  // block-wise dynamic quantization: 8-bit codes, and one fp32 scale per 256 elements
};
// Returns "fp32", "bf16" or "8bit".
SLUICE_EXPORT std::string_view name_of(OptimizerState state);

// The hyperparameters, which stay fixed for a run. Each optimizer ignores the hyperparameters that
// it does not have. Adam and AdamW have two betas, an epsilon and a decay. Lion has two betas and
// a decay. Adagrad has an epsilon and a decay. SGD has a momentum and a decay.
struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::kAdamW;
  AdamOptions adam;
  double momentum = 0.9;
};

}  // namespace sluice
