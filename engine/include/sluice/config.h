// The configuration of an engine: precision, hyperparameters that stay fixed, budgets, placement
// and storage. Plain data, which an application fills in code or reads from a config file
// (docs/configuration.md). The keys are listed in configs/sluice.schema.json.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/config_document.h>
#include <sluice/dtype.h>
#include <sluice/export.h>
#include <sluice/optimizer.h>

namespace sluice {

// The tier where a state lives. With kAuto, the planner decides.
enum class TierChoice : std::uint8_t { kAuto, kDevice, kHost, kNvme };
SLUICE_EXPORT std::string_view name_of(TierChoice tier);

enum class IoBackend : std::uint8_t { kAuto, kUring, kThreads, kSync };
SLUICE_EXPORT std::string_view name_of(IoBackend backend);

// The blocks that carry a checksum. Every read of such a block is compared with its checksum.
enum class Verify : std::uint8_t {
  kFull,
  kSample,  // one in eight; other blocks after every update
  kOff,
};
SLUICE_EXPORT std::string_view name_of(Verify verify);

enum class NonFinitePolicy : std::uint8_t { kStop, kSkip };
SLUICE_EXPORT std::string_view name_of(NonFinitePolicy policy);

// How the update treats units that no rank has used in backward during the step.
// - - kUpdate: the gradient of such a unit is zero, and the update decays its moments and weights.
// - - kSkip: such a unit does not change, moves no bytes and counts no update, like a parameter
//   without a gradient in torch's optimizers.
// - kLazy: the bits are those of kUpdate, but a unit whose state is on storage makes up for its
//   missed updates later, all at once.
enum class UntouchedPolicy : std::uint8_t { kUpdate, kSkip, kLazy };
SLUICE_EXPORT std::string_view name_of(UntouchedPolicy policy);

// When blocks are updated (docs/design/updates.md). The choice changes no bit of the result.
enum class OverlapPolicy : std::uint8_t { kAuto, kEager, kDeferred, kSpeculative, kSerial };

SLUICE_EXPORT std::string_view name_of(OverlapPolicy policy);

// How the micro-batches of a step go through the units. Horizontal: each micro-batch runs forward
// and backward before the next one begins. So only one batch's activations exist at a time, but
// parameters are fetched for every micro-batch. Vertical: all micro-batches go through a unit
// before the next unit. So parameters are fetched once, but the activations of all micro-batches at
// the units' boundaries exist together. Gradients are added in the order of use. Both orders give
// the same bits, unless backward uses a unit more than once (tied weights).
enum class MicroBatchOrder : std::uint8_t { kHorizontal, kVertical };

SLUICE_EXPORT std::string_view name_of(MicroBatchOrder order);

// Where the values stay that forward computes and backward needs. With kKeep, the application keeps
// all of these values. Otherwise the engine keeps only the values that one use of a unit passes to
// the next use (engine/plan/activation_plan.h). The application computes all other values again in
// backward.
enum class ActivationHome : std::uint8_t {
  kKeep,       // by the application, all of it
  kRecompute,  // by the engine, in device memory
  kHost,       // by the engine, in host memory
  kNvme,       // by the engine, on storage
};

SLUICE_EXPORT std::string_view name_of(ActivationHome home);

// How the loss is scaled (engine/step/loss_scaler.h). The application multiplies its loss, or the
// gradient of the loss, by Step::loss_scale(), and the engine divides the gradients by the same
// factor. With a dynamic scale, a step with overflowing gradients is skipped, even if `non_finite`
// says otherwise.
struct LossScaleOptions {
  // The scale of every step. 0 stands for a dynamic scale, as set below. 1 stands for no scaling.
  double static_scale = 1;
  std::uint32_t initial_scale_power = 16;  // starts at two to the power of this; 0..32
  // The number of steps without overflow after which the scale doubles. With a small window, more
  // steps are lost to overflows. With a large window, the scale stays low for longer, and small
  // gradients are lost.
  std::uint32_t window = 1000;
  // The number of overflows after which the scale is halved. At least 1.
  std::uint32_t hysteresis = 2;
  // If true, every step without an overflow resets the count of overflows. If false, only a
  // doubling of the scale resets the count.
  bool consecutive_hysteresis = false;
  // The scale never goes below this minimum, and an overflow at the minimum ends the run. 0 = no
  // minimum.
  double minimum = 1;
};

// The order in which gradients are added over the ranks. `kExact` stands for rank order, which
// gives the same bits everywhere. `kNccl`, on GPUs, stands for the order that NCCL chooses by
// length and topology. `kNodes` stands for rank order inside each node, and then the order of the
// nodes. This order gives the same bits on hosts and GPUs, too, and sends less data between nodes.
enum class RankReduction : std::uint8_t { kExact, kNccl, kNodes };
SLUICE_EXPORT std::string_view name_of(RankReduction reduction);

// The reaction when the pools need more memory than the host or a GPU has free: an error, a note,
// or nothing. The free memory is looked up when the engine is made. Without the error, the kernel
// may kill the process in the middle of a step.
enum class RoomCheck : std::uint8_t { kError, kWarn, kOff };
SLUICE_EXPORT std::string_view name_of(RoomCheck check);

// Whether leases and updates use the state where it is, in host memory or on the device, instead of
// a copy. This needs a single rank, and a device without memory of its own, such as the host
// device.
enum class UnifiedMemory : std::uint8_t {
  kAuto,  // where the device allows it
  kOff,   // copies, as on a GPU
  kOn,    // as kAuto, but other devices and several ranks are refused
};
SLUICE_EXPORT std::string_view name_of(UnifiedMemory unified);

// Whether memory that no lease covers is inaccessible at the addresses that leases give, so that a
// use outside of a lease ends the process where it happens. This needs the host device.
enum class GuardMode : std::uint8_t {
  kAuto,  // in builds without NDEBUG, where the device allows it
  kOff,
  kOn,  // other devices are refused
};
SLUICE_EXPORT std::string_view name_of(GuardMode mode);

struct Config {
  struct Precision {
    DType parameters = DType::kBf16;
    DType gradients = DType::kBf16;
    LossScaleOptions loss_scale = {};

