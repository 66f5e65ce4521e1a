// Where a state comes from: initial values, a checkpoint, another engine. A source answers
// "elements [a, b) of a tensor's kind", and every rank asks for the ranges that it owns and no
// others, so a state may be written by one number of ranks and read by another.
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

// All that a loss scale's next values depend on, beside its options.
struct LossScaleState {
  double scale = 1;
  std::uint32_t hysteresis_left = 1;  // overflows, the one that halves the scale included
  std::uint32_t good_steps = 0;       // since the last overflow or doubling

  bool operator==(const LossScaleState&) const = default;
};

// Where training stands between two steps, beside the values of the tensors.
struct StatePosition {
  std::uint64_t step = 0;  // updates that every block has seen
  // Nothing: the scale begins as the config says.
  std::optional<LossScaleState> loss_scale = {};
};

// What an engine keeps: for sources that hold a state of their own, to compare with.
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
  // Comes before everything that an engine asks for.
  // Fails with: kInput where this is no state of what is `wanted`.
  virtual void prepare(const StateDescription& wanted) { (void)wanted; }
  // Fills `values` with elements [first_element, first_element + values.size()) of kMaster,
  // kExpAvg or kExpAvgSq: exactly what a state held, since compute parameters are the masters
  // rounded to their type. Moments are asked for only where the optimizer keeps them, and never of
  // a frozen unit, whose masters are its parameters. The application's thread.
  // Fails with: whatever keeps it from it; the engine then has no state, and can be given another.
  virtual void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
                    std::span<float> values) = 0;
};

// Step 0: masters from a function, moments of zero.
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
