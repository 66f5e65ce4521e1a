// The configuration of an engine: precision, fixed hyperparameters, memory budgets, placement and
// storage. An application sets the values in its code, or reads them from a config file
// (docs/configuration.md). Plain data. The keys are listed in configs/sluice.schema.json.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/dtype.h>
#include <sluice/export.h>
#include <sluice/optimizer.h>

namespace sluice {

class ConfigDocument;

// The tier in which a part of the state lives. With kAuto, the planner decides.
enum class TierChoice : std::uint8_t { kAuto, kDevice, kHost, kNvme };
SLUICE_EXPORT std::string_view name_of(TierChoice tier);

enum class IoBackend : std::uint8_t { kAuto, kUring, kThreads, kSync };
SLUICE_EXPORT std::string_view name_of(IoBackend backend);

// The setting that says which blocks have a checksum. When a block with a checksum is read, the
// bytes are compared with the checksum.
enum class Verify : std::uint8_t {
  kFull,
  kSample,  // one block in eight; every update selects other blocks
  kOff,
};
SLUICE_EXPORT std::string_view name_of(Verify verify);

enum class NonFinitePolicy : std::uint8_t { kStop, kSkip };
SLUICE_EXPORT std::string_view name_of(NonFinitePolicy policy);

// The setting that says how the update treats a unit that no rank has used in the step's backward
// pass.
// - kUpdate: the unit's gradient is zero, and the update decays the unit's moments and weights.
// - kSkip: the unit does not change, its bytes are not moved, and the update does not count for the
//   unit. PyTorch's optimizers treat a parameter without a gradient in the same way.
// - kLazy: the result has the same bits as with kUpdate. A unit whose state is on storage misses
//   updates at first, and later makes up for all missed updates at once.
enum class UntouchedPolicy : std::uint8_t { kUpdate, kSkip, kLazy };
SLUICE_EXPORT std::string_view name_of(UntouchedPolicy policy);

// The policy that says when blocks are updated (docs/design/updates.md). The result has the same
// bits under every policy. kAuto may mean kEager if clip_norm is 0, non_finite is kStop, and the
// loss scale is static. The eager policy updates blocks before Step::finish(). An application sets
// kDeferred if it abandons steps, or if it gives rates or divisors to finish().
enum class OverlapPolicy : std::uint8_t { kAuto, kEager, kDeferred, kSpeculative, kSerial };

SLUICE_EXPORT std::string_view name_of(OverlapPolicy policy);

// The processor that updates state whose home is not the device. Both processors give the same
// bits.
// - kCpu: the processors of the host.
// - kDevice: the device. Each block is copied to the device, updated there, and copied back.
enum class UpdateProcessor : std::uint8_t { kCpu, kDevice };

SLUICE_EXPORT std::string_view name_of(UpdateProcessor processor);
constexpr UpdateProcessor other_than(UpdateProcessor processor) {
  return processor == UpdateProcessor::kCpu ? UpdateProcessor::kDevice : UpdateProcessor::kCpu;
}

// The order in which a step computes its micro-batches and units. Horizontal: each micro-batch runs
// forward and backward before the next micro-batch begins. Only the activations of one micro-batch
// exist at a time, but parameters are fetched for every micro-batch. Vertical: all micro-batches go
// through a unit before any of them goes through the next unit. Parameters are fetched once for all
// micro-batches, but the boundary activations of all micro-batches exist at the same time.
// Gradients of a unit are added in the order in which the unit is used. Both orders give the same
// bits, unless the backward pass uses a unit more than once (tied weights).
enum class MicroBatchOrder : std::uint8_t { kHorizontal, kVertical };

SLUICE_EXPORT std::string_view name_of(MicroBatchOrder order);

// The place of the activations. Activations are the values that the forward pass computes and the
// backward pass needs. With kKeep, the application keeps all activations. With every other value,
// the engine keeps only the activations that one use of a unit passes to the next use (Step::save).
// The application then computes all other activations again in the backward pass.
enum class ActivationHome : std::uint8_t {
  kKeep,       // the application keeps all activations
  kRecompute,  // the engine keeps boundary activations in device memory
  kHost,       // the engine keeps boundary activations in host memory
  kNvme,       // the engine keeps boundary activations on storage
};

SLUICE_EXPORT std::string_view name_of(ActivationHome home);

// These options say how the loss is scaled. The application multiplies its loss, or the gradient of
// the loss, by Step::loss_scale(). The engine then divides the gradients by the same factor. With a
// dynamic scale, a step whose gradients overflow is skipped, even if Config::Optimizer::non_finite
// is kStop.
struct LossScaleOptions {
  // The scale of every step. 0 stands for a dynamic scale, which the members below control. 1
  // stands for no scaling.
  double static_scale = 1;
  std::uint32_t initial_scale_power = 16;  // the first scale is 2 to this power; 0..32
  // The scale doubles after this number of steps without overflow. With a small window, more steps
  // overflow and are skipped. With a large window, the scale stays low for more steps, and small
  // gradients are lost.
  std::uint32_t window = 1000;
  // The scale is halved after this number of overflows. The number is at least 1.
  std::uint32_t hysteresis = 2;
  // If this member is true, every step without an overflow resets the count of overflows. If this
  // member is false, only a doubling of the scale resets the count.
  bool consecutive_hysteresis = false;
  // The scale never goes below this minimum, and an overflow at the minimum ends the run. 0 = no
  // minimum.
  double minimum = 1;
};

// The order in which the gradients of the ranks are added. With `kExact`, gradients are added in
// the order of the ranks, which gives the same bits everywhere. `kNccl` is for GPUs: NCCL chooses
// the order by the length of the data and by the topology. With `kNodes`, gradients are first added
// in rank order inside each node. The sums of the nodes are then added in the order of the nodes.
// `kNodes` also gives the same bits on hosts and on GPUs, and sends less data between nodes.
enum class RankReduction : std::uint8_t { kExact, kNccl, kNodes };
SLUICE_EXPORT std::string_view name_of(RankReduction reduction);

// This setting is for the case that the host or a GPU has less free memory than the pools need. The
// reaction is an error, a note, or nothing. The check reads the size of the free memory when the
// engine is made. If the reaction is not an error, the kernel may later kill the process in the
// middle of a step.
enum class RoomCheck : std::uint8_t { kError, kWarn, kOff };
SLUICE_EXPORT std::string_view name_of(RoomCheck check);

// This setting says whether leases and updates use the state in place, without a copy. The state is
// then in host memory or on the device. If the setting is off, leases and updates use a copy of the
// state. The setting can be on only with a single rank, and with a device without memory of its
// own, such as the host device.
enum class UnifiedMemory : std::uint8_t {
  kAuto,  // on, if the device allows it
  kOff,   // off: leases and updates use copies, as on a GPU
  kOn,    // on; other devices and several ranks are refused
};
SLUICE_EXPORT std::string_view name_of(UnifiedMemory unified);

// This setting turns on a guard for the memory that leases give to the application. If the guard is
// on, this memory is accessible only while a lease covers the memory. If the guard is on, an access
// outside of a lease ends the process at the place of the access. If work is on the lease's stream
// when the lease ends, the memory stays accessible until a thread has noticed the end of this work.
// The guard requires the host device.
enum class GuardMode : std::uint8_t {
  kAuto,  // on in builds without NDEBUG, if the device allows it
  kOff,
  kOn,  // on; other devices are refused
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
    std::uint64_t rounding_seed = 0;  // the seed of the random bits for rounding to kBf16
    AdamOptions adam;                 // sluice/optimizer.h lists the options of each kind
    double momentum = 0.9;            // for kSgd
    double clip_norm = 1.0;           // bound on the global gradient norm; 0 = no clipping
    // This value is added to the gradient norm. If the sum is larger than clip_norm, the gradient
    // is multiplied by clip_norm divided by the sum. PyTorch and DeepSpeed use 1e-6.
    double clip_epsilon = 0;
    NonFinitePolicy non_finite = NonFinitePolicy::kStop;
    UntouchedPolicy untouched = UntouchedPolicy::kUpdate;
    // Under kLazy, a unit may miss at most this number of updates. The number is at least 1. After
    // this number of missed updates, the unit makes up for all of them, even if no step uses the
    // unit. With a larger number, fewer bytes are moved. But with a larger number, a unit needs
    // more memory and arithmetic to make up for its missed updates.
    std::uint32_t lazy_max = 1000;
    OverlapPolicy overlap = OverlapPolicy::kAuto;
    UpdateProcessor update_on = UpdateProcessor::kCpu;
    std::optional<std::uint32_t>
        lanes;  // blocks in the optimizer pass at the same time; empty = the planner chooses