    bool scale_moves() const { return loss_scale.static_scale == 0; }
  } precision;

  struct Optimizer {
    OptimizerKind kind = OptimizerKind::kAdamW;
    OptimizerState state = OptimizerState::kFp32;
    std::uint64_t rounding_seed = 0;  // of the random bits with which kBf16 rounds
    AdamOptions adam;                 // sluice/optimizer.h lists which kind reads which option
    double momentum = 0.9;            // for kSgd
    double clip_norm = 1.0;           // bound on the global gradient norm; 0 = no clipping
    // The norm is increased by this value before it is compared with clip_norm, and before
    // gradients are divided by it. PyTorch and DeepSpeed use 1e-6.
    double clip_epsilon = 0;
    NonFinitePolicy non_finite = NonFinitePolicy::kStop;
    UntouchedPolicy untouched = UntouchedPolicy::kUpdate;
    // Under kLazy, the largest number of updates that a unit may miss; at least 1. After that many
    // missed updates, the unit makes up for all of them, even if no step uses it. A larger number
    // saves bytes, but needs more memory and arithmetic when a unit makes up for its updates.
    std::uint32_t lazy_max = 1000;
    OverlapPolicy overlap = OverlapPolicy::kAuto;
    std::optional<std::uint32_t>
        lanes;  // blocks in the pass at once; empty = the planner chooses by itself

    // Tensors with their own hyperparameters; a tensor belongs to the first group that names it.
    struct Group {
      std::vector<std::string> tensors;  // patterns: '*' any characters, '?' one
      double learning_rate_factor = 1;   // times the step's learning rate
      // If this is empty, the group has the optimizer's decay, except for tensors with
      // WeightDecay::kNone, which have no decay.
      std::optional<double> weight_decay = {};
    };
    std::vector<Group> groups;

    OptimizerOptions options() const { return {.kind = kind, .adam = adam, .momentum = momentum}; }
  } optimizer;

  // Budgets for the engine's pools. An empty device_bytes stands for all free memory of the device.
  // An empty host_bytes stands for half of the machine's memory, but at most for the free memory
  // that the device leaves.
  struct Memory {
    std::optional<std::uint64_t> device_bytes = {};
    std::optional<std::uint64_t> host_bytes = {};
    RoomCheck check = RoomCheck::kError;
    // The number of blocks that Engine::begin_save() holds in memory at once, at most 16. With 0,
    // begin_save() is refused.
    std::uint32_t save_buffers = 0;
    UnifiedMemory unified = UnifiedMemory::kAuto;
    GuardMode guard = GuardMode::kAuto;
  } memory;

  struct Placement {
    TierChoice parameters = TierChoice::kAuto;
    TierChoice optimizer = TierChoice::kAuto;  // kDevice: parameters and gradients live there too
    TierChoice gradients = TierChoice::kAuto;
  } placement;

  struct Activations {
    ActivationHome home = ActivationHome::kKeep;
    // The most micro-batches in one step of the run. The pools have room for the activations of
    // such a step.
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
    // If there is a name, the state outlives the process. The state then lies in files of that name
    // on every path, and commits keep these files consistent (docs/durable.md). If there is no
    // name, the state lies in scratch files that vanish with the process.
    struct State {
      std::string name = {};
      std::uint32_t commit_every = 1;  // updates
    } state = {};
    double timeout_s = 120;  // a longer transfer stops the engine; 0 = no limit
  } storage;

  // The part of the state that ranks share (docs/design/ranks.md); ignored for a single rank.
  struct Sharding {
    // The ZeRO stage. At stage 0, ranks share nothing. At stage 1, they share the optimizer state.
    // At stage 2, they also share the gradients. At stage 3, they also share the parameters.
    std::uint32_t stage = 3;
    // The number of consecutive ranks that share a copy of the state. Other ranks have copies of
    // their own. 0 stands for all ranks. This number must divide the number of all ranks.
    std::uint32_t group_ranks = 0;
    bool group_is_node = false;  // a host's ranks; the tool that knows them sets group_ranks
    // At stage 3, a unit whose parameters take at most this many bytes is stored whole on every
    // rank's device, as at stage 2. Such a unit needs room in memory.device beside the window. A
    // larger value saves gathers, but takes more device memory. Gathers below the default size take
    // the same time whatever their length, because latency dominates. 0 = no unit.
    std::uint64_t keep_gathered_bytes = 256 << 10;
    // The members below are for the code that makes the collectives.
    RankReduction reduction = RankReduction::kExact;
    // The number of consecutive ranks that form a node under kNodes. This number must divide the
    // number of ranks. 0 stands for the ranks of a host, and RankWorld::shared() then sets this
    // number. With split_ranks(), the application sets the number of the part's ranks on a host.
    std::uint32_t node_ranks = 0;
    double timeout_s = 120;  // how long a rank waits for another
  } sharding;

  unsigned threads = 0;  // for the optimizer; 0 = the cores granted to the process
};

// Reads the engine's part of `document`.
SLUICE_EXPORT Config engine_config(const ConfigDocument& document);

// Checks values that an application's code may have set wrongly; a config that was read from a file
// passes.
// Fails with kConfig, naming the member.
SLUICE_EXPORT void validate(const Config& config);

}  // namespace sluice
