// An engine gets its state from a source. Initial values, a checkpoint and another engine are
// examples of sources. A source gives a range of the elements of one tensor, for one kind of state.
// Every rank reads only the ranges that the rank owns. So the number of ranks that read a state may
// differ from the number of ranks that wrote the state.
//
// Thread rule: each function's comment gives the rule for that function.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sluice/config.h>
#include <sluice/export.h>
#include <sluice/model_spec.h>
#include <sluice/state.h>

namespace sluice {

// The variables of a loss scale. The next values of the scale depend only on these variables and on
// the scale's options.
struct LossScaleState {
  double scale = 1;
  std::uint32_t hysteresis_left = 1;  // overflows until the scale is halved, including the last one
  std::uint32_t good_steps = 0;       // since the last overflow or doubling

  bool operator==(const LossScaleState&) const = default;
};

// The position of a training run between two steps. The values of the tensors are not part of the
// position.
struct StatePosition {
  std::uint64_t step = 0;  // the number of the last update
  // This map lists the tensors that have had fewer than `step` updates. Each key is the name of a
  // tensor, and its value is the tensor's number of updates. Such tensors exist under
  // optimizer.untouched "skip", because a step then updates only the units that the step uses.
  std::map<std::string, std::uint64_t> tensor_updates = {};
  // If this member is empty, the loss scale starts with the value of the config.
  std::optional<LossScaleState> loss_scale = {};
};

// A description of the engine's state. A source with a saved state compares the description of the
// saved state with this description.
struct StateDescription {
  struct Tensor {
    std::string name;
    std::vector<std::uint64_t> shape;
    bool is_frozen = false;
    bool is_opaque = false;
  };

  std::vector<Tensor> tensors;
  DType parameter = DType::kBf16;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
  // The number format in which the engine keeps the moments. A source always gives moments in fp32.
  OptimizerState moments = OptimizerState::kFp32;
};
SLUICE_EXPORT StateDescription describe_state(const ModelSpec& model, DType parameter,
                                              OptimizerKind optimizer, OptimizerState moments);

class SLUICE_EXPORT StateSource {
 public:
  StateSource() = default;
  StateSource(const StateSource&) = delete;
  StateSource& operator=(const StateSource&) = delete;
  virtual ~StateSource() = default;

  // Returns the position, which is the same on all ranks.
  virtual StatePosition position() const = 0;
  // The engine calls prepare() before it reads anything from the source.
  // Fails with kInput if the source's state does not fit `wanted`.
  virtual void prepare(const StateDescription& wanted) { (void)wanted; }
  // Fills `values` with elements [first_element, first_element + values.size()) of kMaster, kExpAvg
  // or kExpAvgSq. These three kinds are a complete state, because every parameter is a master that
  // is rounded to the compute dtype. The engine asks for moments only if the optimizer keeps them.
  // The engine never asks for the moments of a frozen unit. The masters of a frozen unit are the
  // unit's parameters. If the tensor belongs to an opaque unit, the function float_of_word() turns
  // each word into a value. If allows_threads() returns false, read() is called only on the
  // application's thread.
  // Fails with the source's own errors. After a failure, the engine has no state and accepts
  // another source.
  virtual void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
                    std::span<float> values) = 0;
  // Returns whether several threads may call read() at the same time, with ranges in any order. If
  // the result is true, the engine fills the state on several processors.
  virtual bool allows_threads() const { return false; }
};

// The state of step 0: the masters come from a function, and the moments are zero.
class SLUICE_EXPORT InitialSource final : public StateSource {
 public:
  // `values` must outlive the source.
  explicit InitialSource(const InitialValues& values) : values_(values) {}

  StatePosition position() const override { return {}; }
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
            std::span<float> values) override;

 private:
  const InitialValues& values_;
};

}  // namespace sluice
