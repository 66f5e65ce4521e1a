// The configuration of an engine: precision, hyperparameters that stay fixed, budgets, placement
// and storage. Plain data: an application fills it in code or reads it from a config file
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

// The tier where a state lives; with kAuto the planner decides.
enum class TierChoice : std::uint8_t { kAuto, kDevice, kHost, kNvme };
std::string_view name_of(TierChoice tier);

enum class IoBackend : std::uint8_t { kAuto, kUring, kThreads, kSync };
std::string_view name_of(IoBackend backend);

// The blocks that carry a checksum, which every read of them is compared with.
enum class Verify : std::uint8_t {
  kFull,
  kSample,  // one in eight; after every update other blocks
  kOff,
};
std::string_view name_of(Verify verify);

enum class NonFinitePolicy : std::uint8_t { kStop, kSkip };
std::string_view name_of(NonFinitePolicy policy);

// When blocks are updated (docs/design/updates.md). The choice changes no bit of the
// result.
enum class OverlapPolicy : std::uint8_t { kAuto, kEager, kDeferred, kSpeculative, kSerial };

std::string_view name_of(OverlapPolicy policy);

// How the micro-batches of a step go through the units. Horizontal: each runs forward and backward
// in turn, so only one batch's activations exist at a time, but parameters are fetched for every
// one. Vertical: all of them go through a unit before the next unit, so parameters are fetched once
// for all, but activations at the units' boundaries exist for all. Gradients are added in order of
// use. That order, and so the bits, are the same unless backward uses a unit more than once (tied
// weights).
enum class MicroBatchOrder : std::uint8_t { kHorizontal, kVertical };

std::string_view name_of(MicroBatchOrder order);

// Where the values that forward leaves for backward are kept. Under all but kKeep the engine keeps
// what crosses from one use of a unit to the next (engine/plan/activation_plan.h), and the
// application computes the rest again in backward.
enum class ActivationHome : std::uint8_t {
  kKeep,       // by the application, all of it
  kRecompute,  // by the engine, in device memory
  kHost,       // by the engine, in host memory
  kNvme,       // by the engine, on storage
};

std::string_view name_of(ActivationHome home);

// How the loss is scaled (engine/step/loss_scaler.h). The application multiplies its loss, or the
// gradient of it, by Step::loss_scale(); the engine divides the gradients again. With a dynamic
// scale, a step whose gradients overflow is skipped, whatever `non_finite` says.
struct LossScaleOptions {
  // The scale of every step; 0 = a dynamic scale, as set below. 1 = no scaling.
  double static_scale = 1;
  std::uint32_t initial_scale_power = 16;  // starts at two to the power of this; 0..32
  // Steps without overflow before the scale doubles. If small, more steps are lost by trying; if
  // large, small gradients are lost for longer.
  std::uint32_t window = 1000;
  // Overflows before the scale is halved, including the last one. At least 1.
  std::uint32_t hysteresis = 2;
  // With true, the next step without an overflow forgets earlier ones; otherwise only a doubling of
  // the scale does.
  bool consecutive_hysteresis = false;
  // The scale is not halved below this; an overflow there ends the run. 0 = no bound.
  double minimum = 1;
};

// The order in which gradients are added over the ranks. kExact: rank order, the same bits
// everywhere. kNccl, on GPUs: the order that NCCL chooses by length and topology.
enum class RankReduction : std::uint8_t { kExact, kNccl };
std::string_view name_of(RankReduction reduction);

// The reaction to pools that need more memory than the host, or a GPU, has free when the engine is
// made: an error, a note, or nothing. Without the error, the kernel may kill the process in the
// middle of a step.
enum class RoomCheck : std::uint8_t { kError, kWarn, kOff };
std::string_view name_of(RoomCheck check);

struct Config {
  struct Precision {
    DType parameters = DType::kBf16;
    DType gradients = DType::kBf16;
    LossScaleOptions loss_scale = {};

    bool scale_moves() const { return loss_scale.static_scale == 0; }
  } precision;

