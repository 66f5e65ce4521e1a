// The engine's parts that all flows need. Constructors of flows take this struct instead of many
// arguments. The struct holds references to objects that outlive every flow.
//
// Thread rule: each part has its own thread rule.
#pragma once

#include <sluice/config.h>
#include <sluice/device.h>
#include <sluice/model_spec.h>

namespace sluice {

class BlockStore;
struct CountedTensors;
class IoQueue;
class Layout;
class LeaseGuard;
struct Placement;
class Ranks;
class Scheduler;
class Tiers;
class UnitVersions;
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
  UnitVersions& versions;
  LeaseGuard* guard;  // null without memory.guard
};

}  // namespace sluice
