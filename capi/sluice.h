// Sluice's interface in C, for C programs and for bindings to other languages. The engine keeps a
// model's parameters and optimizer state in device memory, in host memory and on NVMe. The engine
// brings each unit to the device shortly before computation needs the unit. The engine updates the
// whole model once per step. The C++ interface (<sluice/engine.h>) has longer explanations. Both
// interfaces have the same order of calls:
//
//   sluice_engine_create, sluice_initialize,
//   per step: sluice_begin_step, sluice_acquire and sluice_release for each use of a unit,
//             sluice_finish_step,
//   sluice_close, sluice_engine_destroy.
//
// Computation runs on the calling thread, in host memory. sluice_gpu.h has the calls for
// computation on an NVIDIA GPU. Computation may read the parameters and write the gradients from
// the return of sluice_acquire to the call of sluice_release.
//
// Threads: only one thread at a time may call an engine, but different threads may take turns. A
// call during another call of the same engine is refused with SLUICE_INVALID_ARGUMENT. Different
// engines are independent. Processes: an engine belongs to the process that made it. In a forked
// child every call is refused with SLUICE_FORKED, and sluice_engine_destroy does nothing. Errors:
// every call returns SLUICE_OK or the status of a failure; sluice_last_error() describes the
// failure. A wrong argument, including a null pointer, is refused and changes nothing. These checks
// cannot detect an invalid pointer, such as an engine that has already been destroyed.
#pragma once

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// This number increases with every change of this file, except for additions at the end.
#define SLUICE_ABI_VERSION 3

typedef enum sluice_status {
  SLUICE_OK = 0,
  SLUICE_INTERNAL = 1,          // a broken invariant inside Sluice: please report this defect
  SLUICE_INVALID_ARGUMENT = 2,  // a call that breaks the function's contract
  SLUICE_CONFIG = 3,            // a key or value of the config
  SLUICE_INPUT = 4,             // a file or value of the wrong kind
  SLUICE_IO = 5,                // a transfer failed
  SLUICE_DAMAGED = 6,           // storage returned other bytes than were written
  SLUICE_TIMEOUT = 7,           // storage has not answered in time
  SLUICE_NO_SPACE = 8,          // a storage path has too little space
  SLUICE_OUT_OF_MEMORY = 9,     // a budget or the machine's memory is too small
  SLUICE_UNSUPPORTED = 10,      // this machine or build lacks the requested feature
  SLUICE_NON_FINITE = 11,       // a gradient or value that is NaN or infinite
  SLUICE_RANKS = 12,            // another rank has failed or disagrees
  SLUICE_POISONED = 13,         // an earlier failure left the state inconsistent
  SLUICE_FORKED = 14,           // the engine belongs to another process
  SLUICE_CALLBACK = 15,         // a function of the application did not return 0
  SLUICE_PENDING = 16           // no failure: sluice_acquire_within() needs more time
} sluice_status;

typedef struct sluice_engine sluice_engine;

typedef struct sluice_tensor {
  const char* name;       // unique in the model
  const uint64_t* shape;  // row-major; sizes may be 0; sizes of opaque units are in bytes
  uint32_t dimensions;    // 0: one element
  int32_t has_decay;      // 0: no weight decay
} sluice_tensor;

typedef enum sluice_frozen {
  SLUICE_TRAINED = 0,
  SLUICE_FROZEN = 1,  // only parameters, no gradient and no optimizer state
  // The unit is frozen, and its tensors hold bytes of any kind, such as quantized weights. The
  // engine keeps these bytes in their order, and never computes with them. For an opaque tensor, a
  // checkpoint or a durable store records only the length in words. The engine compares this length
  // with the model. A word is as large as a parameter. The number of bytes is rounded up to whole
  // words. Only the caller can compare the types and shapes of opaque tensors.
  SLUICE_OPAQUE = 2
} sluice_frozen;
// The flag SLUICE_ANNOUNCED can be added to a value of sluice_frozen. The unit is then neither in
// forward_order nor in backward_order. The program announces each use of the unit with
// sluice_announce(). The experts of a mixture-of-experts model are examples of announced units.
#define SLUICE_ANNOUNCED 4
// The flag SLUICE_PINNED is only for units without SLUICE_ANNOUNCED. The unit's parameters then
// stay in device memory. The unit's leases for forward and inference may last until the step ends.
#define SLUICE_PINNED 8

