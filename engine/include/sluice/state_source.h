// The origin of a state: initial values, a checkpoint, another engine. A source answers "elements
// [a, b) of a tensor's kind", and every rank asks only for the ranges that it owns. So one number
// of ranks may write a state and another may read it.
//
// Thread rule: each function says its own.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <sluice/config.h>
#include <sluice/model_spec.h>
#include <sluice/state.h>

namespace sluice {

// Everything that a loss scale's next values depend on, apart from its options.
struct LossScaleState {
  double scale = 1;
  std::uint32_t hysteresis_left = 1;  // overflows until the scale is halved, including that one
  std::uint32_t good_steps = 0;       // since the last overflow or doubling

  bool operator==(const LossScaleState&) const = default;
};

// The position of a training between two steps, apart from the values of the tensors.
struct StatePosition {
  std::uint64_t step = 0;  // every block has seen this many updates
  // Empty: the scale starts as the config says.
  std::optional<LossScaleState> loss_scale = {};
};

// A description of the engine's state: sources that hold their own state compare it with that.
struct StateDescription {
  struct Tensor {
    std::string name;
    std::vector<std::uint64_t> shape;
    bool is_frozen = false;
  };

  std::vector<Tensor> tensors;
  DType parameter = DType::kBf16;
  OptimizerKind optimizer = OptimizerKind::kAdamW;
};
StateDescription describe_state(const ModelSpec& model, DType parameter, OptimizerKind optimizer);

class StateSource {
 public:
  StateSource() = default;
  StateSource(const StateSource&) = delete;
  StateSource& operator=(const StateSource&) = delete;
  virtual ~StateSource() = default;

  // Equal on all ranks.
  virtual StatePosition position() const = 0;
  // The engine calls it before everything else.
  // Fails with: kInput where the source's state does not fit `wanted`.
  virtual void prepare(const StateDescription& wanted) { (void)wanted; }
  // Fills `values` with elements [first_element, first_element + values.size()) of kMaster, kExpAvg
  // or kExpAvgSq. The values are exactly a state's, because compute parameters are the masters
  // rounded to their type. Moments are asked for only where the optimizer keeps them, and never for
  // a frozen unit, whose masters are its parameters. Called on the application's thread.
  // Fails with: the source's own errors; the engine has no state then, and accepts another source.
  virtual void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
                    std::span<float> values) = 0;
};

// Step 0: masters from a function, zero moments.
class InitialSource final : public StateSource {
 public:
  // `values` must outlive it.
  explicit InitialSource(const InitialValues& values) : values_(values) {}

  StatePosition position() const override { return {}; }
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
            std::span<float> values) override;

 private:
  const InitialValues& values_;
};

}  // namespace sluice
