#include "tools/gpt/train/run_publisher.h"

#include "tools/gpt/model/gpt_model.h"

namespace sluice {

RunPublisher::RunPublisher(const TrainConfig& config, const Engine& engine) {
  if (config.has_status)
    publisher_.emplace(engine,
                       StatusOptions{.steps = config.steps,
                                     .flops_per_token = gpt::flops_per_token(config.model)});
}

void RunPublisher::enter(RunPhase phase, std::uint64_t step) {
  if (publisher_) publisher_->enter(phase, step);
}

void RunPublisher::step_ended(const StepRecord& record, const StepReport& report) {
  if (!publisher_) return;
  publisher_->step_ended(report, {.step = record.step,
                                  .loss = record.loss,
                                  .tokens = record.tokens,
                                  .time_s = record.time_s,
                                  .peak_flops = record.peak_flops});
}

}  // namespace sluice
