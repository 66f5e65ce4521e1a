// Keeps the status page of a `sluice train` up to date (tools/report/status_page.h). An update
// takes a few microseconds per step. An update never makes a run fail.
//
// Thread rule: one thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <sluice/engine.h>
#include "base/trace/trace.h"
#include "tools/gpt/train/train_config.h"
#include "tools/report/status_page.h"
#include "tools/report/step_log.h"

namespace sluice {

class RunPublisher {
 public:
  // There is no page without run.status, or without a folder for the page. The call problem() says
  // why a page could not be made.
  RunPublisher(const TrainConfig& config, const Engine& engine);

  const std::string& problem() const { return problem_; }
  // Publishes that the run has ended `step` and is now in `phase`.
  void enter(RunPhase phase, std::uint64_t step);
  void step_ended(const StepRecord& record, const StepReport& report);

 private:
  std::string problem_;
  std::unique_ptr<StatusPage> page_;
  RunStatus status_{};
  TraceCounts counts_{};  // the counts at the end of the last step
};

}  // namespace sluice