// A unit has tensors that computation needs together. A unit is transferred and leased as a whole.
typedef struct sluice_unit {
  const char* name;  // unique in the model
  const sluice_tensor* tensors;
  uint32_t tensor_count;
  int32_t is_frozen;  // a sluice_frozen, with flags: SLUICE_ANNOUNCED, SLUICE_PINNED, SLUICE_LOCAL
} sluice_unit;

// The tensors of all units are numbered from 0, in the order of `units`.
typedef struct sluice_model {
  const sluice_unit* units;
  uint32_t unit_count;
  // The largest number of units that computation holds at the same time; at least 1.
  uint32_t concurrent_leases;
  // The orders in which one micro-batch uses the units. Announced units are left out. If
  // forward_order is null, the order is 0, 1, 2 and so on. If backward_order is null, the order is
  // the reverse of forward_order. A step that uses another order waits for transfers. The engine
  // expects the new order in the next step.
  const uint32_t* forward_order;
  const uint32_t* backward_order;
  uint32_t forward_count;
  uint32_t backward_count;
} sluice_model;

typedef enum sluice_pass {
  SLUICE_FORWARD = 0,
  SLUICE_BACKWARD = 1,
  SLUICE_INFERENCE = 2
} sluice_pass;

typedef enum sluice_state {
  SLUICE_PARAMETER = 0,  // in the parameters' type
  SLUICE_MASTER = 1,     // fp32, like the moments
  SLUICE_EXP_AVG = 2,
  SLUICE_EXP_AVG_SQ = 3
} sluice_state;

typedef struct sluice_step_options {
  double learning_rate;
  // The sum of the micro-batches' gradients is divided by this number. If the number is 0,
  // micro_batches is the divisor, so the result is the mean.
  double gradient_divisor;
  // One learning rate for each entry of the config's optimizer.groups, in the order of the config.
  // If the pointer is null, the rate of a group is learning_rate times the group's factor.
  const double* group_learning_rates;
  uint32_t group_count;
  uint32_t micro_batches;  // the expected number; at least 1
} sluice_step_options;

// The program may know these values only after the backward pass. With optimizer.overlap "eager",
// which "auto" may choose, the values must not differ from those of sluice_begin_step().
typedef struct sluice_finish_options {
  double learning_rate;                // negative = the rate of sluice_begin_step()
  double gradient_divisor;             // 0 = the divisor of sluice_begin_step()
  const double* group_learning_rates;  // null = the rates of sluice_begin_step()
  uint32_t group_count;
  uint32_t reserved;  // 0
} sluice_finish_options;

typedef struct sluice_step_report {
  uint64_t step;              // the number of updates of the state after this step
  double gradient_norm;       // before clipping; NaN in a skipped step
  double clip_factor;         // the factor that multiplied the gradient
  double loss_scale;          // the factor that multiplied the loss
  uint64_t nvme_read_bytes;   // since the previous report
  uint64_t nvme_write_bytes;  // since the previous report
  int64_t stall_ns;           // the time that computation waited for units and gradient slots
  int64_t optimizer_ns;       // the time that the call waited after the norm was known
  uint32_t schedule_changes;  // how often computation left the expected order of units
  int32_t is_skipped;         // not 0: a gradient was not finite, so nothing was updated
} sluice_step_report;

typedef struct sluice_lease {
  const void* parameters;  // of the unit; sluice_unit_info.parameter_bytes long
  void* gradients;         // zero at first; null except in backward of a trained unit
  uint64_t id;             // never 0; never reused
} sluice_lease;

typedef struct sluice_unit_info {
  uint64_t parameter_bytes;  // with padding
  uint64_t gradient_bytes;   // with padding; 0 if the unit is frozen
  uint32_t first_tensor;
  uint32_t tensor_count;
} sluice_unit_info;

