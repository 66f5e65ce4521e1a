// Reads the state from a universal checkpoint of DeepSpeed, which ds_to_universal writes. Each
// parameter has a folder with an fp32 master, moments and the step. No pickle is executed.
//
// Thread rule: one thread at a time may use the object.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sluice/state_source.h>
#include "engine/checkpoint/torch_file.h"

namespace sluice {

// Returns the path of the folder "zero", which has the parameters. The folder "zero" lies either in
// `folder`, or in a subfolder that the file "latest_universal" names. Returns nothing if `folder`
// is not a universal checkpoint.
std::optional<std::string> universal_parameters(const std::string& folder);

class UniversalSource final : public StateSource {
 public:
  // `parameters` is a result of universal_parameters().
  // Fails with kInput if the folder has no parameters, or if the parameters' numbers of steps
  // differ. The message names the file or the folder.
  explicit UniversalSource(const std::string& parameters);

  StatePosition position() const override { return position_; }
  // Fails with kInput if a tensor is missing, superfluous, opaque or of another shape. Also fails
  // with kInput if the optimizer of `wanted` is neither Adam nor AdamW.
  void prepare(const StateDescription& wanted) override;
  // Fails with the errors of TorchFile::read().
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
            std::span<float> values) override;

 private:
  struct Open {
    std::string tensor;
    std::unique_ptr<TorchFile> file;
  };

  TorchFile& file_of(const std::string& tensor, StateKind kind);
  void add_step(const std::string& tensor);
  const std::string& folder_of(const std::string& tensor) const;

  std::string parameters_;
  std::map<std::string, std::string> folders_;  // by parameter
  StatePosition position_;
  std::string first_stepped_;  // a parameter that has a step
  std::array<Open, 3> open_;   // the last file of each kind, because ranges come in order
};

}  // namespace sluice
