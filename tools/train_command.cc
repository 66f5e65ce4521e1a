#include "tools/train_command.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <exception>
#include <filesystem>
#include <memory>
#include <numeric>

#include <fmt/format.h>

#include "base/trace_ranges.h"
#include "base/units.h"
#include "tools/exit_codes.h"
#include "tools/gpt/gpt_model.h"
#include "tools/interrupt.h"
#include "tools/model_file.h"
#include "tools/order_choice.h"
#include "tools/rank_world.h"
#include "tools/state_hash.h"
#include "tools/trace_session.h"
#include "tools/train_report.h"
#include "tools/training_device.h"

namespace sluice {
namespace {

// Enough for a loss that is good to about 0.02 nats, at the cost of a few steps.
constexpr std::uint64_t kValidationTokens = 32 << 10;

TrainConfig read_config(const TrainOptions& options) {
  ConfigDocument document = ConfigDocument::from_file(options.config_file);
  for (const std::string& assignment : options.assignments) document.set(assignment);
  if (options.steps) document.set(fmt::format("run.steps={}", *options.steps));
  if (options.seed) document.set(fmt::format("run.seed={}", *options.seed));
  TrainConfig config = train_config(document);
  if (!options.data_file.empty()) config.data_file = options.data_file;
  if (!options.trace_file.empty()) config.trace_file = options.trace_file;
  return config;
}

// A file that cannot be written should be known before hours of training, not after.
void check_output(const std::string& path) {
  if (path.empty()) return;
  const auto fail = [&](const std::string& why) {
    throw Error(ErrorCode::kInput, fmt::format("cannot write \"{}\": {}", path, why));
  };
  const std::filesystem::path folder = std::filesystem::absolute(path).parent_path();
  if (!std::filesystem::is_directory(folder))
    fail(fmt::format("the folder \"{}\" does not exist", folder.string()));
  if (std::filesystem::is_directory(path)) fail("it is a folder; name a file in it");
  const bool exists = std::filesystem::exists(path);
  if (::access(exists ? path.c_str() : folder.c_str(), W_OK) != 0)
    fail(fmt::format("{}; change the mode of {}, or choose another place", errno_text(errno),
                     exists ? "the file" : "the folder"));
}

// The model is written beside its name and then renamed: that needs the folder, and would put a
// file in the place of a device such as /dev/null.
void check_model_output(const std::string& path) {
  check_output(path);
  if (path.empty()) return;
  const std::filesystem::path folder = std::filesystem::absolute(path).parent_path();
  if (std::filesystem::exists(path) && !std::filesystem::is_regular_file(path))
    throw Error(ErrorCode::kInput,
                fmt::format("cannot save to \"{}\": it is not a regular file", path));
  if (::access(folder.c_str(), W_OK) != 0)
    throw Error(ErrorCode::kInput,
                fmt::format("cannot save to \"{}\": folder \"{}\": {}; a model is written beside "
                            "its name first, so that a failure keeps the old one",
                            path, folder.string(), errno_text(errno)));
}

std::unique_ptr<ModelFile> open_initial_model(const TrainOptions& options,
                                              const TrainConfig& config) {
  if (options.init_file.empty()) return nullptr;
  auto file = std::make_unique<ModelFile>(options.init_file);
  file->require_shape_of(config.model);
  return file;
}

class TrainRun {
 public:
  TrainRun(const TrainOptions& options, const TrainConfig& config, RankWorld& ranks)
      : options_(options),
        is_quiet_(options.quiet || ranks.rank() != 0),
        config_(config),
        dataset_(config_, ranks.count()),
        init_(open_initial_model(options, config)),
        device_(config_, ranks.gpu()),
        collectives_(ranks.join(device_)),
        engine_(config_.engine, training_model(config_), device_.device(), {}, collectives_.get()),
        trainer_(device_.make_trainer(config_, dataset_, engine_)),
        limits_(engine_, validated(training_model(config_)), config.micro_batches, *config.order,
                config.engine.storage.calibration) {}

  int run() {
    introduce();
    engine_.initialize(initial_values());
    train();
    engine_.drain();
    conclude();
    return record_.interrupted ? kExitInterrupted : kExitOk;
  }

