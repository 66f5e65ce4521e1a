// Publishes the state of a run of `sluice train`, so that `sluice top` can show the run
// (<sluice/status_publisher.h>).
//
// Thread rule: one thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <sluice/engine.h>
#include <sluice/status_publisher.h>
#include "tools/gpt/train/train_config.h"
#include "tools/report/step_log.h"

namespace sluice {

class RunPublisher {
 public:
  // Makes a status page if run.status is true and there is a folder for the page. problem() says
  // why a page could not be made.
  RunPublisher(const TrainConfig& config, const Engine& engine);

  std::string problem() const { return publisher_ ? publisher_->problem() : ""; }
  // Publishes the phase of the run, and the number of steps that have ended. `step` is this number.
  void enter(RunPhase phase, std::uint64_t step);
  void step_ended(const StepRecord& record, const StepReport& report);

 private:
  std::optional<StatusPublisher> publisher_;
};

}  // namespace sluice
