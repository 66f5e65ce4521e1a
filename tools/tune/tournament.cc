#include "tools/tune/tournament.h"

#include <algorithm>
#include <cmath>

#include <sluice/error.h>
#include "tools/report/median.h"

namespace sluice {
namespace {

constexpr unsigned kRoundsMost = 5;
constexpr unsigned kStepsMost = 20;
constexpr double kClearGain = 1.01;
constexpr double kClearGainOfOneRound = 1.03;

bool beats_given(const std::vector<Contender>& all, std::size_t index) {
  const Contender& given = all.front();
  const Contender& other = all[index];
  if (!given.failure.empty()) return true;
  for (std::size_t round = 0; round < other.round_s.size(); ++round)
    if (other.round_s[round] >= given.round_s[round]) return false;
  return gain_of(all, index) > (other.round_s.size() == 1 ? kClearGainOfOneRound : kClearGain);
}

}  // namespace

double Contender::median_s() const {
  return median(round_s);
}
double Contender::least_s() const {
  return std::ranges::min(round_s);
}
double Contender::most_s() const {
  return std::ranges::max(round_s);
}

TournamentPlan plan_tournament(double seconds, double step_s, double begin_s, unsigned steps,
                               std::size_t candidates) {
  TournamentPlan plan{.candidates = candidates};
  // A run has one step that is not measured.
  const auto run_s = [&](unsigned measured) { return begin_s + (measured + 1) * step_s; };
  const auto time_s = [&](unsigned rounds, unsigned measured, std::size_t count) {
    return rounds * static_cast<double>(count + 1) * run_s(measured);
  };
  plan.steps = std::max(1u, steps);
  while (plan.candidates > 1 && time_s(1, plan.steps, plan.candidates) > seconds) --plan.candidates;
  while (plan.rounds < kRoundsMost &&
         time_s(plan.rounds + 1, plan.steps, plan.candidates) <= seconds)
    ++plan.rounds;
  while (steps == 0 && plan.steps < kStepsMost &&
         time_s(plan.rounds, plan.steps + 1, plan.candidates) <= seconds)
    ++plan.steps;
  return plan;
}

std::vector<Contender> run_tournament(std::size_t contenders, unsigned rounds, bool given_must_run,
                                      const RunContender& run) {
  std::vector<Contender> all(contenders);
  for (unsigned round = 0; round < rounds; ++round) {
    for (std::size_t turn = 0; turn < contenders; ++turn) {
      const std::size_t index = (turn + round) % contenders;
      Contender& contender = all[index];
      if (!contender.failure.empty()) continue;
      try {
        contender.round_s.push_back(run(index, round));
      } catch (const Error& error) {
        if (index == 0 && given_must_run) throw;
        contender.failure = error.what();
      }
    }
  }
  return all;
}

double gain_of(const std::vector<Contender>& contenders, std::size_t index) {
  const Contender& given = contenders.front();
  const Contender& other = contenders[index];
  std::vector<double> gains;
  for (std::size_t round = 0; round < std::min(other.round_s.size(), given.round_s.size()); ++round)
    gains.push_back(given.round_s[round] / other.round_s[round]);
  return gains.empty() ? 1 : median(gains);
}

std::size_t winner_of(const std::vector<Contender>& contenders) {
  std::size_t winner = 0;
  for (std::size_t index = 1; index < contenders.size(); ++index) {
    const Contender& contender = contenders[index];
    if (!contender.failure.empty() || !beats_given(contenders, index)) continue;
    const bool is_first = winner == 0;
    if (is_first || contender.median_s() < contenders[winner].median_s()) winner = index;
  }
  SLUICE_CHECK(contenders[winner].failure.empty(), "a contender has run");
  return winner;
}

}  // namespace sluice
