#include "tools/commands/train_command.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>

#include <fmt/format.h>

#include <sluice/units.h>
#include "base/topology.h"
#include "base/trace/trace_ranges.h"
#include "base/trace/trace_recorder.h"
#include "engine/engine_access.h"
#include "engine/planner/order_choice.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/output_file.h"
#include "tools/cli/print.h"
#include "tools/cli/temporary_file.h"
#include "tools/cli/terminal.h"
#include "tools/commands/config_inputs.h"
#include "tools/commands/train_inputs.h"
#include "tools/commands/train_outputs.h"
#include "tools/gpt/train/compute_device.h"
#include "tools/gpt/train/engine_ranks.h"
#include "tools/gpt/train/fresh_values.h"
#include "tools/gpt/train/kernel_agreement.h"
#include "tools/gpt/train/memory_comparison.h"
#include "tools/gpt/train/model_file.h"
#include "tools/gpt/train/run_memory.h"
#include "tools/gpt/train/run_publisher.h"
#include "tools/gpt/train/tokenized_data.h"
#include "tools/gpt/train/train_ranks.h"
#include "tools/gpt/train/train_report.h"
#include "tools/report/state_hash.h"
#include "tools/report/step_log.h"
#include "tools/trace/trace_session.h"

namespace sluice {
namespace {

class TrainRun {
 public:
  TrainRun(const TrainOptions& options, const TrainConfig& config, TrainRanks& ranks,
           const HostMemory& memory, TrainOutputs& outputs)
      : outputs_(outputs),
        is_quiet_(options.quiet || ranks.rank() != 0),
        is_saved_(!options.save_file.empty()),
        config_(config),
        memory_(memory),
        dataset_(config_, ranks.count()),
        checkpoints_(options.checkpoints, config_, ranks.rank(), ranks.count()),
        init_(ModelFile::open(options.init_file, config.model)),
        device_(config_, ranks.gpu()),
        collectives_(ranks.join(device_)),
        engine_(config_.engine, model(), device_.device(), collectives_.get()),
        trainer_(device_.make_trainer(config_, dataset_, engine_)),
        limits_(
            engine_, model(), config.micro_batches, *config.order,
            {config.engine.storage.calibration, config.engine.storage.paths, ranks.host_ranks()},
            config.engine.storage.state.commit_every),
        log_(outputs.csv, outputs.json_lines, options.log_every),
        publisher_(config_, engine_),
        watch_(options.watch,
               {.config = config_,
                .dataset = dataset_,
                .trainer = *trainer_,
                .publisher = publisher_,
                .is_quiet = is_quiet_,
                .stop = {.is_asked = interrupted, .is_agreed = [this] { return is_to_end(); }}},
               outputs.events),
        peak_flops_(options.measures_peak ? device_.measure_peak_flops(config_, is_quiet_)
                                          : options.peak_flops.value_or(0)) {}

  int run(std::optional<MemoryComparison> in_memory) {
    record_.in_memory = std::move(in_memory);
    introduce();
    require_same_kernels(engine_, device_);
    engine_.set_last_words([](const std::string& message) { warn("sluice: {}\n", message); });
    resume();
    accept();
    train();
    engine_.drain();
    conclude();
    engine_.close();
    return record_.interrupted ? kExitInterrupted : kExitOk;
  }

