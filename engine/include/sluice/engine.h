// Sluice's facade: an engine keeps a model's parameters and optimizer state in device memory, in
// host memory and on storage. The engine brings each unit to the device just before computation
// uses the unit, and applies the optimizer once per step. Placement never changes a bit of the
// result.
//
//   Engine engine(config, model, device);
//   engine.initialize(values);
//   for (int i = 0; i < steps; ++i) {
//     Step step = engine.begin_step({.learning_rate = 1e-3});
//     for (UnitId unit : forward_order) {
//       Lease lease = step.acquire(unit, Pass::kForward, stream);
//       ...  // enqueue the unit's computation on `stream`
//     }
//     for (UnitId unit : backward_order) {
//       Lease lease = step.acquire(unit, Pass::kBackward, stream);
//       ...
//     }
//     StepReport report = step.finish();
//   }
//   engine.close();
//
// examples/sine is the complete program.
//
// Thread rule: one thread at a time. Computation runs on the device's streams.
// Failure: an exception before any update leaves the state as it was. A failed transfer stops the
// engine permanently, and every later call names the last complete step. Storage files have no name
// and vanish with the process, unless Config::Storage::State names a durable store. After kTimeout
// the destructor still waits for the drive, because the drive may write to the engine's memory
// until the transfer has ended. A program that must not wait leaves by _exit().
// Errors and aborts: a call that the contract forbids throws Error with kInvalidArgument, the
// object and the numbers, and changes nothing. Examples are an id that does not exist, a range
// beyond a tensor's end, and a stream of another device. Further examples are a call during another
// thread's call, and a call on a lease, step or engine that is over. Failures outside of Sluice
// throw Error too, each with its own code. Leases and steps may be destroyed in any order, even
// after their engine. Device and collectives must outlive the engine, which Sluice cannot check.
// SLUICE_CHECK aborts only where Sluice contradicts itself; please report such a defect.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <sluice/collectives.h>
#include <sluice/config.h>
#include <sluice/device.h>
#include <sluice/export.h>
#include <sluice/model_spec.h>
#include <sluice/norm_group.h>
#include <sluice/state.h>
#include <sluice/state_source.h>
#include <sluice/step.h>

namespace sluice {

class DirectFile;
class Layout;
struct EngineOverQueue;
struct Placement;
struct SaveOptions;
struct SaveProgress;
struct SavedCheckpoint;

struct OpenOptions {
  // Continues even if numbers of the config, such as optimizer.beta2, differ from the numbers of
  // the last commit. The store keeps a list of such changes.
  bool accepts_changes = false;
  // The application's data for the first commit of a new store, as in FinishOptions::application.
  std::string application = {};
};

// The contents of a durable store that was opened.
struct OpenedState {
  bool is_new = true;  // the store has been made and held nothing
  std::uint64_t step = 0;
  std::string application = {};           // FinishOptions::application of that step, this rank's
  std::vector<std::string> changes = {};  // "optimizer.beta2 was 0.999 and is 0.95"
};

class SLUICE_EXPORT Engine {
 public:
  // Makes the plan, allocates every pool and creates the storage files. `device` must outlive the
  // engine.
  // Fails with: kInvalidArgument (model), kConfig (config), kOutOfMemory (a budget that is too
  // small; names the smallest that works), kInput or kNoSpace (storage paths), kUnsupported;
  // nothing is left behind.
  // `ranks`: the collectives of this rank, on `device`, when several ranks train together; null for
  // one rank. The collectives must outlive the engine, too. All ranks make the same calls in the
  // same order, including read_state().
  // Fails further with: kRanks when the ranks disagree about model or config, or a rank is gone.
  Engine(const Config& config, const ModelSpec& model, Device& device,
         Collectives* ranks = nullptr);
  // Without close(), an update under way is not finished, and a step under way is abandoned. The
  // function of set_last_words() receives an update's failure that no call has thrown.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Sets the fp32 master weights, with zero moments. Once, before the first step.
  // Fails with: kNonFinite naming tensor and element of a value that is not finite;
  // kInvalidArgument without a function; kIo and others. After a failure, initialize() can be
  // called again.
  void initialize(const InitialValues& values);