typedef struct sluice_tensor_info {
  uint64_t offset_elements;  // from the start of the unit, in the parameters' type
  uint64_t element_count;    // bytes if the unit is opaque
  uint32_t unit;
  uint32_t reserved;
} sluice_tensor_info;

typedef struct sluice_traffic {
  uint64_t nvme_read_bytes;
  uint64_t nvme_write_bytes;
} sluice_traffic;

// The function runs on the calling thread. The function fills `values` with the fp32 values of a
// tensor's elements [first, first + count). The function returns 0 to continue, or any other number
// to stop. The function must not call the same engine. For a tensor of an opaque unit, `first` and
// `count` are in bytes, and `values` points to bytes.
typedef int (*sluice_values)(void* context, uint32_t tensor, uint64_t first, float* values,
                             uint64_t count);

uint32_t sluice_abi_version(void);
const char* sluice_version(void);
// Returns the message of the calling thread's last failed call. The message is empty before the
// first failure, and is valid until the thread's next failed call.
const char* sluice_last_error(void);

// `config_json` is the text of a config file (docs/configuration.md). The call reads only the keys
// for the engine. Host memory serves as the device, and memory.device gives the device's size.
sluice_status sluice_engine_create(const char* config_json, const sluice_model* model,
                                   sluice_engine** engine);
// Ends an active step without an update. If sluice_close() was not called, the update of the last
// step may stay unfinished. If this update has failed, sluice_last_error() describes the failure.
// The call does nothing if `engine` is null, or if another call of the engine has not returned.
void sluice_engine_destroy(sluice_engine* engine);

// Sets the fp32 master weights, and sets the moments to zero. The program calls this function once,
// before the first step. After a successful call, another call is refused.
sluice_status sluice_initialize(sluice_engine* engine, sluice_values values, void* context);
// Waits for every update, and reports the failure of an update. After this call, only
// sluice_engine_destroy() may be called.
sluice_status sluice_close(sluice_engine* engine);
// Returns when all updates have been applied and the updated state is back in its tier.
sluice_status sluice_drain(sluice_engine* engine);

sluice_status sluice_begin_step(sluice_engine* engine, const sluice_step_options* options);
// Waits for the gradients and their norm, and starts the update. `options` may be null. A failure
// ends the step, unless the status is SLUICE_INVALID_ARGUMENT.
sluice_status sluice_finish_step(sluice_engine* engine, const sluice_finish_options* options,
                                 sluice_step_report* report);
// Ends the step without an update, and ends every lease. With optimizer.overlap "eager", which
// "auto" may choose, blocks may be updated already. Later calls then fail with SLUICE_POISONED.
sluice_status sluice_abandon_step(sluice_engine* engine);
// The factor by which the application multiplies the loss in the active step.
sluice_status sluice_loss_scale(sluice_engine* engine, double* scale);
sluice_status sluice_begin_inference(sluice_engine* engine);
sluice_status sluice_end_inference(sluice_engine* engine);

// The call blocks until `unit` can be used. `pass` is SLUICE_FORWARD or SLUICE_BACKWARD in a step,
// and SLUICE_INFERENCE in an inference. Requires: before use i of a step, the program has released
// the lease of use i - concurrent_leases, unless it is a pinned unit's lease for SLUICE_FORWARD.
sluice_status sluice_acquire(sluice_engine* engine, uint32_t unit, int32_t pass,
                             sluice_lease* lease);
// After this call, the lease's memory belongs to the engine again.
sluice_status sluice_release(sluice_engine* engine, uint64_t lease_id);

// Copies `element_count` elements of a tensor's state to `target`. `kind` is a sluice_state. Must
// not be called while a step is active. A tensor of an opaque unit has only SLUICE_PARAMETER. For
// such a tensor, `first` and `element_count` are in bytes.
sluice_status sluice_read_state(sluice_engine* engine, uint32_t tensor, int32_t kind,
                                uint64_t first, uint64_t element_count, void* target);
