// The search for quick settings, by a model of the step. Each axis is a group of keys that change
// together. The search goes along one axis at a time until no axis helps. The search starts several
// times, because some changes help only together. Room in memory and a home in memory are such
// changes. Pure except for the calls of `predict`, which come from several threads.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace sluice {

// For each key, the value as JSON. The value is "null" for a key that the config leaves to Sluice.
using TuneSettings = std::map<std::string, std::string>;

struct TuneAxis {
  std::string name;
  // The first choice is empty and stands for the given config. The second choice, if there is one,
  // is the choice that Sluice would make by itself.
  std::vector<TuneSettings> choices;
  // The value is true for an axis whose choices a model can hardly tell apart. Candidates that
  // differ only in such axes do not compete against each other in a trial.
  bool is_fine = false;
  // The value is true for an axis whose choices have costs that a model does not know. On such an
  // axis, the second candidate of a trial makes another choice than the first candidate.
  bool is_unsure = false;
};

struct TunePrediction {
  double step_s = 0;
  // The sum of `step_s` and a small part of the work that a step hides. So among settings with
  // equally long steps, those with less work rank higher.
  double rank_s = 0;
  std::string obstacle = {};  // why a run is impossible; `step_s` is unset then
  std::string binds = {};     // the scarcest resource
};

struct TuneCandidate {
  std::vector<std::size_t> choices;  // by axis
  TuneSettings settings;
  TunePrediction prediction;

  bool is_given() const { return settings.empty(); }
};

using TunePredictor = std::function<TunePrediction(const TuneSettings& settings)>;

struct TuneResult {
  TuneCandidate given;
  // The candidates that the model predicts to be quicker than the given config, with the quickest
  // candidate first. Each candidate has as few settings as possible. Each candidate differs from
  // the others in an axis that is not fine. If the given config is impossible, the list has the
  // quickest of all possible configs.
  std::vector<TuneCandidate> best;
  std::size_t predictions = 0;  // the number of candidates that the model has looked at
};

// `finalists` is the largest length of TuneResult::best.
TuneResult tune_search(const std::vector<TuneAxis>& axes, const TunePredictor& predict,
                       std::size_t finalists);

}  // namespace sluice
