// The places from which a training's state may come: a checkpoint of Sluice, a universal checkpoint
// of DeepSpeed, a model's weights alone, as Hugging Face writes them, or a durable store. A store
// is named as "store:NAME", and lies on the storage paths of the config.
//
// Thread rule: any thread may call the functions, which read the file system.
#pragma once

#include <string>

#include <sluice/checkpoint.h>
#include "tools/gpt/train/train_config.h"

namespace sluice {

// The origin that `text` names: a store, or the folder of a checkpoint. The folder is `text`
// itself, or the newest checkpoint in it. For a model's weights, `text` may also be a file.
// Fails with kInput if the folder has no such state. Fails with kDamaged if `text` is a part of a
// checkpoint, such as a copy that was cut. Such a part must not begin a run as if it were weights.
std::string state_origin_in(const std::string& text);

// Opens the result of state_origin_in(). Weights alone are a state of step 0, with zero moments.
// The weights must include all masters that `config` has. Processes with the same `job` may open a
// store at the same time, as for StoreSource.
// Fails with the errors of open_checkpoint(), ModelFile and StoreSource. Fails with kDamaged for a
// part of a checkpoint, and with kInput for the store of `config` itself.
OpenCheckpoint open_state_origin(const std::string& origin, CheckpointPrecision precision,
                                 const TrainConfig& config, const std::string& job = "");

// The name of the store, if `text` names one. Otherwise the name is empty.
std::string store_in(const std::string& text);

// Whether open_state_origin() takes `path` as a model's weights alone.
bool is_weights_alone(const std::string& path);

}  // namespace sluice
