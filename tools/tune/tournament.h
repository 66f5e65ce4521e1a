// A tournament decides which config is quickest: the given config or one of several candidates. In
// each round, every config runs for a few steps. A disturbance of the machine therefore affects all
// configs. The given config wins ties.
//
// Thread rule: only one tournament may run at a time.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace sluice {

// A config that takes part in the tournament, and the results of this config.
struct Contender {
  std::vector<double> round_s;  // the median step of each round
  std::string failure;          // why the contender left; empty = it still takes part

  double median_s() const;
  double least_s() const;
  double most_s() const;
};

struct TournamentPlan {
  unsigned rounds = 1;
  unsigned steps = 1;  // the measured steps of each run
  std::size_t candidates = 0;
};

// Returns a plan with as many runs as fit into `seconds`. A step is assumed to take `step_s`
// seconds. A run is assumed to need `begin_s` seconds before its first step. `steps` is the number
// of steps per run that the user has chosen. If `steps` is 0, the plan chooses the number. The plan
// has at least one round of one step for one candidate.
TournamentPlan plan_tournament(double seconds, double step_s, double begin_s, unsigned steps,
                               std::size_t candidates);

// A function that runs contender `index` and returns the median time of the contender's steps. If
// the function throws an Error, the contender leaves the tournament.
using RunContender = std::function<double(std::size_t index, unsigned round)>;

// Contender 0 is the given config. Each round begins with a different contender than the previous
// round. If `given_must_run` is true, and the run of the given config fails, the call fails with
// the error of this run.
std::vector<Contender> run_tournament(std::size_t contenders, unsigned rounds, bool given_must_run,
                                      const RunContender& run);

// Returns the index of the winner. A candidate beats the given config if the candidate is quicker
// in every round and also in the median. The medians must differ by more than 1 %, or by more than
// 3 % if there was only one round.
// Requires: at least one contender has not failed.
std::size_t winner_of(const std::vector<Contender>& contenders);

// Returns the speed-up of contender `index` over the given config. The speed-up in a round is the
// given config's time divided by the contender's time. The result is the median of the rounds'
// speed-ups.
double gain_of(const std::vector<Contender>& contenders, std::size_t index);

}  // namespace sluice