sluice_status sluice_applied_step(sluice_engine* engine, uint64_t* step);
sluice_status sluice_unit_describe(sluice_engine* engine, uint32_t unit, sluice_unit_info* info);
sluice_status sluice_tensor_describe(sluice_engine* engine, uint32_t tensor,
                                     sluice_tensor_info* info);
// Gives the storage traffic of a step with `micro_batches` micro-batches. The result is exact if
// optimizer.overlap is "serial". Otherwise the result is a prediction.
sluice_status sluice_predicted_traffic(sluice_engine* engine, uint32_t micro_batches,
                                       sluice_traffic* traffic);
// Returns one line for the user about the last step, or about a choice that the machine forced.
// Each line is returned only once. The result is null when no lines are left. The line is valid
// until the next call of this function for the same engine. Only the newest 100 lines are kept.
sluice_status sluice_next_note(sluice_engine* engine, const char** note);

// Writes all of the state as a checkpoint into a new folder below `root`. The folder appears whole
// or not at all (docs/checkpoints.md). `keep` is the number of checkpoints that stay in `root`; 0 =
// all. `application` is a text that is saved with the checkpoint; null = none. Must not be called
// while a step is active.
sluice_status sluice_save(sluice_engine* engine, const char* root, uint32_t keep,
                          const char* application);
// Does the same as sluice_save(), but training can continue while the checkpoint is written. The
// checkpoint holds the state after the last step. The config has to contain "memory":
// {"save_buffers": N}. If another save is running, the call first waits for the end of that save.
sluice_status sluice_begin_save(sluice_engine* engine, const char* root, uint32_t keep,
                                const char* application);
// Both calls set `*has_one` to 1 if a checkpoint from sluice_begin_save() has appeared since the
// last report, and to 0 otherwise. sluice_saved_path() gives its path. If several have appeared,
// the report is of the newest, and notes name the others. sluice_finish_save() first waits until a
// running save has ended. During sluice_finish_save(), no step may be active.
// sluice_poll_save() does not finish a checkpoint. The checkpoint appears during a later call of
// sluice_begin_step(), sluice_finish_save(), sluice_begin_save(), sluice_save(),
// sluice_replace_values() or sluice_close(). A checkpoint that has not appeared is lost if the
// program ends without sluice_finish_save() or sluice_close(). If a save fails, the next call of
// sluice_poll_save(), sluice_finish_save(), sluice_begin_save() or sluice_begin_step() reports the
// failure. After a failure, nothing of the checkpoint is left.
sluice_status sluice_poll_save(sluice_engine* engine, int* has_one);
sluice_status sluice_finish_save(sluice_engine* engine, int* has_one);
// Sets the whole state from the checkpoint in `folder`, instead of sluice_initialize(). Training
// then continues with the same bits as an uninterrupted run. Commits of a store keep its text. A
// checkpoint with another precision, other frozen units or other moments is refused if `converts`
// is 0, and otherwise converted: masters are copied exactly (docs/checkpoints.md).
sluice_status sluice_restore(sluice_engine* engine, const char* folder, int converts);
// The program makes this call instead of sluice_initialize() if the config has storage.state
// (docs/durable.md). The call resumes from the durable store's last commit and sets `*is_new` to 0.
// If there is no store, the call makes a store from `values` and sets `*is_new` to 1. If
// `accepts_changes` is not 0, the call resumes even if the config's numbers are not the commit's.
sluice_status sluice_open_or_create(sluice_engine* engine, sluice_values values, void* context,
                                    int accepts_changes, int* is_new);
