// The keys that `sluice tune` may change, and the values that `sluice tune` tries. None of the keys
// changes what a step learns. Most of the keys change no bit of the result. For example, the keys
// choose homes, budgets, blocks, lanes and policies. `sluice tune` may also divide a step's
// sequences into other micro-batches. The sequences then stay the same, but sums are rounded
// differently.
//
// Thread rule: any thread. The functions are pure.
#pragma once

#include <string>
#include <vector>

#include <sluice/config_document.h>
#include "tools/gpt/train/train_config.h"
#include "tools/tune/calibration.h"
#include "tools/tune/tune_search.h"

namespace sluice {

// `given` is the config that `document` describes. `kept` lists keys, or sections such as "memory",
// that must not change. The result leaves out settings that the config already has.
// Fails with kConfig if an entry of `kept` is neither a key nor a section.
std::vector<TuneAxis> tune_axes(const ConfigDocument& document, const TrainConfig& given,
                                const MachineCalibration& machine,
                                const std::vector<std::string>& kept);

// Whether `settings` change how a step's sequences are divided into micro-batches.
bool divides_batch(const TuneSettings& settings);

}  // namespace sluice
