// Connects leases, steps and inferences to their engine. The link outlives all of these objects. So
// an object can say that its step or its engine is over.
//
// Thread rule: any thread may read `call`. Everything else is used during a call, or in a
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
  // Null once the engine has been destroyed.
  StepLoop* loop = nullptr;
  ActivationFlow* activations = nullptr;
  const Layout* layout = nullptr;
  const Device* device = nullptr;
  // The number changes when a step or an inference begins, and when it ends.
  std::uint64_t walk = 0;
  std::atomic<const char*> call = nullptr;  // under way

  bool is_open(std::uint64_t number) const { return loop != nullptr && walk == number; }
  // The call abandons step or inference `number`, if it is still open.
  void abandon(std::uint64_t number) noexcept;
  // Called when the engine is about to be destroyed.
  void cut() noexcept;
  // Fails with kInvalidArgument if the stream is empty or of another device.
  void require_stream(const char* name, const Stream& stream) const;
};

// While one call runs, the guard refuses other calls of the same engine: from a second thread, or
// from a function that the call runs. Without this guard, such a call would corrupt the engine
// instead of failing. The call computes in the environment of base/float_environment.h, and leaves
// the caller's environment as it was.
class CallGuard {
 public:
  // `link` is null for an object that has been moved from. The guarded call itself refuses such an
  // object.
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