// Sets a text that is saved with the commit of each step that finishes after this call and is not
// skipped. The text is UTF-8, has at most 1 MiB, and is empty at first.
sluice_status sluice_set_application(sluice_engine* engine, const char* text);
// Commits the last step, even if no commit is due. Must not be called while a step is active.
sluice_status sluice_commit_now(sluice_engine* engine);
// Gives the last step whose commit is durable. After sluice_engine_create(), the result is the step
// from which sluice_open_or_create() will continue. `*has_one` is 0 if nothing is committed.
sluice_status sluice_committed_step(sluice_engine* engine, uint64_t* step, int* has_one);
// sluice_application_text() returns the text that was saved with the opened checkpoint or commit.
// sluice_restore() opens a checkpoint, and sluice_open_or_create() opens a commit.
// sluice_saved_path() returns the path of the last checkpoint that sluice_save(),
// sluice_poll_save() or sluice_finish_save() reported. Both texts are empty at first. The next call
// of sluice_restore(), sluice_open_or_create(), sluice_save(), sluice_poll_save() or
// sluice_finish_save() invalidates both texts.
sluice_status sluice_application_text(sluice_engine* engine, const char** text);
sluice_status sluice_saved_path(sluice_engine* engine, const char** path);

// An optimizer for programs that keep parameters and gradients themselves, in host memory or on a
// GPU (sluice_gpu.h). The optimizer keeps moments and exact fp32 masters in host memory or on NVMe.
// Threads, processes and errors follow the same rules as for an engine.
//
// The program first calls sluice_optimizer_create. In each step, the program calls
// sluice_optimizer_begin, and then sluice_optimizer_wait or sluice_optimizer_wait_all. At the end,
// the program calls sluice_optimizer_destroy.
typedef struct sluice_optimizer sluice_optimizer;

typedef enum sluice_type { SLUICE_FP32 = 0, SLUICE_BF16 = 1, SLUICE_FP16 = 2 } sluice_type;

typedef struct sluice_optimizer_tensor {
  const char* name;
  uint64_t element_count;  // may be 0
  int32_t parameter_type;  // a sluice_type
  uint32_t is_on_gpu;      // not 0: only with sluice_optimizer_create_on_gpu()
} sluice_optimizer_tensor;

// One step for one tensor. The parameter and the gradient are contiguous. The optimizer owns the
// parameter and the gradient until sluice_optimizer_wait() has returned for the tensor. The
// optimizer ignores hyperparameters that its type does not use.
typedef struct sluice_update {
  void* parameter;
  const void* gradient;
  uint64_t step;  // the tensor's step; the first step is 1
  double learning_rate;
  double beta1;
  double beta2;
  double epsilon;
  double weight_decay;
  double momentum;
  double gradient_scale;  // multiplies the gradient
  uint32_t tensor;
  int32_t gradient_type;  // a sluice_type
} sluice_update;

typedef struct sluice_optimizer_report {
  // The following counts are 0 when the optimizer is created.
  uint64_t nvme_read_bytes;
  uint64_t nvme_write_bytes;
  uint64_t updated_elements;
  uint64_t adopted_elements;   // 16-bit values that the program changed; they became masters
  uint64_t non_finite_blocks;  // blocks with an infinity or a NaN after an update
  // The sizes below are planned sizes.
  uint64_t host_bytes;
  uint64_t nvme_bytes;
  uint64_t pass_bytes;       // an update of all tensors reads this many bytes, and writes as many
  uint32_t pending_tensors;  // tensors with an update under way
  uint32_t reserved;
} sluice_optimizer_report;

// The optimizer uses these parts of the config: optimizer.type, optimizer.state,
// optimizer.rounding_seed, memory.host, placement.optimizer, storage and run.threads.
sluice_status sluice_optimizer_create(const char* config_json,
                                      const sluice_optimizer_tensor* tensors, uint32_t tensor_count,
                                      sluice_optimizer** optimizer);
// If the program has not waited for the update of a parameter, the parameter may be only partly
// updated. The call does nothing if `optimizer` is null, or if another call has not returned.
void sluice_optimizer_destroy(sluice_optimizer* optimizer);
// Starts `updates` in the given order, after earlier updates that are still running.
sluice_status sluice_optimizer_begin(sluice_optimizer* optimizer, const sluice_update* updates,
                                     uint32_t update_count);
