// Where a training's state may come from: a checkpoint of Sluice, a universal checkpoint of
// DeepSpeed, or a model's weights alone, as Hugging Face writes them.
//
// Thread rule: functions of the file system.
#pragma once

#include <string>

#include <sluice/checkpoint.h>
#include "tools/gpt/model/gpt_config.h"

namespace sluice {

// The folder of a checkpoint: `folder` itself, or the newest checkpoint in it. For a model's
// weights, `folder` may also be a file.
// Fails with: kInput where there is none of these; kDamaged where `folder` is a part of a
// checkpoint, such as a copy that was cut, which must not begin a run as if it were weights.
std::string state_origin_in(const std::string& folder);

// Opens what state_origin_in() has returned. Weights alone are a state of step 0, with zero
// moments. The weights must include all masters that `model` has.
// Fails with: as open_checkpoint(), ModelFile; kDamaged for a part of a checkpoint.
OpenCheckpoint open_state_origin(const std::string& folder, CheckpointPrecision precision,
                                 const gpt::GptConfig& model);

// Whether open_state_origin() takes `path` as a model's weights alone.
bool is_weights_alone(const std::string& path);

}  // namespace sluice
