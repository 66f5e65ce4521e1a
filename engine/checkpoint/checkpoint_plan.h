// The files of a checkpoint, and the place of each tensor in these files. Weights in the compute
// type have the model's own names, so that other programs can load them. Other files have the data
// that only training needs: "NAME.exp_avg", "NAME.exp_avg_sq", and "NAME.master" (fp32) or
// "NAME.master_low" (the half that bf16 lacks). The plan depends only on the model. So all ranks
// compute the same plan, and the plan is the same for every number of ranks.
//
// Thread rule: plain data and a pure function.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/checkpoint/checkpoint_manifest.h"
#include "engine/plan/layout.h"

namespace sluice {

struct CheckpointPlan {
  struct File {
    std::string name;
    std::string beginning;  // the header's length and the header
    std::uint64_t size_bytes = 0;
  };
  struct Tensor {
    std::uint32_t tensor = 0;  // in the model
    CheckpointPart part = CheckpointPart::kWeight;
    std::uint32_t file = 0;
    std::string dtype;
    std::uint64_t begin_bytes = 0;  // in the file
  };

  std::vector<File> files;
  std::vector<Tensor> tensors;
  std::vector<std::vector<std::uint32_t>> stored_of;  // per model tensor: indices in `tensors`
  std::string index;                                  // model.safetensors.index.json
  std::uint64_t size_bytes = 0;
};

// A tensor lies completely in one file. If a file holds several tensors, the file has at most
// `file_bytes_max` bytes with its header. A file with a single tensor may be larger.
CheckpointPlan plan_checkpoint(const StateDescription& state, const StateFormat& format,
                               std::uint64_t file_bytes_max);

}  // namespace sluice