#define SLUICE_ALL_TENSORS UINT32_MAX
// Returns when the parameter of `tensor` has the results of all updates that have begun so far.
// With SLUICE_ALL_TENSORS, the call waits for the updates of all tensors.
sluice_status sluice_optimizer_wait(sluice_optimizer* optimizer, uint32_t tensor);
// Returns when all parameters have the results of all updates that have begun so far, and the new
// state is back in its tier.
sluice_status sluice_optimizer_wait_all(sluice_optimizer* optimizer);
// These calls copy or set elements [first, first + element_count) of one kind of a tensor's state.
// The elements are fp32 numbers. `kind` is a sluice_state. SLUICE_PARAMETER is the parameter after
// the last update, and cannot be set. SLUICE_PARAMETER and SLUICE_MASTER exist only for 16-bit
// parameters, and are otherwise refused. A negative SLUICE_EXP_AVG_SQ is refused.
sluice_status sluice_optimizer_read(sluice_optimizer* optimizer, uint32_t tensor, int32_t kind,
                                    uint64_t first, uint64_t element_count, float* target);
sluice_status sluice_optimizer_write(sluice_optimizer* optimizer, uint32_t tensor, int32_t kind,
                                     uint64_t first, uint64_t element_count, const float* source);
sluice_status sluice_optimizer_describe(sluice_optimizer* optimizer,
                                        sluice_optimizer_report* report);
// Returns a line for the user about a choice that this machine forced, or about a tensor whose
// state is no longer finite. Each line is returned only once. The result is null when no lines are
// left. The line is valid until the next call of this function for the same optimizer.
sluice_status sluice_optimizer_note(sluice_optimizer* optimizer, const char** note);

// Sets `*is_deepspeed` to 1 if `text` is a DeepSpeed config, and to 0 otherwise. A DeepSpeed config
// has keys of DeepSpeed, and no key that belongs only to Sluice.
sluice_status sluice_is_deepspeed(const char* text, int* is_deepspeed);
// Turns a DeepSpeed config (docs/deepspeed.md) into a Sluice config for training on the host. In
// messages, `file_name` is the name of the DeepSpeed config. `values_json` gives values for keys
// that are "auto". An example is {"batch": 4, "micro_batches": 2, "lr": 1e-4}. The names are the
// option names of `sluice config import`. If `values_json` is null, there are no values. The value
// "ranks" is the number of processes, and is 1 by default. The value "hidden_size" is the model's
// hidden size. If the persistence threshold is "auto", the threshold becomes ten times the hidden
// size. In messages, a value has the name of its option. The key "names" gives another name, as in
// {"names": {"lr": "args.learning_rate"}}. `report` is the JSON that `sluice config import --json`
// prints. The JSON contains the config. The text is valid until the thread's next call of this
// function. Fails with SLUICE_CONFIG; the message names everything that is refused.
sluice_status sluice_import_deepspeed(const char* text, const char* file_name,
                                      const char* values_json, const char** report);
// Gives the learning rates of updates [first, first + count) under the config's optimizer.schedule.
// The first update is update 0.
sluice_status sluice_learning_rates(const char* config_json, uint64_t first, uint64_t count,
                                    double* rates);
// Plans a run on this machine without making an engine. `plan_json` is JSON with the pools of each
// tier, the sum of each tier, and the storage traffic of a step in bytes. The text is valid until
// the thread's next call of this function. Fails in the same cases as sluice_engine_create(),
// except for failures to make files.
sluice_status sluice_plan(const char* config_json, const sluice_model* model,
                          const char** plan_json);

// Ranks are several processes that train one model together. Each rank computes its own part of
// every batch. The config's sharding.stage says how the state is divided among the ranks
// (docs/design/ranks.md). The gradient is the mean over the ranks. Ranks of one host share memory.
// Ranks of different hosts use TCP connections, which are not encrypted.
//
// Each rank calls sluice_ranks_create and sluice_ranks_endpoint. The program sends every rank's
// endpoint to all ranks, for example through the store of the launcher. Then each rank calls
// sluice_ranks_connect and sluice_engine_create_ranked. Afterwards, all ranks make the same calls
// of the engine in the same order. For example, all ranks call sluice_acquire with the same units,
// and all ranks call sluice_read_state, sluice_save and sluice_close at the same points. A call
// fails with SLUICE_RANKS if another rank does not make the same call within sharding.timeout.
typedef struct sluice_ranks sluice_ranks;

