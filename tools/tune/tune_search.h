// The functions search for settings that make a step quick. A model predicts the time of a step.
// Each axis is a group of keys that change together. The search changes the choice on one axis at a
// time, until no change makes the step quicker. Some changes help only together. For example, a
// larger memory budget helps only if state is moved into memory. The search therefore begins at
// several starting points. The search is pure, except that it calls `predict` from several threads.
#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace sluice {

// Maps each key to its value, as JSON. The value is "null" if the config leaves the choice to
// Sluice.
using TuneSettings = std::map<std::string, std::string>;

struct TuneAxis {
  std::string name;
  // The first choice is empty and stands for the given config. The second choice, if there is one,
  // is the choice that Sluice makes by itself.
  std::vector<TuneSettings> choices;
  // True if the model can hardly predict which choice of this axis is quicker. If candidates differ
  // only in axes with `is_fine`, at most one of these candidates becomes a finalist.
  bool is_fine = false;
  // True if the choices of this axis have costs that the model does not know. If possible, two of
  // the finalists have different choices on an axis with `is_unsure`.
  bool is_unsure = false;
};

struct TunePrediction {
  double step_s = 0;
  // `rank_s` is `step_s` plus a small part of the time of hidden work. Hidden work runs at the same
  // time as computation. If two groups of settings have equally long steps, the group with less
  // hidden work ranks higher.
  double rank_s = 0;
  std::string obstacle = {};  // why a run is impossible; `step_s` is then unset
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
  // The list holds the candidates that are quicker than the given config, according to the model.
  // The quickest candidate comes first. Each candidate has as few settings as possible. Any two
  // candidates differ in at least one axis without `is_fine`. If the given config cannot run, the
  // list holds the quickest of all configs that can run.
  std::vector<TuneCandidate> best;
  std::size_t predictions = 0;  // the number of candidates that the model has looked at
};

// `finalists` is the maximum length of TuneResult::best.
TuneResult tune_search(const std::vector<TuneAxis>& axes, const TunePredictor& predict,
                       std::size_t finalists);

}  // namespace sluice
