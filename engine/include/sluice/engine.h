// Sluice's facade: an engine keeps a model's parameters and optimizer state in device memory, in
// host memory and on storage. The engine brings each unit to the device just before computation
// uses the unit, and applies the optimizer once per step. The placement of the state never changes
// a bit of the result.
//
// These lines are from examples/sine/main.cc, a complete program. `Network` is its mathematics.
//
//     Config config;
//     config.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
//     config.memory = {.device_bytes = 1 << 20, .host_bytes = 4 << 20};
//     config.placement = {.parameters = TierChoice::kNvme, .optimizer = TierChoice::kNvme};
//     config.storage.paths = {argc > 1 ? argv[1] : "."};
//
//     ModelSpec model;  // a unit is what computation needs at a time: here, one layer
//     model.units = {{"hidden", {{"hidden.slope_and_shift", {2, kWidth}}}},
//                    {"output", {{"output.weight", {kWidth}}}}};
//
//     const auto device = make_host_device({.memory_bytes = 1 << 20});
//     Engine engine(config, model, *device);
//     engine.set_last_words(
//         [](const std::string& message) { std::fprintf(stderr, "%s\n", message.c_str()); });
//     engine.initialize([](const TensorPlace& tensor, std::uint64_t at, std::span<float> values) {
//       const float spread = tensor.unit == kHidden ? 7.7f : 3.3f;
//       for (float& value : values) value = std::sin(static_cast<float>(at++) * spread) / 4;
//     });
//
//     Network network;
//     const Stream stream(*device, "compute");  // declared after what its work uses
//     float first_loss = 0;
//     for (int number = 1; number <= 200; ++number) {
//       Step step = engine.begin_step({.learning_rate = 0.01});
//       for (const UnitId unit : {kHidden, kOutput}) {
//         const Lease lease = step.acquire(unit, Pass::kForward, stream);
//         const auto* weight = lease.parameter<float>(0);
//         device->launch(stream.id(), [=, &network] { network.forward(unit, weight); });
//       }
//       for (const UnitId unit : {kOutput, kHidden}) {
//         const Lease lease = step.acquire(unit, Pass::kBackward, stream);
//         const auto* weight = lease.parameter<float>(0);
//         auto* gradient = lease.gradient<float>(0);
//         device->launch(stream.id(), [=, &network] { network.backward(unit, weight, gradient); });
//       }
//       const StepReport report = step.finish();  // Adam over all blocks, then home to NVMe
//       if (number == 1) first_loss = network.loss();
//       if (number % 20 == 0)
//         std::printf("step %3d: loss %.5f, %s read, %s written\n", number, network.loss(),
//                     format_bytes(report.nvme_read_bytes).c_str(),
//                     format_bytes(report.nvme_write_bytes).c_str());
//     }
//     engine.close();  // brings what the last update has failed with, if it has
//
// Thread rule: one thread at a time may call the engine. Computation runs on the device's streams.
// A forked child cannot use or destroy the engine, because the engine's threads are not in the
// child. The child ends with _exit() or exec().
// Floating-point environment: the engine rounds to nearest and keeps denormal numbers, both on its
// own threads and during every call. The caller's setting has no effect on the engine. The
// application's functions, such as InitialValues, run in the engine's floating-point environment. A
// call does not change the caller's setting. Failure: if an exception comes before any update, the
// state has not changed. A failed transfer stops the engine permanently. The error of every later
// call names the last complete step. Storage files have no name and vanish with the process, unless
// Config::Storage::State names a durable store. After kTimeout the destructor still waits for the
// drive, because the drive may write to the engine's memory until the transfer has ended. A program
// that must not wait has to end with _exit(). Errors and aborts: a forbidden call throws Error with
// kInvalidArgument. The message names the object and the numbers, and nothing has changed. Examples
// of forbidden arguments are an id that does not exist, a range beyond a tensor's end, and a stream
// of another device. A call is forbidden, for example, while another thread is inside a call, or if
// the lease, step or engine has ended. Failures outside of Sluice throw Error too, each with its
// own code. Leases and steps may be destroyed in any order, even after their engine. The device and
// the collectives must outlive the engine. Sluice cannot check this rule. In the engine,
// SLUICE_CHECK aborts the process only because of a defect in Sluice itself. Please report such a
// defect.
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