// Begins to listen at `address`. The address is an IP address of this host that all other ranks can
// reach. If all ranks are on this host, "127.0.0.1" is enough.
sluice_status sluice_ranks_create(const char* address, uint32_t rank, uint32_t rank_count,
                                  sluice_ranks** ranks);
// The engine that was made from `ranks` has to be destroyed before this call. With null `ranks`,
// the call does nothing.
void sluice_ranks_destroy(sluice_ranks* ranks);
// Returns a line of text that other ranks need to connect to this rank. The line contains a secret:
// any process that has the line can join the ranks. The line is valid until sluice_ranks_destroy().
sluice_status sluice_ranks_endpoint(sluice_ranks* ranks, const char** endpoint);
// Connects this rank to all others. `endpoints` has rank_count lines, in the order of the ranks.
// The call reads only sharding.timeout from the config.
sluice_status sluice_ranks_connect(sluice_ranks* ranks, const char* config_json,
                                   const char* const* endpoints);
// Creates the engine of this rank, as sluice_engine_create() does. The call also fails with
// SLUICE_RANKS if the ranks differ in config or model. Only one engine can be made from `ranks`,
// which must outlive this engine. A failure may use `ranks` up, but a wrong argument does not.
sluice_status sluice_engine_create_ranked(const char* config_json, const sluice_model* model,
                                          sluice_ranks* ranks, sluice_engine** engine);

// Reads the text of a config file in the same way as `sluice train`. The text may have comments.
// `config_json` is the config as JSON. The text is valid until the thread's next call of this
// function. In messages, `file_name` is the name of the config. Fails with SLUICE_CONFIG if the
// text does not parse, a key is unknown, or a value has the wrong type or is out of range.
sluice_status sluice_read_config(const char* text, const char* file_name, const char** config_json);

// Sets the masters and the parameters of `tensors` between two steps. The moments and the step
// number do not change. All ranks pass the same list. Fails with SLUICE_UNSUPPORTED if the config
// has storage.state. If `values` fails, the tensors may have some of their new values. If there are
// several ranks, a failure of `values` stops the engine.
sluice_status sluice_replace_values(sluice_engine* engine, const uint32_t* tensors,
                                    uint32_t tensor_count, sluice_values values, void* context);

// The function replaces each of the `count` numbers with its total over the group, modulo 2^64. An
// example is an in-place MPI_Allreduce() with MPI_UINT64_T and MPI_SUM. The function returns 0 for
// success. Any other number is a failure, which stops the engine with SLUICE_RANKS. The function
// must not call the same engine.
typedef int (*sluice_sums)(void* context, uint64_t* sums, uint64_t count);
// The norm group is for an application that itself splits its model, by tensor or pipeline
// parallelism. The engines that together have the whole model form a group (<sluice/norm_group.h>).
// All members clip by the group's norm, skip the same steps and keep the same loss scale. During
// sluice_finish_step() and sluice_gradient_norm(), the engine calls `add` once, on the calling
// thread. All members of the group have to call sluice_finish_step() and sluice_gradient_norm()
// equally often. Another member has copies of the tensors in `elsewhere`, and counts these tensors.
// If `add` is null, the engine leaves the group. Must not be called while a step is active.
// `context` must stay valid until the group ends or the engine is destroyed.
sluice_status sluice_set_norm_group(sluice_engine* engine, sluice_sums add, void* context,
                                    const uint32_t* elsewhere, uint32_t elsewhere_count);