 private:
  void introduce() {
    record_.parameters = engine_.layout().parameter_count();
    record_.state_bytes = engine_.layout().state_bytes();
    record_.seed = config_.seed;
    record_.order = *config_.order;
    record_.predicted = engine_.predicted_traffic(config_.micro_batches, record_.order);
    record_.device_pool_bytes = engine_.placement().device_bytes();
    record_.host_pool_bytes = engine_.placement().host_bytes();
    record_.activation_bytes = trainer_->activation_bytes();
    if (is_quiet_) return;
    const std::uint32_t group = config_.engine.sharding.group_ranks;
    if (engine_.rank_count() > 1)
      fmt::print("{} ranks{}, ZeRO stage {}; what follows is rank 0's\n", engine_.rank_count(),
                 group == 0 ? "" : fmt::format(" in groups of {}", group),
                 config_.engine.sharding.stage);
    fmt::print("GPT with {} parameters on {}; {} of state; {} training and {} validation tokens\n",
               record_.parameters, device_.description(), format_bytes(record_.state_bytes),
               dataset_.training_tokens(), dataset_.validation_tokens());
    for (const std::string& note : engine_.notes()) fmt::print("{}\n", note);
    fmt::print("{}", pool_table(engine_, trainer_->activation_bytes()));
    if (config_.micro_batches > 1) {
      Config engine = config_.engine;
      fill_budgets(engine.memory);
      fmt::print("{}\n", describe(plan_orders(engine, validated(training_model(config_)),
                                              engine_.rank_count()),
                                  record_.order));
    }
    const bool varies =
        record_.predicted.nvme_read_bytes_least != record_.predicted.nvme_read_bytes;
    fmt::print("each step reads {}{} from storage and writes {}\n", varies ? "at most " : "",
               format_bytes(record_.predicted.nvme_read_bytes),
               format_bytes(record_.predicted.nvme_write_bytes));
    if (const std::uint64_t bytes = record_.predicted.gradient_spill_bytes; bytes != 0)
      fmt::print("of both, {} are gradients, which wait on storage (placement.gradients)\n",
                 format_bytes(bytes));
    std::fflush(stdout);
  }

  InitialValues initial_values() {
    if (init_ != nullptr) return init_->initial_values();
    return [this](const TensorPlace& tensor, std::uint64_t first, std::span<float> values) {
      gpt::fill_initial_values(config_.model, config_.seed, tensor_spec(tensor), first, values);
    };
  }

  const TensorSpec& tensor_spec(const TensorPlace& tensor) const {
    const UnitPlace& unit = engine_.layout().unit(tensor.unit);
    return model_.units[index_of(tensor.unit)].tensors[index_of(tensor.id) - unit.first_tensor];
  }

  void train() {
    catch_interrupts();
    ProgressDisplay progress(config_.steps, is_quiet_);
    for (std::uint64_t step = 0; step < config_.steps && !record_.interrupted; ++step) {
      const auto begin = std::chrono::steady_clock::now();
      const TrainedStep trained = trainer_->train_step(step);
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - begin;
      record_.steps.push_back(
          {.step = step + 1,
           .loss = mean_over_ranks(trained.loss),
           .gradient_norm = trained.report.gradient_norm,
           .loss_scale = trained.report.loss_scale,
           .skipped = trained.report.skipped,
           .time_s = time.count(),
           .tokens = std::uint64_t{config_.sequences} * config_.micro_batches *
                     config_.model.context * engine_.rank_count(),
           .nvme_read_bytes = trained.report.nvme_read_bytes,
           .nvme_write_bytes = trained.report.nvme_write_bytes,
           .rank_traffic = trained.report.rank_traffic,
           .activation_out_bytes = trained.report.activation_out_bytes,
           .activation_in_bytes = trained.report.activation_in_bytes,
           .stall_s = static_cast<double>(trained.report.stall_ns) * 1e-9,
           .stall_for_update_s = static_cast<double>(trained.report.stall_for_update_ns) * 1e-9,
           .optimizer_s = static_cast<double>(trained.report.optimizer_ns) * 1e-9,
           .times = trained.report.times,
           .policy = trained.report.policy});
      raise_marks(record_.buffers, trained.report.buffers);
      limits_.note(trained.report);
      progress.show(record_.steps.back());
      for (const std::string& note : trained.report.notes) fmt::print(stderr, "{}\n", note);
      record_.interrupted = mean_over_ranks(interrupted() ? 1 : 0) != 0;  // of one: all stop
    }
    progress.finish();
    record_.limits = limits_.limits();
  }

  double mean_over_ranks(double own) {
    const std::vector<double> values = engine_.exchange(own);
    return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  }