 private:
  ModelSpec model() const { return validated(training_model(config_, device_.is_host())); }
  void introduce() {
    record_.parameters = layout_of(engine_).parameter_count();
    record_.optimizer_state = layout_of(engine_).format().moments;
    record_.state_bytes = layout_of(engine_).state_bytes();
    record_.seed = config_.seed;
    record_.order = *config_.order;
    record_.matrix_kernels = device_.matrix_kernels();
    record_.table_row = device_.table_row();
    record_.threads = granted_threads(config_.engine.threads);
    record_.predicted = engine_.predicted_traffic(config_.micro_batches, record_.order);
    record_.device_pool_bytes = placement_of(engine_).device_bytes();
    record_.host_pool_bytes = placement_of(engine_).host_bytes();
    record_.activation_bytes = trainer_->activation_bytes();
    if (is_quiet_) return;
    if (engine_.rank_count() > 1)
      say("{} ranks{}, ZeRO stage {}; the figures below are rank 0's\n", engine_.rank_count(),
          describe_levels(config_.engine.sharding, engine_.rank_count()),
          config_.engine.sharding.stage);
    say("GPT with {} parameters on {}; {} of state, moments in {}; {} training and {} validation "
        "tokens\n",
        record_.parameters, device_.description(), format_bytes(record_.state_bytes),
        name_of(record_.optimizer_state), dataset_.training_tokens(), dataset_.validation_tokens());
    if (!device_.unused_gpu().empty()) say("{}\n", device_.unused_gpu());
    say("matrix products by {}{}; {} threads\n", describe(record_.matrix_kernels),
        record_.table_row.empty() ? "" : fmt::format(" (table: {})", record_.table_row),
        record_.threads);
    if (!device_.missed_gain().empty()) say("{}\n", device_.missed_gain());
    for (const std::string& note : engine_.notes()) say("{}\n", note);
    if (!publisher_.problem().empty()) say("{}\n", publisher_.problem());
    say("{}", pool_table(engine_, config_.engine, trainer_->activation_bytes(), memory_));
    if (config_.micro_batches > 1) {
      Config engine = config_.engine;
      engine.memory.device_bytes = placement_of(engine_).device_budget_bytes;
      engine.memory.host_bytes = placement_of(engine_).host_budget_bytes;
      say("{}\n", describe(plan_orders(engine, model(), machine_of(memory_, engine_.rank_count())),
                           record_.order));
    }
    const Traffic& predicted = record_.predicted;
    const bool is_fixed = predicted.nvme_read_bytes_least == predicted.nvme_read_bytes;
    say("{} {} from storage and writes {}\n",
        is_fixed ? "each step reads" : "on average, a step reads at most",
        format_bytes(predicted.nvme_read_bytes), format_bytes(predicted.nvme_write_bytes));
    if (const std::uint64_t bytes = placement_of(engine_).commit_bytes; bytes != 0)
      say("a commit writes {} more, the state at home in memory\n", format_bytes(bytes));
    if (const std::uint64_t bytes = record_.predicted.gradient_spill_bytes; bytes != 0)
      say("of these, {} are gradients that wait on storage (placement.gradients)\n",
          format_bytes(bytes));
    flush_said();
  }

  // The state of the store or of the newest checkpoint, or a fresh one.
  void resume() {
    checkpoints_.set_products(describe(device_.matrix_kernels()));
    const std::optional<std::uint64_t> resumed = resume_state();
    steps_ended_ = (record_.resumed_steps = resumed).value_or(0);
    dataset_.go_on(steps_ended_, checkpoints_.draws(steps_ended_));
    record_.kernel_changes = checkpoints_.kernel_changes();
    record_.setting_changes = checkpoints_.setting_changes();
    if (!checkpoints_.is_used() || engine_.rank() != 0) return;
    for (const std::string& note : checkpoints_.notes()) warn("sluice: {}\n", note);
    const std::string origin = checkpoints_.origin();
    if (!is_quiet_ && resumed) say("going on after step {}, from {}\n", *resumed, origin);
    if (!is_quiet_ && !resumed) say("beginning anew: there is no {} yet\n", origin);
    flush_said();
  }

  std::optional<std::uint64_t> resume_state() {
    const Progress progress("setting the state", is_quiet_);
    try {
      return checkpoints_.resume(engine_, init_ != nullptr
                                              ? init_->initial_values()
                                              : fresh_values(config_.model, config_.seed));
    } catch (const Error& error) {
      if (init_ == nullptr || error.code() != ErrorCode::kNonFinite) throw;
      throw Error(ErrorCode::kInput, fmt::format("--init \"{}\": {}", init_->path(), error.what()));
    }
  }

  // Nothing can be refused any more: files that grow get their names, in place of older files.
  void accept() {
    log_.begin(checkpoints_.is_from_another_run() ? 0 : steps_ended_);
    watch_.begin();
    defer_interrupts(
        "sluice: ending after this step; a second signal ends at once, without saving\n");
    outputs_.trace.accept();
    log_.accept();
    watch_.accept();
  }

  void train() {
    publisher_.enter(RunPhase::kTraining, steps_ended_);
    ProgressDisplay progress(config_.steps, is_quiet_);
    while (steps_ended_ < config_.steps && !record_.interrupted) {
      const std::uint64_t step = steps_ended_;
      const auto begin = std::chrono::steady_clock::now();
      trainer_->set_finish_options(checkpoints_.finish_options(step + 1));
      limits_.step_begins();
      TrainedStep trained = trainer_->train_step(step);
      limits_.note(trained.report);
      const bool waits = watch_.evaluates_after(step + 1) || checkpoints_.drains_after(step + 1);
      if (waits && step + 1 != config_.steps) drain_step(engine_, trained);
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
      StepRecord& record = record_.steps.emplace_back(
          record_of(config_, trained, step, time.count(), engine_.rank_count(), peak_flops_));
      record.loss = mean_over_ranks(engine_, trained.loss);
      raise_marks(record_.buffers, trained.report.buffers);
      publisher_.step_ended(record, trained.report);
      watch_.step_ended(record);
      log_.add(record);
      if (log_.is_due(record) || step + 1 == config_.steps) progress.show(record);
      watch_.tell(record, log_.is_due(record));
      for (const std::string& note : trained.report.notes) warn("{}\n", note);
      checkpoints_.step_ended(engine_, ++steps_ended_);
      record_.interrupted = is_to_end();
    }
    end_open_line();
    record_.limits = limits_.limits();
  }