// Announces that the step or inference will use each of `units` once in `pass`, in the given order.
// The new uses come after all uses that were announced before. The engine immediately begins to
// fetch the announced units. The program has to acquire the announced units in the order of `uses`
// before sluice_finish_step(). Other units may come between announced units. With several ranks,
// all ranks announce at the same point, and each rank acquires the units that any rank has
// announced. `uses` receives the units in the order in which the program has to acquire them, and
// `use_count` receives their number. `uses` needs room for every announced unit of the model.
sluice_status sluice_announce(sluice_engine* engine, const uint32_t* units, uint32_t unit_count,
                              int32_t pass, uint32_t* uses, uint32_t* use_count);

// The report of sluice_trace_stop() about the trace.
typedef struct sluice_trace_result {
  uint64_t records;     // in the file
  uint64_t lost;        // records that were lost because the file was too slow
  uint64_t file_bytes;  // of the file
} sluice_trace_result;

// From this call to sluice_trace_stop(), all engines and optimizers of this process write a trace
// to the file `path`, which it replaces. `sluice trace` reads the file (docs/tracing.md). Engines
// describe themselves there when they are created, so a program should create them after this call.
// Each of the `rank_count` processes writes its own file. `rank` is the number of this process.
// Fails with SLUICE_INPUT if the file cannot be created, with SLUICE_UNSUPPORTED if the process has
// no descriptor left, with SLUICE_OUT_OF_MEMORY if there is no memory for records, and with
// SLUICE_INVALID_ARGUMENT if a trace is running. If the parent of a forked child has called this
// function or sluice_trace_stop(), both functions fail in the child with SLUICE_FORKED.
sluice_status sluice_trace_start(const char* path, uint32_t rank, uint32_t rank_count);
// The call writes the remaining records and closes the file. `result` may be null. If no trace is
// running, the call does nothing.
// Fails with SLUICE_IO if the file could not be written completely. The written part can be read.
sluice_status sluice_trace_stop(sluice_trace_result* result);

// Does the same as sluice_acquire(), but waits for at most about `milliseconds`. If the unit is not
// ready after this time, the call returns SLUICE_PENDING, which is not a failure. The caller can
// then check for signals. To continue waiting, the caller repeats the call. A caller that does not
// continue waiting has to call sluice_abandon_step() or sluice_end_inference().
sluice_status sluice_acquire_within(sluice_engine* engine, uint32_t milliseconds, uint32_t unit,
                                    int32_t pass, sluice_lease* lease);

// Only the application knows these figures of a training run. `sluice top` shows these figures. An
// unknown number is 0, and an unknown loss is NaN.
typedef struct sluice_figures {
  double loss;             // of the next step that finishes
  uint64_t tokens;         // of each step, over all ranks
  uint64_t steps;          // at the end of the training
  double flops_per_token;  // of the model's matrix products, in training
  double peak_flops;       // per second, of all ranks together
} sluice_figures;

// Shows this engine in `sluice top` until the engine is destroyed. Each sluice_finish_step() writes
// the step's figures to a page. The page is a file in $XDG_RUNTIME_DIR/sluice, and only the user
// can read the file. The program may make this call again between steps, with newer figures.
// Without XDG_RUNTIME_DIR, the call does nothing. A process has only one page, which belongs to the
// engine that was shown first. If an engine has no page, a note says why (sluice_next_note).
sluice_status sluice_show_status(sluice_engine* engine, const sluice_figures* figures);

// Waits for the gradients of all backward uses that the step has had so far. `*norm` is the norm
// that sluice_finish_step() would report now with this divisor. `*norm` is NaN if a gradient is not
// finite. If the divisor is 0, the divisor of sluice_begin_step() is used. The step continues after
// this call, even if the call fails. All ranks make this call.
sluice_status sluice_gradient_norm(sluice_engine* engine, double gradient_divisor, double* norm);

// The flag SLUICE_LOCAL is only for units with SLUICE_ANNOUNCED. With several ranks, only this rank
// has the flagged unit, for example an expert (UnitSpec::is_local). Each other rank has a unit with
// equal shapes and different names at the same place of the model. A call of sluice_announce() must
// not mix local units with other units. Only this rank announces the local unit.
#define SLUICE_LOCAL 16

#ifdef __cplusplus
}
#endif