  void conclude() {
    if (!record_.interrupted) {
      const std::uint64_t batch_tokens = std::uint64_t{config_.sequences} * config_.model.context;
      const auto count = static_cast<std::uint32_t>(div_ceil(kValidationTokens, batch_tokens));
      const std::vector<TokenBatch> batches = dataset_.validation_batches(count);
      record_.validation_loss = trainer_->evaluate(batches);
      record_.bigram_cross_entropy = dataset_.bigram_cross_entropy(batches);
    }
    record_.state_sha256 = state_sha256(engine_);
    record_.ranks = memory_of_ranks(engine_, record_.buffers);
    write_outputs();
    if (is_quiet_) return;
    if (record_.interrupted) fmt::print("interrupted after step {}\n", record_.steps.size());
    fmt::print("{}{}", time_report(record_), memory_report(record_.ranks[engine_.rank()]));
    if (record_.validation_loss) {
      fmt::print("validation loss {:.4f} nats a token; a bigram model reaches {:.4f}\n",
                 *record_.validation_loss, *record_.bigram_cross_entropy);
    }
    fmt::print("peak resident memory {}; state sha256 {}\n", format_bytes(peak_rss_bytes()),
               record_.state_sha256);
    if (!options_.save_file.empty()) fmt::print("model saved to {}\n", options_.save_file);
  }

  // Each on its own: a disk that is too full for the model may still hold the figures.
  void write_outputs() {
    std::exception_ptr failure;
    const auto attempt = [&failure](const std::string& path, const auto& write) {
      try {
        if (!path.empty()) write();
      } catch (...) {
        if (failure == nullptr) failure = std::current_exception();
      }
    };
    attempt(options_.save_file, [this] { save_model(options_.save_file, config_.model, engine_); });
    if (engine_.rank() == 0) {
      attempt(options_.csv_file, [this] { write_csv(options_.csv_file, record_); });
      attempt(options_.json_file, [this] { write_json(options_.json_file, record_); });
    }
    if (failure != nullptr) std::rethrow_exception(failure);
  }

  const TrainOptions& options_;
  const bool is_quiet_;
  const TrainConfig& config_;
  Dataset dataset_;
  std::unique_ptr<ModelFile> init_;
  ModelSpec model_ = gpt::gpt_model_spec(config_.model);
  TrainingDevice device_;
  std::unique_ptr<Collectives> collectives_;
  Engine engine_;
  std::unique_ptr<Training> trainer_;
  LimitMeter limits_;
  RunRecord record_;
};

// Each rank has a trace of its own.
std::string trace_file_of(const TrainConfig& config, const RankWorld& ranks) {
  if (config.trace_file.empty() || ranks.rank() == 0) return config.trace_file;
  return fmt::format("{}.rank{}", config.trace_file, ranks.rank());
}

int train_here(const TrainOptions& options, const TrainConfig& config, RankWorld& ranks) {
  if (config.trace_nvtx) enable_trace_ranges();
  TraceSession trace(trace_file_of(config, ranks), config.trace_ring_bytes,
                     {.rank = ranks.rank(), .ranks = ranks.count()});
  std::unique_ptr<TrainRun> run;
  int code = kExitOk;
  try {
    run = std::make_unique<TrainRun>(options, config, ranks);
    code = run->run();
  } catch (const std::exception& failure) {
    // Before the engine goes: it would wait for ranks that wait for this one.
    if (ranks.are_several()) ranks.give_up(failure);
    const auto* const error = dynamic_cast<const Error*>(&failure);
    if (run == nullptr) trace.discard();  // a run that is refused leaves nothing behind
    if (error == nullptr || error->code() != ErrorCode::kTimeout) throw;
    // The engine's destructor would wait for the drive.
    fmt::print(stderr, "sluice: {}\n", failure.what());
    std::fflush(nullptr);
    ::_exit(exit_code_of(error->code()));
  }
  run.reset();  // the engine has its say in the trace
  const std::string summary = trace.finish();
  if (!options.quiet && ranks.rank() == 0) fmt::print("{}", summary);
  return code;
}

}  // namespace

int run_train(const TrainOptions& options) {
  TrainConfig config = read_config(options);
  check_output(options.json_file);
  check_output(options.csv_file);
  check_model_output(options.save_file);
  check_output(config.trace_file);
  RankWorld ranks(config);
  ranks.share_host(config);
  resolve_order(config, ranks.count());  // by this rank's share
  if (!ranks.are_several()) return train_here(options, config, ranks);
  try {
    return train_here(options, config, ranks);
  } catch (const std::exception& failure) {
    ranks.give_up(failure);
  }
}

}  // namespace sluice