  // A signal to one rank stops all of them.
  bool is_to_end() { return mean_over_ranks(engine_, interrupted() ? 1 : 0) != 0; }

  void conclude() {
    defer_interrupts(
        "sluice: the run is over and being saved; a second signal ends at once, without saving\n");
    FirstFailure failures;
    publisher_.enter(RunPhase::kSaving, steps_ended_);
    {
      const Progress progress("saving the state", is_quiet_);
      if (checkpoints_.has_store()) failures.attempt([this] { engine_.commit_now(); });
      failures.attempt([this] { checkpoints_.run_ended(engine_, steps_ended_); });
    }
    record_.checkpoints = checkpoints_.saved();
    if (!record_.interrupted) measure(failures);
    publisher_.enter(RunPhase::kSaving, steps_ended_);
    attempt_alone(failures, [this] {
      const Progress progress("hashing the state", is_quiet_);
      record_.state_sha256 = state_sha256(engine_);
    });
    record_.ranks = memory_of_ranks(engine_, record_.buffers);
    record_.matrix_work = trainer_->matrix_work();
    write_outputs(failures);
    if (record_.interrupted && engine_.rank() == 0) say_how_to_go_on();
    if (is_quiet_) return;
    if (record_.interrupted) say("interrupted after step {}\n", steps_ended_);
    if (!record_.steps.empty()) say("{}", time_report(record_));
    say("{}{}{}", memory_comparison_report(record_), copy_report(record_), matrix_report(record_));
    say("{}{}", memory_report(record_.ranks[engine_.rank()]), validation_report(record_));
    say("peak resident memory {}; state sha256 {}\n", format_bytes(peak_rss_bytes()),
        record_.state_sha256);
    if (outputs_.save.is_wanted()) say("model saved to {}\n", outputs_.save.path());
  }

  // The figures of a trained model. They read the text again, which may be cut or gone by now: the
  // model is saved all the same. A figure that one rank cannot read, none has.
  void measure(FirstFailure& failures) {
    if (!all_ranks(engine_, failures, [this] { (void)watch_.validation_batches(); })) return;
    attempt_alone(failures, [this] {
      record_.validation_loss = watch_.validation_loss(steps_ended_);
      record_.interrupted = !record_.validation_loss;
    });
    if (!record_.validation_loss) return;
    std::optional<double> own;
    const auto count = [&] {
      const Progress progress("counting the pairs of the training part", is_quiet_);
      own = dataset_.bigram_cross_entropy_until(interrupted, watch_.validation_batches());
    };
    if (!all_ranks(engine_, failures, count)) return;
    record_.interrupted = mean_over_ranks(engine_, own ? 0 : 1) != 0;  // then none has it
    if (!record_.interrupted) record_.bigram_cross_entropy = own;
  }

  // For `work` in which ranks wait for each other: one that fails must not go on alone.
  void attempt_alone(FirstFailure& failures, const auto& work) {
    if (engine_.rank_count() > 1) return work();
    failures.attempt(work);
  }

  void say_how_to_go_on() const {
    if (checkpoints_.has_store())
      warn("sluice: step {} is committed to the store \"{}\"; {}\n", *engine_.committed_step(),
           config_.engine.storage.state.name, checkpoints_.how_to_go_on());
    else if (checkpoints_.is_on())
      warn("sluice: step {} is saved in \"{}\"; {}\n", steps_ended_, checkpoints_.saved_path(),
           checkpoints_.how_to_go_on());
  }

  // A rank that cannot save the model has left the others in their reading of it.
  void write_outputs(FirstFailure& failures) {
    const Progress progress(is_saved_ ? "saving the model" : "writing the files", is_quiet_);
    const auto save = [this] { save_model(outputs_.save, config_.model, engine_); };
    const bool are_together = !is_saved_ || failures.attempt(save);
    const auto write = [&] {
      if (are_together && is_saved_) failures.attempt([this] { outputs_.save.commit(); });
      failures.attempt([this] { log_.finish_csv(); });
      failures.attempt([this] { log_.finish_json_lines(); });
      failures.attempt([this] { watch_.finish(steps_ended_, record_.validation_loss); });
      if (outputs_.json.is_wanted())
        failures.attempt([this] { write_json(outputs_.json, record_); });
    };
    failures.attempt([&] { are_together ? await_first_rank(engine_, write) : write(); });
    failures.rethrow();
  }

