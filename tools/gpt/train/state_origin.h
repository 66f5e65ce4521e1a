// The places from which a training's state may come: a checkpoint of Sluice, a universal checkpoint
// of DeepSpeed, or a model's weights alone, as Hugging Face writes them.
//
// Thread rule: any thread may call the functions, which read the file system.
#pragma once

#include <string>

#include <sluice/checkpoint.h>
#include "tools/gpt/model/gpt_config.h"

namespace sluice {

// The folder of a checkpoint. The folder is `folder` itself, or the newest checkpoint in it. For a
// model's weights, `folder` may also be a file.
// Fails with kInput if the folder has no such state. Fails with kDamaged if `folder` is a part of a
// checkpoint, such as a copy that was cut. Such a part must not begin a run as if it were weights.
std::string state_origin_in(const std::string& folder);

// Opens the result of state_origin_in(). Weights alone are a state of step 0, with zero moments.
// The weights must include all masters that `model` has.
// Fails with the errors of open_checkpoint() and ModelFile, and with kDamaged for a part of a
// checkpoint.
OpenCheckpoint open_state_origin(const std::string& folder, CheckpointPrecision precision,
                                 const gpt::GptConfig& model);

// Whether open_state_origin() takes `path` as a model's weights alone.
bool is_weights_alone(const std::string& path);

}  // namespace sluice
