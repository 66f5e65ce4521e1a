// Connects leases, steps and inferences to their engine. The link outlives the engine, and all
// leases, steps and inferences of the engine. An object uses the link to find out whether its step
// or its engine still exists.
//
// Thread rule: any thread may read `call`. All other members are used only during a call or in a
// destructor.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include <sluice/device.h>
#include "base/float_environment.h"

namespace sluice {

class ActivationFlow;
class Layout;
class StepLoop;

struct EngineLink {
  // The next four pointers are null after the engine has been destroyed.
  StepLoop* loop = nullptr;
  ActivationFlow* activations = nullptr;
  const Layout* layout = nullptr;
  const Device* device = nullptr;
  // This number changes whenever a step or an inference begins or ends.
  std::uint64_t walk = 0;
  std::atomic<const char*> call = nullptr;  // the name of the call under way

  bool is_open(std::uint64_t number) const { return loop != nullptr && walk == number; }
  // If the step or inference with number `number` is still open, the call abandons this step or
  // inference.
  void abandon(std::uint64_t number) noexcept;
  // The engine calls this function before the engine is destroyed.
  void cut() noexcept;
  // Fails with kInvalidArgument if the stream is empty or belongs to another device.
  void require_stream(const char* name, const Stream& stream) const;
};

// While one call runs, the guard refuses other calls of the same engine. Such a call may come from
// a second thread, or from a function that the running call has called. Without this guard, such a
// call could corrupt the engine. A guarded call computes in the floating-point environment of
// base/float_environment.h. The call does not change the caller's own environment.
class CallGuard {
 public:
  // `link` is null if the call's object has been moved to another object. In this case, the guarded
  // call reports the error.
  // Fails with kInvalidArgument while another call is under way.
  CallGuard(std::shared_ptr<EngineLink> link, const char* name);
  CallGuard(const CallGuard&) = delete;
  CallGuard& operator=(const CallGuard&) = delete;
  ~CallGuard() {
    if (link_ != nullptr) link_->call = nullptr;
  }

 private:
  std::shared_ptr<EngineLink> link_;
  FloatEnvironment environment_;
};

}  // namespace sluice
