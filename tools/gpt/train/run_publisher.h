// Keeps the status page of a `sluice train` up to date (tools/report/status_page.h). It costs a few
// microseconds per step, and never fails a run.
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
  // Without run.status, or without a folder for it, there is no page. A page that cannot be made is
  // named by problem().
  RunPublisher(const TrainConfig& config, const Engine& engine);

  const std::string& problem() const { return problem_; }
  // The run is behind `step` and does this.
  void enter(RunPhase phase, std::uint64_t step);
  void step_ended(const StepRecord& record, const StepReport& report);

 private:
  std::string problem_;
  std::unique_ptr<StatusPage> page_;
  RunStatus status_{};
  TraceCounts counts_{};  // when the last step ended
};

}  // namespace sluice
