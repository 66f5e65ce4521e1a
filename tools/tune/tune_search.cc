#include "tools/tune/tune_search.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "base/at_once.h"

namespace sluice {
namespace {

using Choices = std::vector<std::size_t>;

// Times nearer to each other than this are equal; the model knows no better.
constexpr double kEqual = 0.002;
constexpr int kSweepsMax = 8;
constexpr double kNever = std::numeric_limits<double>::infinity();

class Search {
 public:
  Search(const std::vector<TuneAxis>& axes, const TunePredictor& predict)
      : axes_(axes), predict_(predict) {}

  double rank_s(const Choices& choices) {
    look_at({choices});
    const TunePrediction& prediction = known_.at(choices);
    return prediction.obstacle.empty() ? prediction.rank_s : kNever;
  }

  // Follows the axes from `at` until none of them helps.
  Choices descend(Choices at) {
    double least_s = rank_s(at);
    for (int sweep = 0; sweep < kSweepsMax; ++sweep) {
      const double before_s = least_s;
      for (std::size_t axis = 0; axis < axes_.size(); ++axis) {
        const auto [choices, found_s] = best_along(axis, at);
        // An impossible start takes any choice that is possible.
        if (found_s >= (1 - kEqual) * least_s && least_s != kNever) continue;
        at = choices;
        least_s = found_s;
      }
      if (least_s >= (1 - kEqual) * before_s && least_s != kNever) break;
    }
    return at;
  }

  // Gives back every choice that gains nothing. A choice that costs time is another candidate's,
  // which has a rank of its own; along a fine axis there is no such candidate.
  Choices simplified(Choices at) {
    const double limit_s = (1 + kEqual) * rank_s(at);
    const double least_s = (1 - kEqual) * rank_s(at);
    for (std::size_t axis = axes_.size(); axis-- > 0;) {
      Choices without = at;
      without[axis] = 0;
      const double without_s = rank_s(without);
      if (without_s <= limit_s && (axes_[axis].is_fine || without_s >= least_s)) at = without;
    }
    return at;
  }

  TuneCandidate candidate(const Choices& choices) {
    (void)rank_s(choices);
    return {.choices = choices, .settings = settings_of(choices), .prediction = known_.at(choices)};
  }

  // All possible candidates so far, quickest first; of equals, the one nearest to the given config.
  std::vector<Choices> ranked() const {
    std::vector<std::pair<double, Choices>> order;
    for (const auto& [choices, prediction] : known_)
      if (prediction.obstacle.empty()) order.emplace_back(prediction.rank_s, choices);
    std::ranges::stable_sort(order, {}, [](const auto& entry) { return entry.first; });
    std::vector<Choices> all;
    for (auto& [time, choices] : order) all.push_back(std::move(choices));
    return all;
  }

  bool compete(const Choices& a, const Choices& b) const {
    for (std::size_t axis = 0; axis < axes_.size(); ++axis)
      if (!axes_[axis].is_fine && a[axis] != b[axis]) return true;
    return false;
  }

  bool is_unsurely_other(const Choices& a, const Choices& b) const {
    for (std::size_t axis = 0; axis < axes_.size(); ++axis)
      if (axes_[axis].is_unsure && a[axis] != b[axis]) return true;
    return false;
  }

  std::size_t size() const { return known_.size(); }

 private:
  TuneSettings settings_of(const Choices& choices) const {
    TuneSettings settings;
    for (std::size_t axis = 0; axis < axes_.size(); ++axis)
      for (const auto& [key, value] : axes_[axis].choices[choices[axis]]) settings[key] = value;
    return settings;
  }

  void look_at(const std::vector<Choices>& all) {
    std::vector<Choices> unknown;
    for (const Choices& choices : all)
      if (!known_.contains(choices)) unknown.push_back(choices);
    std::vector<TunePrediction> found(unknown.size());
    for_each_at_once(unknown.size(),
                     [&](std::size_t i) { found[i] = predict_(settings_of(unknown[i])); });
    for (std::size_t i = 0; i < unknown.size(); ++i) known_[unknown[i]] = std::move(found[i]);
  }

  std::pair<Choices, double> best_along(std::size_t axis, const Choices& at) {
    std::vector<Choices> all;
    for (std::size_t choice = 0; choice < axes_[axis].choices.size(); ++choice) {
      all.push_back(at);
      all.back()[axis] = choice;
    }
    look_at(all);
    std::pair<Choices, double> best{at, rank_s(at)};
    for (const Choices& choices : all)
      if (const double time_s = rank_s(choices); time_s < best.second) best = {choices, time_s};
    return best;
  }

  const std::vector<TuneAxis>& axes_;
  const TunePredictor& predict_;
  std::map<Choices, TunePrediction> known_;
};

// The given config; and Sluice's own choices, with each choice of the first axis.
std::vector<Choices> starts_of(const std::vector<TuneAxis>& axes) {
  std::vector<Choices> starts{Choices(axes.size(), 0)};
  Choices automatic;
  for (const TuneAxis& axis : axes)
    automatic.push_back(std::min<std::size_t>(1, axis.choices.size() - 1));
  for (std::size_t choice = 0; !axes.empty() && choice < axes.front().choices.size(); ++choice) {
    starts.push_back(automatic);
    starts.back().front() = choice;
  }
  return starts;
}

}  // namespace

TuneResult tune_search(const std::vector<TuneAxis>& axes, const TunePredictor& predict,
                       std::size_t finalists) {
  Search search(axes, predict);
  TuneResult result;
  const Choices given(axes.size(), 0);
  result.given = search.candidate(given);
  for (const Choices& start : starts_of(axes))
    if (const Choices end = search.descend(start); search.rank_s(end) != kNever)
      (void)search.simplified(end);
  const double given_s = search.rank_s(given);
  std::set<Choices> taken{given};
  const auto take = [&](std::size_t count, const auto& accepts) {
    for (const Choices& choices : search.ranked()) {
      if (result.best.size() >= count || search.rank_s(choices) >= (1 - kEqual) * given_s) break;
      const Choices simple = search.simplified(choices);
      if (search.rank_s(simple) >= (1 - kEqual) * given_s && given_s != kNever) continue;
      if (!accepts(simple)) continue;
      if (std::ranges::any_of(result.best, [&](const TuneCandidate& other) {
            return !search.compete(simple, other.choices);
          }))
        continue;
      if (taken.insert(simple).second) result.best.push_back(search.candidate(simple));
    }
  };
  const auto accepts_all = [](const Choices&) { return true; };
  take(std::min<std::size_t>(1, finalists), accepts_all);
  take(std::min<std::size_t>(2, finalists), [&](const Choices& choices) {
    return result.best.empty() || search.is_unsurely_other(choices, result.best.front().choices);
  });
  take(finalists, accepts_all);
  std::ranges::stable_sort(
      result.best, {}, [](const TuneCandidate& candidate) { return candidate.prediction.rank_s; });
  result.predictions = search.size();
  return result;
}

}  // namespace sluice
