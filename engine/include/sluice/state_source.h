// The origin of a state, such as initial values, a checkpoint or another engine. A source gives
// elements [a, b) of one kind of a tensor's state, and every rank asks only for the ranges that the
// rank owns. So a state may be written by one number of ranks and read by another.
//
// Thread rule: stated at each function.
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

// The variables of a loss scale. These variables and the scale's options determine the scale's next
// values.
struct LossScaleState {
  double scale = 1;
  std::uint32_t hysteresis_left = 1;  // overflows until the scale is halved, including that one
  std::uint32_t good_steps = 0;       // since the last overflow or doubling

  bool operator==(const LossScaleState&) const = default;
};

// The position of a training between two steps, apart from the values of the tensors.
struct StatePosition {
  std::uint64_t step = 0;  // the number of the last update
  // The tensors that have seen fewer updates than `step`, by name. The value for each tensor is its
  // number of updates. Under optimizer.untouched "skip", a step updates only the units that it
  // uses.
  std::map<std::string, std::uint64_t> tensor_updates = {};
  // If this is empty, the scale starts as the config says.
  std::optional<LossScaleState> loss_scale = {};
};

// A description of the engine's state. A source that holds a state compares its own description
// with this description.
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
  // The numbers in which the engine keeps the moments. A source gives fp32 moments in any case.
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

  // The position is equal on all ranks.
  virtual StatePosition position() const = 0;
  // The engine calls prepare() before it reads anything from the source.
  // Fails with kInput if the source's state does not fit `wanted`.
  virtual void prepare(const StateDescription& wanted) { (void)wanted; }
  // Fills `values` with elements [first_element, first_element + values.size()) of kMaster, kExpAvg
  // or kExpAvgSq. The three kinds are a complete state, because compute parameters are the masters
  // rounded to the compute dtype. The engine asks for moments only if the optimizer keeps them. The
  // engine never asks for moments of a frozen unit, whose masters are its parameters. For a tensor
  // of an opaque unit, each value is a float_of_word(). Called on the application's thread, unless
  // allows_threads() returns true.
  // Fails with the source's own errors. The engine then has no state, and accepts another source.
  virtual void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
                    std::span<float> values) = 0;
  // Whether several threads may call read() at the same time, in any order of the ranges. Filling a
  // state then uses several processors.
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