struct EngineAccess;
struct EngineOverQueue;
struct SaveOptions;
struct SaveProgress;
struct SavedCheckpoint;

struct OpenOptions {
  // If this option is true, numbers of the config may differ from the numbers of the last commit.
  // An example is optimizer.beta2. The store keeps a list of the changed numbers.
  bool accepts_changes = false;
  // The application's data for the first commit of a new store. The rules of
  // FinishOptions::application apply to this data.
  std::string application = {};
};

// The contents of a durable store that was opened.
struct OpenedState {
  bool is_new = true;  // the store held nothing, or has just been made
  std::uint64_t step = 0;
  std::string application = {};           // this rank's FinishOptions::application of the step
  std::vector<std::string> changes = {};  // "optimizer.beta2 was 0.999 and is 0.95"
};

class SLUICE_EXPORT Engine {
 public:
  // Makes the plan, allocates every pool and creates the storage files. `device` must outlive the
  // engine.
  // If several ranks train together, `ranks` gives the collectives of this rank on `device`. For a
  // single rank, `ranks` is null. The collectives must outlive the engine, too. All ranks make the
  // same calls in the same order, including read_state().
  // Fails with:
  // - kInvalidArgument: the model is not valid.
  // - kConfig: the config is not valid.
  // - kOutOfMemory: a budget is too small. The message names the smallest budget that works.
  // - kInput, kNoSpace or kIo: a storage path cannot be used.
  // - kInput: the durable store is in use, incomplete, or of another model.
  // - kDamaged: no commit of the durable store can be read.
  // - kUnsupported: this machine cannot do what the config asks for.
  // - kRanks: the ranks disagree about the model or the config, or a rank is gone.
  // - kRanks: the ranks' local units have different shapes, or have the same names.
  // After a failure, nothing is left behind.
  Engine(const Config& config, const ModelSpec& model, Device& device,
         Collectives* ranks = nullptr);
  // If close() was not called, the destructor does not finish a running update, and abandons an
  // active step. If an update has failed and no call has thrown this failure, the destructor passes
  // the failure to the function of set_last_words().
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Sets the fp32 master weights, and sets the moments to zero. Once, before the first step.
  // Fails with:
  // - kNonFinite: a value is not finite. The message names tensor and element.
  // - kInvalidArgument: `values` has no function, or the engine or its durable store already has a
  //   state.
  // - kIo and others: a transfer has failed.
  // After a failure, initialize() can be called again.
  void initialize(const InitialValues& values);

  // Sets all of the state from `source`: masters, moments, step and loss scale. The application
  // makes this call instead of initialize(). Training then continues with the same bits as an
  // uninterrupted run. The saved state may come from a run with another placement, another number
  // of ranks or another ZeRO stage. Each rank reads only the part of the state that the rank owns.
  // Fails with:
  // - The source's own errors.
  // - kNonFinite and others, in the same cases as initialize().
  // - kInput: the source's loss scale is not valid.
  // - kInput: several ranks have a durable store, and this store already has a commit of the
  //   source's step.
  // - kUnsupported: the durable store holds a state with frozen units.
  // - kRanks: ranks have sources at different positions.
  // After a failure, initialize() or restore() can be called. After such a failure, a durable store
  // still has its last commit, and open_or_create() continues from this commit.
  // `application` is data of the application. The rules of FinishOptions::application apply to this
  // data. With a durable store, the data is committed together with the state.
  void restore(StateSource& source, const std::string& application = {});

  // Sets the fp32 masters of `tensors`, and the parameters that are computed from these masters.
  // The call is made between two steps. The moments, the step and all other tensors do not change.
  // All ranks pass the same list.
  // Fails with:
  // - kInvalidArgument: a step is active, the state has no values yet, there is no function, or a
  //   tensor does not exist.
  // - kUnsupported: the engine has a durable store.
  // - kNonFinite: a value is not finite. The message names tensor and element.
  // - kRanks: the lists of the ranks differ.
  // If `values` fails, each block of the tensors has either its old or its new values. With several
  // ranks, a failure of `values` stops the engine, because the ranks' copies of a tensor may then
  // differ.
  void replace_values(std::span<const TensorId> tensors, const InitialValues& values);

