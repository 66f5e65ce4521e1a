// The parts of an engine that the flows have in common, so that a flow's constructor names only
// what is its own. References to objects that outlive every flow.
//
// Thread rule: that of each part.
#pragma once

#include <sluice/config.h>
#include <sluice/device.h>
#include <sluice/model_spec.h>

namespace sluice {

class BlockStore;
struct CountedTensors;
class IoQueue;
class Layout;
struct Placement;
class Ranks;
class Scheduler;
class Tiers;
class Worker;

struct FlowParts {
  const Config& config;
  const ModelSpec& model;  // validated()
  const Layout& layout;
  const Placement& placement;
  const Tiers& tiers;
  BlockStore& store;
  IoQueue& queue;
  Device& device;
  Scheduler& scheduler;
  Worker& worker;
  Ranks& ranks;
  const CountedTensors& counted;
};

}  // namespace sluice