  TrainOutputs& outputs_;
  const bool is_quiet_;
  const bool is_saved_;  // by rank 0, but all take part
  const TrainConfig& config_;
  const HostMemory& memory_;
  Dataset dataset_;
  Checkpointing checkpoints_;
  std::unique_ptr<ModelFile> init_;
  ComputeDevice device_;
  std::unique_ptr<Collectives> collectives_;
  Engine engine_;
  std::unique_ptr<Trainer> trainer_;
  LimitMeter limits_;
  StepLog log_;
  RunPublisher publisher_;
  TrainWatch watch_;
  const double peak_flops_;  // per second, of one rank; 0 = unknown
  RunRecord record_;
  std::uint64_t steps_ended_ = 0;  // also before this run
};

int train_here(const TrainOptions& options, const TrainConfig& config, TrainRanks& ranks,
               const HostMemory& memory, TrainOutputs& outputs) {
  std::optional<MemoryComparison> in_memory;
  if (options.compare_memory != 0)
    in_memory = train_in_memory(config, memory,
                                {.steps = options.compare_memory,
                                 .rank_count = ranks.count(),
                                 .init_file = options.init_file,
                                 .is_quiet = options.quiet});
  if (config.trace_nvtx) enable_trace_ranges();
  TraceSession trace(outputs.trace, config.trace_ring_bytes,
                     {.rank = ranks.rank(), .ranks = ranks.count()});
  std::unique_ptr<TrainRun> run;
  int code = kExitOk;
  try {
    run = std::make_unique<TrainRun>(options, config, ranks, memory, outputs);
    code = run->run(std::move(in_memory));
  } catch (const std::exception& failure) {
    const auto* const error = dynamic_cast<const Error*>(&failure);
    const bool ends_here =
        ranks.are_several() || (error != nullptr && error->code() == ErrorCode::kTimeout);
    if (!ends_here) throw;
    // Before the engine goes: its destructor would wait for ranks that wait for this one, or for
    // the drive. Other destructors do not run either.
    remove_temporary_files();
    (void)trace_stop();  // whole up to here: the rank's steps are often all there
    if (ranks.are_several()) ranks.give_up(failure);
    warn("sluice: {}\n", failure.what());
    std::fflush(nullptr);
    ::_exit(exit_code_of(error->code()));
  }
  run.reset();  // the engine has its say in the trace
  const TraceEnd end = trace.finish(options.quiet || ranks.rank() != 0);
  if (!options.quiet && ranks.rank() == 0) say("{}", end.summary);
  if (end.failure) throw Error(*end.failure);
  return code;
}

// Settles this rank's part, as its host and the ranks on it allow, and runs it.
int train_in(const TrainOptions& options, TrainConfig& config, TrainRanks& ranks) {
  if (ranks.rank() != 0) silence_interrupts();
  TrainOutputs outputs(options, config, ranks);
  settle_data_file(config, options.quiet || ranks.rank() != 0);
  compare_with_tokens(outputs.files, config);
  ranks.share_host(config);
  const bool is_on_host = computes_on_host(config, ranks.gpu());
  const HostMemory share =
      share_of_host(is_on_host, kept_activation_bytes(config, is_on_host), ranks.host_ranks());
  settle_budgets(config.engine.memory, share);
  const RunMachine machine = machine_of(share, ranks.count());
  resolve_order(config, machine);
  const HostMemory memory = check_memory(config, machine, share);
  return train_here(options, config, ranks, memory, outputs);
}

int train_as_told(const TrainOptions& options) {
  catch_interrupts();
  std::string introduction;
  TrainConfig config = read_train_config(options, introduction);
  TrainRanks ranks(config);
  if (!options.quiet && ranks.rank() == 0) say("{}", introduction);
  if (!ranks.are_several()) return train_in(options, config, ranks);
  // A rank that fails alone tells the others; leaving would wait for them.
  try {
    const int code = train_in(options, config, ranks);
    ranks.leave(code);
    return code;
  } catch (const std::exception& failure) {
    ranks.give_up(failure);
  }
}

}  // namespace

int run_train(const TrainOptions& options) {
  try {
    return train_as_told(options);
  } catch (const Error& error) {
    throw in_words_of(options, error);
  }
}

}  // namespace sluice
