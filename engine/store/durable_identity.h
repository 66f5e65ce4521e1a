// How the records of a durable store describe a run, and the checks before another run may continue
// from these records. Model and layout have to be the same. Numbers of the config may differ, if
// the user says so. Other functions read a description back from a record. Pure.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <sluice/config.h>
#include <sluice/model_spec.h>
#include "engine/plan/layout.h"

namespace sluice {

class DurableIdentity {
 public:
  // `ranks` is the number of ranks that train.
  DurableIdentity(const Config& config, const ModelSpec& model, const Layout& layout,
                  std::uint32_t ranks);

  std::uint64_t model_hash() const { return model_hash_; }
  std::uint64_t layout_hash() const { return layout_hash_; }
  std::uint64_t config_hash() const { return config_hash_; }

  // The record's settings, as JSON. The settings have everything that messages name, and the units
  // and their tensors if there is room. `changes` is an array of the changes accepted so far.
  std::string settings(const std::string& changes = "[]") const;

  // The hashes and the settings come from a record. The text says how the record's model or layout
  // differs from this run's. The result is empty if model and layout are the same.
  std::string obstacle(std::uint64_t model_hash, std::uint64_t layout_hash,
                       const std::string& settings) const;
  // Each number of the config that has changed: "optimizer.beta2 was 0.999 and is 0.95".
  std::vector<std::string> changes(const std::string& settings) const;
  // The array `changes` of `settings`. The call adds the result of changes() to this array, as of
  // `step`.
  std::string accepted_changes(const std::string& settings, std::uint64_t step) const;

 private:
  using Words = std::map<std::string, std::string>;

  std::string units_;  // JSON; empty: no room
  Words model_;
  Words layout_;
  Words config_;
  std::uint64_t model_hash_ = 0;
  std::uint64_t layout_hash_ = 0;
  std::uint64_t config_hash_ = 0;
};

// The part of a run that a record's settings describe: the place of every element. `config` has
// only precision, the optimizer's numbers, the block size and the sharding.
struct DescribedRun {
  ModelSpec model;
  Config config;
  std::uint32_t ranks = 1;
};
// `store` is the name for messages.
// Fails with kDamaged if a field is missing or makes no sense, naming the field, and with
// kUnsupported if the record had no room for the units.
DescribedRun described_run(const std::string& settings, const std::string& store);
// The settings without the units, as text for people.
std::string short_settings(const std::string& settings);

}  // namespace sluice
