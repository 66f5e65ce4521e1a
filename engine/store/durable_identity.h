// The records of a durable store contain a description of the run. Before another run continues
// from the records, the description of the new run is compared with the description in the records.
// The model and the layout of the two runs must be the same. The numbers of the config may differ
// if the user allows this. Other functions read a description back from a record. All functions are
// pure.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include <sluice/config.h>
#include <sluice/model_spec.h>
#include <sluice/state_source.h>
#include "engine/plan/layout.h"
#include "engine/store/commit_record.h"

namespace sluice {

class DurableIdentity {
 public:
  // `ranks` is the number of ranks that train. Fails with kUnsupported if a record has no room for
  // the settings, because the config has too many groups.
  DurableIdentity(const Config& config, const ModelSpec& model, const Layout& layout,
                  std::uint32_t ranks);

  std::uint64_t model_hash() const { return model_hash_; }
  std::uint64_t layout_hash() const { return layout_hash_; }
  std::uint64_t config_hash() const { return config_hash_; }

  // Returns the settings for a record, as JSON. The settings contain every value that a message
  // about a difference can name. If there is room, the settings also contain the units and their
  // tensors. `changes` is a JSON array of the changes accepted so far. If they have no room, the
  // oldest ones are left out.
  std::string settings(const std::string& changes = "[]") const;

  // Returns a text that says how a record's model or layout differs from the model or layout of
  // this run. All arguments come from the record. The result is empty if model and layout are the
  // same.
  std::string obstacle(std::uint64_t model_hash, std::uint64_t layout_hash,
                       const std::string& settings) const;
  // Returns whether a store of this run could begin with the state of a record that has `settings`.
  // The model and the optimizer have to be the same.
  bool can_take_over(const std::string& settings) const;
  // Returns one text for each number of the config that has changed since the record was written.
  // An example is "optimizer.beta2 was 0.999 and is 0.95". A number that an older version did not
  // write counts as unchanged.
  std::vector<std::string> changes(const std::string& settings) const;
  // Returns all accepted changes as a JSON array. The array begins with the changes in `settings`,
  // and ends with the result of changes(). The added entries contain `step`. The list has a limited
  // length.
  std::string accepted_changes(const std::string& settings, std::uint64_t step) const;

 private:
  using Words = std::map<std::string, std::string>;

  void describe_config(const Config& config, const ModelSpec& model);
  void require_room() const;
  std::string settings_of(const nlohmann::json& changes, bool has_units) const;

  std::string units_;  // JSON; empty: no room
  Words model_;
  Words layout_;
  Words config_;
  std::uint64_t model_hash_ = 0;
  std::uint64_t layout_hash_ = 0;
  std::uint64_t config_hash_ = 0;
};

// A described run has only those parts of a run that are in a record's settings. A described run is
// enough to compute the place of every element. In `config`, only the precision, the optimizer's
// numbers, the block size and the sharding are set.
struct DescribedRun {
  ModelSpec model;
  Config config;
  std::uint32_t ranks = 1;
};
// Reads the run back from a record's settings. `store` is the store's name, for messages.
// Fails with kDamaged if a field is missing or makes no sense. The message names the field.
// Fails with kUnsupported if the record had no room for the units.
DescribedRun described_run(const std::string& settings, const std::string& store);
// Returns the loss scale with which a run that continues from the record begins. The result is
// empty if the saved run had a static scale, which says nothing about a scale that moves.
std::optional<LossScaleState> moving_scale(const CommitRecord& record);
// Returns the settings without the units, as a text for people.
std::string short_settings(const std::string& settings);

}  // namespace sluice
