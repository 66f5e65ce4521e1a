// The output of `sluice tune`: the verdict, JSON, and a table of the user's config and the
// finalists.
//
// Thread rule: one thread.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "tools/tune/calibration.h"
#include "tools/tune/tournament.h"
#include "tools/tune/tune_search.h"

namespace sluice {

struct TuneOutcome {
  TuneResult search;
  TournamentPlan plan;
  std::vector<Contender> contenders;  // the first is the given config; empty = there were no runs
  std::size_t winner = 0;             // an index in `contenders`
  MachineCalibration machine;
  bool was_cached = false;  // whether the calibration came from a file
  double seconds = 0;       // time of the command, without the calibration

  // Returns the candidate that belongs to contenders[index].
  const TuneCandidate& candidate(std::size_t index) const {
    return index == 0 ? search.given : search.best[index - 1];
  }
};

// Returns a text such as "memory.host=auto optimizer.lanes=(chosen by Sluice)".
std::string settings_text(const TuneSettings& settings);

// Returns the verdict, which is the first line of the output. The other lines explain the verdict.
std::string tune_verdict(const TuneOutcome& outcome);
// Returns the lines after the verdict: the calibration, the table, and the settings of each
// finalist.
std::string tune_table(const TuneOutcome& outcome);
std::string tune_json(const TuneOutcome& outcome);

}  // namespace sluice