  // Continues from the last commit that every rank has in the store of Config::Storage::State. If
  // no file has the store's name, the call makes the store with the state of step 0. Training
  // continues with the same bits as an uninterrupted run, under any placement, policy and budgets.
  // The application makes this call instead of initialize() or restore(). A call of initialize()
  // makes a store, too, and fails with kInvalidArgument if a store exists already. A call of
  // restore() replaces the state of an old store.
  // Fails with:
  // - kInvalidArgument: the config names no store, there is no function, or the engine has a state.
  // - kInput: numbers of the config have changed.
  // - kIo or kDamaged: the store cannot be read.
  // - The errors of initialize().
  // The constructor has already refused a store that is in use, incomplete, or of another model.
  OpenedState open_or_create(const InitialValues& values, const OpenOptions& options = {});
  // Returns the last step whose commit is durable on this rank. One step later, the commit of the
  // returned step is durable on every rank. After the constructor, the result is the step from
  // which open_or_create() continues. The result is empty if there is no store, or no commit yet.
  std::optional<std::uint64_t> committed_step() const;
  // Makes a commit of the last step that was applied, even if no commit is due. A skipped step is
  // part of no commit, and a resumed run repeats it. When commit_now() returns, every rank has the
  // commit.
  // Fails with:
  // - kInvalidArgument: there is no store, or a step is active.
  // - kIo and others: a transfer has failed.
  void commit_now();

  // Writes the whole state as a checkpoint into a new folder below `root`. The call is made between
  // two steps. The checkpoint appears whole and synced, or not at all. Older checkpoints are
  // removed only after the new checkpoint has appeared. All ranks take part. Each rank writes its
  // own ranges, so every rank needs access to `root`. When save() returns, the checkpoint is on the
  // drive. open_checkpoint() opens the checkpoint. The checkpoint has the local units
  // (UnitSpec::is_local) of all ranks, under the units' names. So training can continue from the
  // checkpoint with another number of ranks, or with another division of the local units among the
  // ranks.
  // Fails with:
  // - kInvalidArgument: a step is active, or the application's text or the name of a hyperparameter
  //   is not UTF-8.
  // - kInput, kNoSpace or kIo, on all ranks: a file cannot be written. The message names the file.
  // After a failure, the engine can continue, and the contents of `root` are as before.
  SavedCheckpoint save(const std::string& root, const SaveOptions& options);
  // Does the same as save(), but does not wait until the checkpoint is written. The call returns as
  // soon as the drive has reserved space for the files. Training can then continue. While training
  // continues, threads of the engine read the state block by block and write the blocks to the
  // files. The update of a block waits until the checkpoint has copied the block. So the checkpoint
  // holds exactly the state at the time of the call. If another save is under way, begin_save()
  // first waits for the end of that save, whose result poll_save() then returns, or the notes of
  // the next checkpoint name. After all ranks have written their parts, a later call gives the
  // checkpoint its name. The checkpoint gets its name in the next call of begin_step(),
  // finish_save(), begin_save(), save(), replace_values() or close(). All ranks make the same
  // calls.
  // Fails with:
  // - The errors of save().
  // - kInvalidArgument: memory.save_buffers is 0.
  // - The failure of the previous save, if no call has thrown this failure.
  void begin_save(const std::string& root, const SaveOptions& options);
  // Returns the checkpoint that begin_save() began, after a later call has given the checkpoint its
  // name. The result is empty while the checkpoint is being written. Each checkpoint is returned
  // only once. If several have appeared since the last call, the newest is returned, and its notes
  // name the others.
  // If the save has failed, only one call throws the failure. If neither poll_save() nor
  // finish_save() takes the failure, the next begin_step(), begin_save(), save() or close() throws
  // the failure. After this failure, the engine can continue, and the contents of the folder are as
  // before.
  std::optional<SavedCheckpoint> poll_save();
  // Does the same as poll_save(), but first waits until the save has ended. The result is empty if
  // no save has been begun.
  // Fails in the same cases as poll_save(). Also fails with kInvalidArgument while a step is
  // active.
  std::optional<SavedCheckpoint> finish_save();
  // The result is empty if no save is under way.
  std::optional<SaveProgress> save_progress() const;
  // Every rank gets the `text` that rank 0 has passed.
  std::string share(const std::string& text);

  // Fails with:
  // - kInvalidArgument: a learning rate is negative, not finite or beyond the range of fp32.
  // - kInvalidArgument: there is no micro-batch, the order does not exist, a step is active, or the
  //   state was not initialized.
  // - The engine's first failure, if there was one.
  Step begin_step(const StepOptions& options);
  Inference begin_inference();

