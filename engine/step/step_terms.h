// The terms of the step under way: the step's options, and the numbers that the update gets from
// these options.
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

// The calls that ask for the norm of a step: finish(), and gradient_norm() before finish().
enum class NormCall : std::uint8_t { kFinish = 1, kBefore = 2 };

class StepTerms {
 public:
  // `config` must outlive the object. `model` is validated().
  StepTerms(const Config& config, const ModelSpec& model, std::uint32_t rank_count)
      : config_(config), groups_(config.optimizer, model), rank_count_(rank_count) {}

  // In the message, `call` is the name of the application's call.
  // Fails with kInvalidArgument if an option is not valid. The message names the option.
  void check(const char* call, const StepOptions& options) const;
  // Starts a step. Requires: the options have been checked.
  void begin(const StepOptions& options) { options_ = options; }
  // The options with which a step ends. `is_announced` says whether they are equal to those of
  // begin(). Updates of some blocks may already have used the options of begin().
  struct End {
    StepOptions options;
    bool is_announced = true;
  };
  // Returns the options of begin(), with those that `finish` gives in their place. The object keeps
  // the options of begin(), because a call of finish() that fails may be followed by another one.
  // Fails with kInvalidArgument in the cases of check(). Also fails with kInvalidArgument if
  // `policy` is kEager and the options have changed.
  End end(const FinishOptions& finish, OverlapPolicy policy) const;
  // The options of begin().
  const StepOptions& options() const { return options_; }

  // The gradient that waits for the update is the gradient of the scaled loss, summed over the
  // micro-batches and the ranks. Returns the divisor that turns this sum into the gradient that
  // `options` ask for.
  double gradient_count(const StepOptions& options, double loss_scale) const;
  struct Scaling {
    std::uint64_t step = 0;  // the step of the update
    double loss_scale = 1;
    double clip_factor = 1;
  };
  // Returns what an update with `options` computes with. `versions` has the number of earlier
  // updates of each unit.
  // Fails with kInvalidArgument if the factor of the gradients is 0 in fp32.
  UnitCoefficients coefficients(const StepOptions& options, const Scaling& scaling,
                                std::span<const std::uint64_t> versions) const;

 private:
  const Config& config_;
  const ParameterGroups groups_;
  const std::uint32_t rank_count_;
  StepOptions options_;
};

}  // namespace sluice
