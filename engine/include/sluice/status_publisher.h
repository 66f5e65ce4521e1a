// Shows a training run in `sluice top`. A publisher keeps a page of figures in
// $XDG_RUNTIME_DIR/sluice. The page is a file that only the user of the process can read. The
// destructor of the publisher removes the page. An update of the page takes a few microseconds of
// processor time.
// A problem with the page never makes the training run fail. Without XDG_RUNTIME_DIR, there is no
// page. If a page could not be made, problem() says why.
//
//   StatusPublisher status(engine, {.steps = 1000});
//   ...
//   status.step_ended(step.finish(), {.loss = loss, .tokens = 4096});
//
// Thread rule: one thread at a time.
// Invariant: a process has at most one page. While one publisher has the page, a new publisher gets
// no page. A forked child has no page, either.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>

#include <sluice/export.h>
#include <sluice/step_report.h>

namespace sluice {

class Engine;

enum class RunPhase : std::uint32_t { kStarting, kTraining, kEvaluating, kSaving };
SLUICE_EXPORT std::string_view name_of(RunPhase phase);

struct StatusOptions {
  std::uint64_t steps = 0;     // the number of steps at the end of the training; 0 = unknown
  double flops_per_token = 0;  // of the model's matrix products, in training; 0 = unknown
};

// Figures that only the application knows about a step.
struct StepFigures {
  std::uint64_t step = 0;  // the number of steps that have ended; 0 = StepReport::step
  double loss = std::numeric_limits<double>::quiet_NaN();  // NaN = unknown
  std::uint64_t tokens = 0;                                // over all ranks; 0 = unknown
  double time_s = 0;      // 0 = time since the last step_ended(); at first, StepTimes::total_ns
  double peak_flops = 0;  // per second, of all ranks together; 0 = unknown
};

class SLUICE_EXPORT StatusPublisher {
 public:
  // Makes the page. The publisher uses `engine` only in this call.
  StatusPublisher(const Engine& engine, const StatusOptions& options);
  ~StatusPublisher();
  StatusPublisher(const StatusPublisher&) = delete;
  StatusPublisher& operator=(const StatusPublisher&) = delete;

  // A text that tells the user why there is no page. The text is empty if there is a page, or if
  // XDG_RUNTIME_DIR is not set.
  const std::string& problem() const { return problem_; }
  // Sets options that become known later.
  void set_options(const StatusOptions& options);
  // Publishes the phase in which the training is now. The page keeps the figures of the last step.
  // The copies between enter() of another phase and enter() of kTraining count for no step.
  void enter(RunPhase phase);
  // Does the same as enter(RunPhase), and publishes the number of steps that have ended.
  void enter(RunPhase phase, std::uint64_t step);
  // Publishes the figures of a step.
  void step_ended(const StepReport& report, const StepFigures& figures = {});

 private:
  struct Parts;

  std::string problem_;
  std::unique_ptr<Parts> parts_;  // null without a page
};

}  // namespace sluice
