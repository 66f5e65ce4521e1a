// The terms of the step under way: its options, and the numbers that its update gets from them.
//
// Thread rule: the application's thread.
#pragma once

#include <cstdint>
#include <span>

#include <sluice/config.h>
#include <sluice/model_spec.h>
#include <sluice/step_report.h>
#include "engine/plan/parameter_groups.h"

namespace sluice {

// The calls that ask for the norm of a step: finish(), and gradient_norm() before it.
enum class NormCall : std::uint8_t { kFinish = 1, kBefore = 2 };

class StepTerms {
 public:
  // `config` must outlive the object. `model` is validated().
  StepTerms(const Config& config, const ModelSpec& model, std::uint32_t rank_count)
      : config_(config), groups_(config.optimizer, model), rank_count_(rank_count) {}

  // `call` names the application's call in the message.
  // Fails with kInvalidArgument, naming the option, if no step can have it.
  void check(const char* call, const StepOptions& options) const;
  // Starts a step. Requires: the options have been checked.
  void begin(const StepOptions& options) { options_ = options; }
  // From here on, `finish` gives the options of the step. Returns whether the terms equal the
  // announced ones, which some blocks' updates may have used already.
  // Fails with kInvalidArgument in the cases of check(), and if `policy` has updated blocks with
  // other options.
  bool end(const FinishOptions& finish, OverlapPolicy policy);
  const StepOptions& options() const { return options_; }

  // The gradients' homes hold gradients of the scaled loss, summed over the micro-batches and the
  // ranks. Returns the factor by which this sum is larger than the gradient that `options` want.
  double gradient_count(const StepOptions& options, double loss_scale) const;
  struct Scaling {
    std::uint64_t step = 0;  // that the update makes
    double loss_scale = 1;
    double clip_factor = 1;
  };
  // `versions` has the number of updates that each unit has seen before.
  UnitCoefficients coefficients(const Scaling& scaling,
                                std::span<const std::uint64_t> versions) const;

 private:
  const Config& config_;
  const ParameterGroups groups_;
  const std::uint32_t rank_count_;
  StepOptions options_;
};

}  // namespace sluice