    // A group of tensors with hyperparameters of their own. A tensor belongs to the first group
    // that names the tensor.
    struct Group {
      std::vector<std::string> tensors;  // patterns: '*' stands for any characters, '?' for one
      double learning_rate_factor = 1;   // multiplies the step's learning rate
      // If this value is empty, the group has the optimizer's weight decay. In such a group,
      // tensors with WeightDecay::kNone have no weight decay.
      std::optional<double> weight_decay = {};
    };
    std::vector<Group> groups;

    OptimizerOptions options() const { return {.kind = kind, .adam = adam, .momentum = momentum}; }
  } optimizer;

  // Budgets for the engine's pools. If device_bytes is empty, the budget is all free memory of the
  // device. If host_bytes is empty, the budget is the smaller of two sizes: half of the machine's
  // memory, and the free memory. Memory that a host device takes does not count as free memory.
  struct Memory {
    std::optional<std::uint64_t> device_bytes = {};
    std::optional<std::uint64_t> host_bytes = {};
    RoomCheck check = RoomCheck::kError;
    // Engine::begin_save() holds at most this number of blocks in memory at once. The number is at
    // most 16. If the number is 0, begin_save() is refused.
    std::uint32_t save_buffers = 0;
    UnifiedMemory unified = UnifiedMemory::kAuto;
    GuardMode guard = GuardMode::kAuto;
  } memory;

