// A tournament consists of runs of a few steps. The runs decide between candidates and the given
// config. The runs take turns in rounds, so that a disturbance affects all of them. The given
// config wins ties.
//
// Thread rule: one tournament at a time.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace sluice {

// One config in the tournament.
struct Contender {
  std::vector<double> round_s;  // the median step of each round
  std::string failure;          // why it left; empty while it takes part

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
// `step_s` and a run begins after `begin_s`. `steps` is the number of steps that the user has
// chosen, and the plan keeps this number. 0 means that the user has chosen no number. The plan has
// at least one round of one step for one candidate.
TournamentPlan plan_tournament(double seconds, double step_s, double begin_s, unsigned steps,
                               std::size_t candidates);

// Runs contender `index` and returns the median of the times of its steps. An Error ends the
// contender's part in the tournament.
using RunContender = std::function<double(std::size_t index, unsigned round)>;

// Contender 0 is the given config. Every round begins with a different contender.
// Fails with the errors of `run`, if the given config fails and `given_must_run` is true.
std::vector<Contender> run_tournament(std::size_t contenders, unsigned rounds, bool given_must_run,
                                      const RunContender& run);

// The index of the winner. A candidate beats the given config if it is quicker in every round and
// also in the median. In the median, the difference must be more than a hundredth, or three
// hundredths after a single round.
// Requires: at least one contender has not failed.
std::size_t winner_of(const std::vector<Contender>& contenders);

// The given config's time divided by that of contender `index`, as the median over the rounds.
double gain_of(const std::vector<Contender>& contenders, std::size_t index);

}  // namespace sluice
