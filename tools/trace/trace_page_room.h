// The limits that keep the HTML page of a trace small, however long the run was, and however many
// ranks and units it has. The functions choose what is left out, and put the rest into text.
//
// Thread rule: any thread. The functions are pure.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "tools/trace/trace_analysis.h"
#include "tools/trace/trace_engine.h"

namespace sluice {

// A page has at most this size.
inline constexpr std::size_t kPageBytesMax = 5'000'000;

// The room of one rank in the page.
struct PageRoom {
  std::size_t steps = 0;
  std::size_t evaluations = 0;
  std::size_t wait_rows = 0;
  std::size_t bandwidth_bins = 0;
  std::size_t config_bytes = 0;
};

// Returns the room of each rank if there are `ranks` ranks.
PageRoom page_room(std::size_t ranks);

// Returns the places of at most `count_max` of `steps`, in order. The result contains the first
// step, the last step and the longest steps. The other places have equal distances.
std::vector<std::size_t> chosen_steps(const std::vector<StepShare>& steps, std::size_t count_max);

// Returns at most `count_max` of `count` places, in order and at equal distances. The result
// contains the first place and the last place.
std::vector<std::size_t> even_places(std::size_t count, std::size_t count_max);

// Returns the units of a rank, in at most `bytes_max` bytes. If the units need more, the names of
// tensors are left out first, and then the last units. In this case, `left_out` gets a text that
// says so.
nlohmann::ordered_json page_units(const TracedEngine& engine, std::size_t bytes_max,
                                  std::vector<std::string>& left_out);

// Returns the text of `value`, which may stand inside a script of the page.
std::string page_text(const nlohmann::ordered_json& value);

}  // namespace sluice