  struct Placement {
    TierChoice parameters = TierChoice::kAuto;
    TierChoice optimizer = TierChoice::kAuto;  // kDevice: parameters and gradients go there, too
    TierChoice gradients = TierChoice::kAuto;
  } placement;

  struct Activations {
    ActivationHome home = ActivationHome::kKeep;
    // The largest number of micro-batches that one step of the run has. The pools have room for the
    // activations of such a step.
    std::uint32_t micro_batches = 1;
    MicroBatchOrder order = MicroBatchOrder::kHorizontal;
  } activations;

  struct Storage {
    std::vector<std::string> paths{"/var/tmp"};
    std::vector<double> weights;  // each path's share of the bytes; empty: see `calibration`
    std::string calibration;      // file of `sluice bench io` with the shares; empty = equal shares
    std::optional<std::uint64_t>
        block_elements;  // a multiple of 4096; empty = chosen by the model's size
    IoBackend backend = IoBackend::kAuto;
    std::uint32_t queue_depth = 32;
    Verify verify = Verify::kFull;
    // If `name` is not empty, the state outlives the process. The state then lies in files of this
    // name on every path, and commits keep these files consistent (docs/durable.md). If `name` is
    // empty, the state lies in scratch files that vanish with the process.
    struct State {
      std::string name = {};
      std::uint32_t commit_every = 1;  // the number of updates per commit
    } state = {};
    double timeout_s = 120;  // a longer transfer stops the engine; 0 = no limit
  } storage;

  // These options say how the state is divided among the ranks (docs/design/ranks.md). A single
  // rank ignores these options.
  struct Sharding {
    // The ZeRO stage. At stage 0, every rank has the whole state. At stage 1, the optimizer state
    // is divided among the ranks. At stage 2, the gradients are divided, too. At stage 3, the
    // parameters are divided, too.
    std::uint32_t stage = 3;
    // One copy of the state is divided among this number of consecutive ranks. Other ranks have
    // further copies. 0 stands for all ranks. This number must divide the number of all ranks.
    std::uint32_t group_ranks = 0;
    bool group_is_node = false;  // true: RankWorld::shared() makes each host's ranks a group
    // At stage 3, the device of every rank keeps the complete parameters of small units. A unit is
    // small if its parameters take at most this many bytes. The rules of stage 2 apply to such a
    // unit. Such a unit needs room in memory.device in addition to the window. A larger value saves
    // gathers, but takes more device memory. For gathers below the default size, the time does not
    // depend on the size, because latency dominates. 0 = no unit is small.
    std::uint64_t keep_gathered_bytes = 256 << 10;
    // The members below are for the code that makes the collectives.
    RankReduction reduction = RankReduction::kExact;
    // The number of consecutive ranks that form a node under kNodes. This number must divide the
    // number of ranks. If this number is 0, RankWorld::shared() replaces the 0 with the number of
    // ranks on a host. An application that calls split_ranks() sets this number itself. The right
    // value is the number of ranks on one host that belong to the same part.
    std::uint32_t node_ranks = 0;
    double timeout_s = 120;  // how long a rank waits for another rank
  } sharding;

  unsigned threads = 0;  // threads of the optimizer; 0 = the cores granted to the process
};

// Reads the engine's part of `document`.
SLUICE_EXPORT Config engine_config(const ConfigDocument& document);

// Checks the values of `config`, because the code of an application may have set wrong values. A
// config that was read from a file passes the check.
// Fails with kConfig if a value is wrong. The message names the member.
SLUICE_EXPORT void validate(const Config& config);

}  // namespace sluice
