// What the engine is told: precision, hyperparameters that stay fixed, budgets, placement and
// storage. Plain data: an application fills it in code or reads it from a config file
// (docs/configuration.md; configs/sluice.schema.json is the table of keys).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/config_document.h>
#include <sluice/dtype.h>
#include <sluice/optimizer.h>

namespace sluice {

// Where a state is to live; kAuto lets the planner decide.
enum class TierChoice : std::uint8_t { kAuto, kDevice, kHost, kNvme };

enum class IoBackend : std::uint8_t { kAuto, kUring, kThreads, kSync };

// Which blocks carry a checksum that every read of them is compared with.
enum class Verify : std::uint8_t {
  kFull,
  kSample,  // one in eight, other blocks after every update
  kOff,
};

enum class NonFinitePolicy : std::uint8_t { kStop, kSkip };

// When blocks are updated (docs/design/updates.md). No choice changes a
// bit of the result.
enum class OverlapPolicy : std::uint8_t { kAuto, kEager, kDeferred, kSpeculative, kSerial };

std::string_view name_of(OverlapPolicy policy);

// How the micro-batches of a step go through the units. Horizontal: forward and backward of each in
// turn, so that activations of one are alive, and parameters are fetched for every one. Vertical:
// all of them through a unit before the next unit, so that parameters are fetched as for one, and
// activations at the units' boundaries are alive for all. Gradients are added in order of use; that
// is the same order, and so the same bits, unless backward uses a unit more than once (tied
// weights).
enum class MicroBatchOrder : std::uint8_t { kHorizontal, kVertical };

std::string_view name_of(MicroBatchOrder order);

// Who keeps what forward leaves for backward. Under all but kKeep that is what crosses from one
// use of a unit to the next (engine/plan/activation_plan.h), and the application computes the rest
// again in backward.
enum class ActivationHome : std::uint8_t {
  kKeep,       // the application, all of it
  kRecompute,  // the engine, in device memory
  kHost,       // the engine, in host memory
  kNvme,       // the engine, on storage
};

std::string_view name_of(ActivationHome home);

// How the loss is scaled (engine/step/loss_scaler.h). The application multiplies its loss, or the
// gradient of it, with Step::loss_scale(); the engine divides the gradients again. With a scale
// that moves, a step whose gradients overflow is skipped, whatever `non_finite` says.
struct LossScaleOptions {
  // The scale of every step; 0 = it moves, by what follows. 1 = no scaling.
  double static_scale = 1;
  std::uint32_t initial_scale_power = 16;  // it starts at two to the power of this; 0..32
  // Steps without overflow before it doubles. Small: more steps are lost by trying; large: small
  // gradients are lost for longer.
  std::uint32_t window = 1000;
  // Overflows before it is halved, the last of them included. At least 1.
  std::uint32_t hysteresis = 2;
  // An overflow that was let pass is forgotten by the next step without one; else only when the
  // scale doubles.
  bool consecutive_hysteresis = false;
  // It is not halved below; an overflow there ends the run. 0 = no bound.
  double minimum = 1;
};

// How gradients are added over the ranks. kExact: in rank order, the same bits everywhere. kNccl,
// on GPUs: in the order that NCCL chooses by length and topology.
enum class RankReduction : std::uint8_t { kExact, kNccl };

struct Config {
  struct Precision {
    DType parameters = DType::kBf16;
    DType gradients = DType::kBf16;
    LossScaleOptions loss_scale = {};

    bool scale_moves() const { return loss_scale.static_scale == 0; }
  } precision;

  struct Optimizer {
    OptimizerKind kind = OptimizerKind::kAdamW;
    AdamOptions adam;        // of every kind: sluice/optimizer.h says which one reads what
    double momentum = 0.9;   // of kSgd
    double clip_norm = 1.0;  // bound on the global gradient norm; 0 = no clipping
    // Added to the norm before it is compared and divided by: PyTorch and DeepSpeed have 1e-6.
    double clip_epsilon = 0;
    NonFinitePolicy non_finite = NonFinitePolicy::kStop;
    OverlapPolicy overlap = OverlapPolicy::kAuto;
    std::optional<std::uint32_t>
        lanes;  // blocks in the pass at once; nothing = the planner's choice

    // Tensors with hyperparameters of their own; the first group that names a tensor counts.
    struct Group {
      std::vector<std::string> tensors;  // patterns: '*' any characters, '?' one
      double learning_rate_factor = 1;   // times the step's learning rate
      // Nothing = the optimizer's, or none, as the tensor says.
      std::optional<double> weight_decay = {};
    };
    std::vector<Group> groups;

    OptimizerOptions options() const { return {.kind = kind, .adam = adam, .momentum = momentum}; }
  } optimizer;

  // Budgets for the engine's pools. Nothing = a share of the machine's memory (device a quarter,
  // host half).
  struct Memory {
    std::optional<std::uint64_t> device_bytes;
    std::optional<std::uint64_t> host_bytes;
  } memory;

  struct Placement {
    TierChoice parameters = TierChoice::kAuto;
    TierChoice optimizer = TierChoice::kAuto;  // kDevice: as are parameters and gradients then
    TierChoice gradients = TierChoice::kAuto;
  } placement;

  struct Activations {
    ActivationHome home = ActivationHome::kKeep;
    // The largest step that there will be; pools hold its activations.
    std::uint32_t micro_batches = 1;
    MicroBatchOrder order = MicroBatchOrder::kHorizontal;
  } activations;

  struct Storage {
    std::vector<std::string> paths{"/var/tmp"};
    std::vector<double> weights;  // of the paths: their shares of the bytes; empty = equal, or
    std::string calibration;      // by this file of `sluice bench io`
    std::optional<std::uint64_t>
        block_elements;  // a multiple of 4096; nothing = by the model's size
    IoBackend backend = IoBackend::kAuto;
    std::uint32_t queue_depth = 32;
    Verify verify = Verify::kFull;
    // With a name the state outlives the process, in files of that name on every path, which
    // commits make whole (docs/durable.md). Without one it lies in scratch files that vanish.
    struct State {
      std::string name = {};
      std::uint32_t commit_every = 1;  // updates
    } state = {};
    double timeout_s = 120;  // a transfer in flight for longer stops the engine; 0 = never
  } storage;

  // What several ranks share (docs/design/ranks.md); of no meaning for one.
  struct Sharding {
    std::uint32_t stage = 3;  // ZeRO: 0 nothing, 1 optimizer state, 2 also gradients, 3 also
                              // parameters
    // How many ranks share a copy of the state: consecutive ones, the others have copies of their
    // own. 0 = all of them. A divisor of their number.
    std::uint32_t group_ranks = 0;
    bool group_is_node = false;  // as many as a host has: the tool that knows sets group_ranks
    // Stage 3: units whose parameters take no more are kept whole on every rank's device, as at
    // stage 2, as far as memory.device holds them beside the window. Larger: fewer gathers, and so
    // much of device memory for each such unit. Below the default a gather's time is latency,
    // whatever its length. 0 = none.
    std::uint64_t keep_gathered_bytes = 256 << 10;
    // For whoever makes the collectives:
    RankReduction reduction = RankReduction::kExact;
    double timeout_s = 120;  // that a rank waits for another
  } sharding;

  unsigned threads = 0;  // for the optimizer; 0 = the cores granted to the process
};

// Reads the engine's part of `document`.
Config engine_config(const ConfigDocument& document);

// Checks what code may have filled in wrongly; a config read from a file passes.
// Fails with: kConfig naming the member.
void validate(const Config& config);

}  // namespace sluice
