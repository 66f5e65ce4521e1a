// Gradients that wait on the device for their update. The device copies and adds these gradients.
// The results have the same bits as results of the CPU. For the norm, the device computes the sum
// of squares of each leaf. Only the sums of squares are copied to the host.
//
// Thread rule: scheduler's thread only, except where stated.
// Progress: copies and additions wait only for earlier work on the stream. The computation of a
// norm also waits for the worker.
#pragma once

#include <cstdint>
#include <vector>

#include "engine/flow/flow_parts.h"
#include "engine/flow/gradient_home.h"
#include "engine/flow/resident_units.h"
#include "engine/run/worker.h"
#include "gpu/math/device_math.h"

namespace sluice {

class DeviceGradients final : public GradientHome {
 public:
  // All arguments must outlive the object. `math` may be null if no gradient waits on the device.
  DeviceGradients(const FlowParts& parts, const ResidentUnits& residents, DeviceMath* math,
                  Callbacks callbacks);

  void start(const GradientMove& move, StreamId stream) override;
  void take_norm(const GradientSum& sum, StreamId stream) override;
  const NormAccumulator& norm(UnitId unit) const override { return norms_[index_of(unit)]; }
  std::optional<std::uint64_t> first_non_finite(const GradientRange& range) const override;

 private:
  void arrived();
  void leaves_arrived(UnitId unit);
  void add_leaves(UnitId unit);

  const Layout& layout_;
  const CountedTensors& counted_;
  const Tiers& tiers_;
  Device& device_;
  Scheduler& scheduler_;
  Worker& worker_;
  const ResidentUnits& residents_;
  DeviceMath* const math_;
  std::vector<NormAccumulator> norms_;  // by unit; written by the worker
};

}  // namespace sluice