  // Sets all of the state from `source`, instead of initialize(): masters, moments, step and loss
  // scale. Training continues with the same bits as without a break. The placement, the number of
  // ranks and the stage of the saved state make no difference. Each rank asks for the part that it
  // owns.
  // Fails with: the source's own errors; kNonFinite and others as initialize(); kInput for an
  // impossible loss scale; kRanks where ranks have sources at different positions. After a failure,
  // either function can be called again.
  // `application`: the application's data, committed with this state to a durable store, as in
  // FinishOptions::application.
  void restore(StateSource& source, const std::string& application = {});

  // Sets the fp32 masters of `tensors`, and with them their parameters, between two steps. Moments,
  // step and all other tensors stay as they are. All ranks give the same list.
  // Fails with: kInvalidArgument while a step is active, before the state has values, without a
  // function, and for a tensor that does not exist; kUnsupported with a durable store; kNonFinite
  // naming tensor and element; kRanks where the lists differ. If `values` fails, each block of the
  // tensors has either its old or its new values. With several ranks, a failure of `values` stops
  // the engine, because copies of a tensor may then differ.
  void replace_values(std::span<const TensorId> tensors, const InitialValues& values);

  // With Config::Storage::State: continues from the store's last commit that every rank has. If
  // there is no file of the store's name, makes the store with the state of step 0. The bits are
  // the same as without a break, under any placement, policy and budgets.
  // Replaces initialize() and restore(). A call of initialize() makes a store, too, and fails with
  // kInvalidArgument where a store exists already; restore() replaces the state of an old store.
  // Fails with: kInvalidArgument without a store; kInput for numbers of the config that have
  // changed; kIo, kDamaged; and as initialize(). The constructor has refused a store that is in
  // use, incomplete, or of another model.
  OpenedState open_or_create(const InitialValues& values, const OpenOptions& options = {});
  // The last step whose commit is durable on this rank. One step later, the commit is durable on
  // every rank. After the constructor, this is the step that open_or_create() continues from.
  // Empty: no store, or no commit yet.
  std::optional<std::uint64_t> committed_step() const;
  // Commits the last step, even if no commit is due. When commit_now() returns, every rank has the
  // commit.
  // Fails with: kInvalidArgument without a store, and while a step is active; kIo and others.
  void commit_now();

  // Writes the whole state as a checkpoint into a new folder below `root`, between two steps. The
  // checkpoint appears whole and synced, or not at all. Older checkpoints are removed only
  // afterwards. All ranks take part, each with its own ranges, and all have to see `root`. When
  // save() returns, the checkpoint is on the drive. CheckpointSource reads it.
  // Fails with: kInvalidArgument while a step is active; kInput, kNoSpace, kIo naming the file, on
  // all ranks. The engine can continue, and the contents of `root` are as before.
  SavedCheckpoint save(const std::string& root, const SaveOptions& options);
  // Begins to write the same checkpoint, and returns when its files have their room. Training can
  // continue at once: threads of the engine read block by block and write it, beside the next
  // steps. An update waits until the checkpoint has its block, so the checkpoint holds the state of
  // this step exactly. If another save is under way, begin_save() first waits for it. To get the
  // checkpoint of that save, call finish_save() before begin_save().
  // The checkpoint gets its name in a later call of begin_step(), finish_save(), begin_save(),
  // save(), replace_values() or close(), when all ranks have written their parts. All ranks make
  // the same calls.
  // Fails with: as save(); kInvalidArgument if memory.save_buffers is 0; the failure of the save
  // before, if no call has thrown it.
  void begin_save(const std::string& root, const SaveOptions& options);
  // Returns the checkpoint of begin_save() once some later call has given the checkpoint its name.
  // Empty: the checkpoint is still being written, or poll_save() has returned it already.
  // Fails with: the failure of the save, once. If neither poll_save() nor finish_save() takes the
  // failure, the next begin_step(), begin_save(), save() or close() throws it. The engine can
  // continue, and the contents of the folder are as before.
  std::optional<SavedCheckpoint> poll_save();
  // The same, but waits for the save. Empty: no save has been begun.
  // Fails with: as poll_save(); kInvalidArgument while a step is active.
  std::optional<SavedCheckpoint> finish_save();
  // Empty: no save is under way.
  std::optional<SaveProgress> save_progress() const;
  // Returns rank 0's text on every rank.
  std::string share(const std::string& text);

