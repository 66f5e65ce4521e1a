// What keeps an engine from going on: the scheduler's latched failure, the device's, and, where one
// of them or an abandoned step struck in the middle of an update, an error that says for good that
// the state is between two steps.
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
  // All must outlive it. `commits` may be null.
  StepFailure(const OptimizerPass& pass, const Commits* commits, Device& device,
              Scheduler& scheduler)
      : pass_(pass), commits_(commits), device_(device), scheduler_(scheduler), probe_(device) {}

  // Throws what keeps the engine from going on, if anything does.
  void throw_if_unusable();
  // Waits until `ready` holds on the scheduler's thread. Throws likewise.
  void await(const std::function<bool()>& ready);
  // Throws what computation or copies have failed with. Requires: all of them have completed.
  void throw_if_device_failed();
  // What has failed behind the application's last call, if it has not been told. `has_copies`: the
  // device may have failed behind it, too.
  // Requires: nothing is in flight.
  std::optional<std::string> unheard(bool has_copies);
  // The step that makes update `version` + 1 was abandoned after blocks had been updated.
  void abandoned_midway(std::uint64_t version);
  // It was abandoned by one of several ranks.
  void abandoned_alone(std::uint64_t version, std::uint32_t rank, std::uint32_t rank_count);

 private:
  void give_up();
  std::string way_back() const;

  const OptimizerPass& pass_;
  const Commits* commits_;
  Device& device_;
  Scheduler& scheduler_;
  Event probe_;  // never recorded: waiting for it brings the device's failure, and nothing else
  std::optional<Error> poison_;
  bool is_device_heard_ = false;
};

}  // namespace sluice