  struct Optimizer {
    OptimizerKind kind = OptimizerKind::kAdamW;
    AdamOptions adam;        // for every kind: sluice/optimizer.h lists who reads what
    double momentum = 0.9;   // for kSgd
    double clip_norm = 1.0;  // bound on the global gradient norm; 0 = no clipping
    // Added to the norm before it is compared and divided by. PyTorch and DeepSpeed use 1e-6.
    double clip_epsilon = 0;
    NonFinitePolicy non_finite = NonFinitePolicy::kStop;
    OverlapPolicy overlap = OverlapPolicy::kAuto;
    std::optional<std::uint32_t>
        lanes;  // blocks in the pass at once; empty = the planner chooses by itself

    // Tensors with their own hyperparameters; a tensor belongs to the first group that names it.
    struct Group {
      std::vector<std::string> tensors;  // patterns: '*' any characters, '?' one
      double learning_rate_factor = 1;   // times the step's learning rate
      // Empty = the optimizer's decay, or none, as the tensor says.
      std::optional<double> weight_decay = {};
    };
    std::vector<Group> groups;

    OptimizerOptions options() const { return {.kind = kind, .adam = adam, .momentum = momentum}; }
  } optimizer;

  // Budgets for the engine's pools. Empty: all free memory of the device; and half of the machine's
  // memory for the host, or what is free beside the device if that is less.
  struct Memory {
    std::optional<std::uint64_t> device_bytes = {};
    std::optional<std::uint64_t> host_bytes = {};
    RoomCheck check = RoomCheck::kError;
  } memory;

  struct Placement {
    TierChoice parameters = TierChoice::kAuto;
    TierChoice optimizer = TierChoice::kAuto;  // kDevice: parameters and gradients live there too
    TierChoice gradients = TierChoice::kAuto;
  } placement;

  struct Activations {
    ActivationHome home = ActivationHome::kKeep;
    // The largest step of the run; pools hold its activations.
    std::uint32_t micro_batches = 1;
    MicroBatchOrder order = MicroBatchOrder::kHorizontal;
  } activations;

  struct Storage {
    std::vector<std::string> paths{"/var/tmp"};
    std::vector<double> weights;  // the paths' shares of the bytes; empty = equal, or
    std::string calibration;      // by this file of `sluice bench io`
    std::optional<std::uint64_t>
        block_elements;  // a multiple of 4096; empty = chosen by the model's size
    IoBackend backend = IoBackend::kAuto;
    std::uint32_t queue_depth = 32;
    Verify verify = Verify::kFull;
    // With a name, the state outlives the process in files of that name on every path; commits keep
    // them consistent (docs/durable.md). Without one, it lies in scratch files that vanish.
    struct State {
      std::string name = {};
      std::uint32_t commit_every = 1;  // updates
    } state = {};
    double timeout_s = 120;  // a longer transfer stops the engine; 0 = no limit
  } storage;

  // The part of the state that ranks share (docs/design/ranks.md); ignored for a single rank.
  struct Sharding {
    std::uint32_t stage = 3;  // ZeRO: 0 nothing, 1 optimizer state, 2 also gradients, 3 also
                              // parameters
    // The number of consecutive ranks that share a copy of the state; other ranks have copies of
    // their own. 0 = all ranks. A divisor of their number.
    std::uint32_t group_ranks = 0;
    bool group_is_node = false;  // a host's ranks; the tool that knows them sets group_ranks
    // Stage 3: units whose parameters take at most this many bytes are kept whole on every rank's
    // device, as at stage 2, as far as memory.device holds them beside the window. A larger value
    // means fewer gathers, but takes device memory for each such unit. Below the default, a
    // gather's time is latency, whatever its length. 0 = none.
    std::uint64_t keep_gathered_bytes = 256 << 10;
    // For the code that makes the collectives:
    RankReduction reduction = RankReduction::kExact;
    double timeout_s = 120;  // how long a rank waits for another
  } sharding;

  unsigned threads = 0;  // for the optimizer; 0 = the cores granted to the process
};

// Reads the engine's part of `document`.
Config engine_config(const ConfigDocument& document);

// Checks values that code may have set wrongly; a config read from a file passes.
// Fails with: kConfig naming the member.
void validate(const Config& config);

}  // namespace sluice