  // Fails with: kInvalidArgument for a learning rate that is negative or not finite, no
  // micro-batch, an active step, or a state that was not initialized; the engine's first failure,
  // if there was one.
  Step begin_step(const StepOptions& options);
  Inference begin_inference();

  // From the next step on, StepReport::gradient_norm, clipping, skipped steps and the loss scale
  // are those of the whole group. A group without a function ends that. Several ranks of one engine
  // give the same tensors.
  // Fails with: kInvalidArgument while a step is active, for a tensor that does not exist, and for
  // tensors without a function; kRanks where ranks differ.
  void set_norm_group(NormGroup group);

  // Returns when every scheduled update has been applied and its state is back at home.
  void drain();
  // The last call. Drains, commits the last step to a durable store, and throws an update's failure
  // that no call has thrown yet. Under overlap, an update may fail after the last finish(). Steps,
  // inferences and read_state() are refused afterwards. A second call throws the same failure, if
  // there was one.
  // Fails with: kInvalidArgument while a step or an inference is active; the engine's first
  // failure.
  void close();
  // If no call has thrown a failure, the destructor calls `last_words` with the failure, on the
  // destructor's thread. By default such a failure is not reported. An exception from `last_words`
  // is dropped.
  void set_last_words(std::function<void(const std::string& message)> last_words);
  // The number of updates that every block of the state has seen. Under overlap, this number is one
  // less than StepReport::step until the update has ended; drain() waits for the end.
  std::uint64_t applied_step() const;
  // Drains, and returns the position of the training.
  // Fails with: kInvalidArgument while a step is active, or for a state without values.
  StatePosition position();

  // Copies elements [first_element, ...) of a tensor's state to `target`, as whole elements.
  // Elements of kParameter have the compute dtype; all others are fp32. A moment that the optimizer
  // does not keep is zero.
  // Fails with: kInvalidArgument while a step is active, for a tensor that does not exist, a range
  // beyond its end, and moments of a frozen unit; kIo and others.
  void read_state(TensorId tensor, StateKind kind, std::uint64_t first_element,
                  std::span<std::byte> target);

  // Returns every rank's `own`, by rank; a single entry without ranks. All ranks call exchange() at
  // the same point, as they do with all calls that begin, end or read.
  std::vector<double> exchange(double own);
  std::uint32_t rank() const;
  std::uint32_t rank_count() const;

  // Returns the unit or the tensor of that name.
  // Fails with: kInvalidArgument when the model has none.
  UnitId unit(std::string_view name) const;
  TensorId tensor(std::string_view name) const;

  // The place of each tensor, in the order of the model. A unit's parameters and gradients end with
  // its last tensor, padded to a multiple of 256 elements.
  std::span<const TensorPlace> tensors() const;
  // For Sluice's own tools: engine/plan/layout.h, engine/plan/placement.h.
  const Layout& layout() const;
  const Placement& placement() const;
  // The bytes that one step with `micro_batches` moves to and from storage. Under the serial policy
  // the numbers are exact; otherwise they are bounds.
  Traffic predicted_traffic(std::uint32_t micro_batches,
                            MicroBatchOrder order = MicroBatchOrder::kHorizontal);
  // The mean time of computation per use of each unit, measured on the stream since the second
  // step. Empty before the second step.
  std::vector<UnitTime> unit_times() const;
  // The scratch files, one per path of storage.paths; none where nothing is on storage.
  std::span<const DirectFile> storage_files() const;
  // Lines for the user about choices that this machine forced, such as threads instead of io_uring.
  const std::vector<std::string>& notes() const;

 private:
  friend struct EngineOverQueue;  // engine/engine_over_queue.h, for tests and benchmarks
  struct Parts;
  explicit Engine(std::unique_ptr<Parts> parts);

  std::unique_ptr<Parts> parts_;
};

}  // namespace sluice