  // From the next step on, the whole group has one gradient norm (StepReport::gradient_norm), one
  // clip factor and one loss scale. The members of the group skip the same steps. If `group` has no
  // function, the norm, the clip factor and the loss scale are again those of this engine alone.
  // All ranks of one engine list the same tensors.
  // Fails with:
  // - kInvalidArgument: a step is active, a tensor does not exist, or there are tensors but no
  //   function.
  // - kRanks: the groups of the ranks differ.
  void set_norm_group(NormGroup group);

  // Returns when every scheduled update has been applied and the homes hold the updated state.
  void drain();
  // This call is the last call of an engine. The call waits for the updates, and commits the last
  // step if there is a durable store. If an update has failed and no call has thrown this failure
  // yet, close() throws the failure. An update may fail after the last finish(), except under the
  // serial policy. Steps, inferences and read_state() are refused afterwards. A second call of
  // close() throws the same failure, if there was one.
  // Fails with:
  // - kInvalidArgument: a step or an inference is active.
  // - The engine's first failure, if there was one.
  void close();
  // The destructor calls `last_words` with a failure that no call has thrown. The function runs on
  // the destructor's thread. Without this function, the failure is not reported. An exception from
  // `last_words` is ignored.
  void set_last_words(std::function<void(const std::string& message)> last_words);
  // Returns the number of updates that have been applied to every block of the state. While an
  // update runs at the same time as computation, this number is one less than StepReport::step.
  // drain() waits for the end of the update.
  std::uint64_t applied_step() const;
  // Waits in the same way as drain(), and returns the position of the training.
  // Fails with kInvalidArgument while a step is active, or if the state has no values.
  StatePosition position();

  // Copies elements of a tensor's state to `target`, beginning with element `first_element`.
  // `target` holds a whole number of elements. Elements of kParameter have the compute dtype.
  // Elements of all other kinds are fp32. A moment that the optimizer does not keep is read as
  // zero. A local unit can be read only on the rank that has the unit.
  // Fails with:
  // - kInvalidArgument: a step is active, the tensor does not exist, the range goes beyond its end,
  //   or the unit is frozen and has no moments.
  // - kIo and others: a transfer has failed.
  void read_state(TensorId tensor, StateKind kind, std::uint64_t first_element,
                  std::span<std::byte> target);

  // Returns the value `own` of every rank, in the order of the ranks. If the engine has a single
  // rank, the result has one entry. All ranks call exchange() at the same point. All ranks must
  // also call every other function at the same point if the function begins, ends or reads
  // something.
  std::vector<double> exchange(double own);
  std::uint32_t rank() const;
  std::uint32_t rank_count() const;

  // Returns the unit or the tensor of that name.
  // Fails with kInvalidArgument if the model has no unit or tensor of that name.
  UnitId unit(std::string_view name) const;
  TensorId tensor(std::string_view name) const;

  // The place of each tensor, in the order of the model. A unit's parameters and gradients end with
  // the unit's last tensor. This tensor is padded to a multiple of 256 elements.
  std::span<const TensorPlace> tensors() const;
  // Returns the storage traffic of one step with `micro_batches` micro-batches. Under the serial
  // policy, the numbers are exact. Under every other policy, the numbers are bounds. Announced uses
  // are not known beforehand: StepReport::announced_read_bytes and announced_update_bytes count
  // what they add.
  Traffic predicted_traffic(std::uint32_t micro_batches,
                            MicroBatchOrder order = MicroBatchOrder::kHorizontal);
  // Returns the mean time of computation for one use of each unit. The times are measured on the
  // stream, from the second step on. The result is empty before the second step.
  std::vector<UnitTime> unit_times() const;
  // Returns the paths of Config::Storage::paths, in the order of StepReport::drives.
  const std::vector<std::string>& storage_paths() const;
  // Lines of text for the user. Each line names a choice that was necessary because of this
  // machine. An example is the choice of threads instead of io_uring.
  const std::vector<std::string>& notes() const;

 private:
  friend struct EngineAccess;     // for Sluice's own tools and tests
  friend struct EngineOverQueue;  // for tests and benchmarks
  struct Parts;
  explicit Engine(std::unique_ptr<Parts> parts);

  std::unique_ptr<Parts> parts_;
};

}  // namespace sluice
