// The failures that stop an engine. Two failures stop an engine: the scheduler's latched failure
// and the device's failure. An update may be interrupted by a failure or by an abandoned step. The
// engine then also has a permanent error, because the state is that of no step.
//
// Thread rule: the application's thread.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include <sluice/error.h>
#include "engine/flow/optimizer_pass.h"

namespace sluice {

class StepFailure {
 public:
  // All arguments must outlive the object. `commits` may be null.
  StepFailure(const OptimizerPass& pass, const Commits* commits, Device& device,
              Scheduler& scheduler)
      : pass_(pass), commits_(commits), device_(device), scheduler_(scheduler), probe_(device) {}

  // Throws the failure that stops the engine, if there is one.
  void throw_if_unusable();
  // The call waits until `ready` holds on the scheduler's thread. Throws the same failures as
  // throw_if_unusable().
  void await(const std::function<bool()>& ready);
  // Throws the failure of computation or copies. Requires: all computation and copies have
  // completed.
  void throw_if_device_failed();
  // A failure that came after the application's last call and has not been reported. `has_copies`
  // says that the device may have failed after the last call, too.
  // Requires: nothing is in flight.
  std::optional<std::string> unheard(bool has_copies);
  // Called when the step of update `version` + 1 was abandoned after blocks had been updated.
  void abandoned_midway(std::uint64_t version);
  // Called in the same case, if only one of several ranks abandoned the step.
  void abandoned_alone(std::uint64_t version, std::uint32_t rank, std::uint32_t rank_count);

 private:
  void give_up();
  // Throws the device's failure if it explains `error`.
  void throw_cause(const Error& error);
  std::string way_back() const;

  const OptimizerPass& pass_;
  const Commits* commits_;
  Device& device_;
  Scheduler& scheduler_;
  Event probe_;  // never recorded: waiting for it only brings the device's failure
  std::optional<Error> poison_;
  bool is_device_heard_ = false;
};

}  // namespace sluice
