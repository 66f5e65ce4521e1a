// The state of a training comes from a checkpoint of Sluice, a universal checkpoint of DeepSpeed,
// the weights of a model, or a durable store. The weights are in the format that Hugging Face
// writes. The name of a store is "store:NAME", and the store lies on the storage paths of the
// config.
//
// Thread rule: any thread may call the functions. The functions read the file system.
#pragma once

#include <string>

#include <sluice/checkpoint.h>
#include "tools/gpt/train/train_config.h"

namespace sluice {

// Returns the origin that `text` names: a store, a folder, or a file with a model's weights. If
// `text` is a folder of checkpoints, the origin is the newest checkpoint in the folder.
// Fails with kInput if `text` leads neither to a checkpoint nor to a model's weights. Fails with
// kDamaged if `text` is a part of a checkpoint, such as an incomplete copy. A run must not mistake
// a part of a checkpoint for a model's weights.
std::string state_origin_in(const std::string& text);

// Opens the result of state_origin_in(). If the origin has only weights, these weights count as the
// state of step 0, and the moments are zero. The weights must include all masters of the model in
// `config`. Several processes with the same `job` may open a store at the same time (see
// StoreSource).
// Fails with the errors of open_checkpoint(), ModelFile and StoreSource. Fails with kDamaged if the
// origin is a part of a checkpoint. Fails with kInput if the origin is the store of `config`
// itself.
OpenCheckpoint open_state_origin(const std::string& origin, CheckpointPrecision precision,
                                 const TrainConfig& config, const std::string& job = "");

// Returns the name of the store that `text` names. The result is empty if `text` names no store.
std::string store_in(const std::string& text);

// Returns whether open_state_origin() treats `path` as a model's weights without optimizer state.
bool is_weights_alone(const std::string& path);

}  // namespace sluice
