// A tournament decides which config is quickest: the given config or one of several candidates.
// Every config is run for a few steps in each round, so that a disturbance affects all configs. The
// given config wins ties.
//
// Thread rule: one tournament at a time.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace sluice {

// A contender: one config, and its results in the tournament.
struct Contender {
  std::vector<double> round_s;  // the median step of each round
  std::string failure;          // why the contender left; empty while it takes part

  double median_s() const;
  double least_s() const;
  double most_s() const;
};

struct TournamentPlan {
  unsigned rounds = 1;
  unsigned steps = 1;  // measured in each run
  std::size_t candidates = 0;
};

// The function plans as many runs as fit into `seconds`. The function assumes that a step takes
// `step_s`, and that a run needs `begin_s` before its first step. `steps` is the number of steps
// per run that the user has chosen, or 0 if the plan may choose the number. The plan has at least
// one round of one step for one candidate.
TournamentPlan plan_tournament(double seconds, double step_s, double begin_s, unsigned steps,
                               std::size_t candidates);

// Runs contender `index` and returns the median of the times of its steps. If the function throws
// an Error, the contender leaves the tournament.
using RunContender = std::function<double(std::size_t index, unsigned round)>;

// Contender 0 is the given config. Every round begins with another contender than the round before.
// If `given_must_run` is true and the run of the given config fails, the call fails with the error
// of this run.
std::vector<Contender> run_tournament(std::size_t contenders, unsigned rounds, bool given_must_run,
                                      const RunContender& run);

// The index of the winner. A candidate beats the given config if it is quicker in every round and
// also in the median. The medians must differ by more than 1 %, or by more than 3 % if there was
// only one round.
// Requires: at least one contender has not failed.
std::size_t winner_of(const std::vector<Contender>& contenders);

// The speed-up of contender `index` over the given config. In each round, this is the given
// config's time divided by the contender's time. The result is the median over the rounds.
double gain_of(const std::vector<Contender>& contenders, std::size_t index);

}  // namespace sluice
