#include "tools/commands/tune_command.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <optional>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include "base/topology.h"
#include "base/utf8.h"
#include "gpu/ranks/launcher_environment.h"
#include "tools/cli/exit_codes.h"
#include "tools/cli/interrupt.h"
#include "tools/cli/output_file.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/commands/config_inputs.h"
#include "tools/commands/tune_report.h"
#include "tools/deepspeed/config_source.h"
#include "tools/gpt/train/compute_device.h"
#include "tools/gpt/train/dataset.h"
#include "tools/gpt/train/tokenized_data.h"
#include "tools/report/config_changes.h"
#include "tools/report/plan_rates.h"
#include "tools/tune/run_model.h"
#include "tools/tune/tune_axes.h"

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;

constexpr unsigned kProbeSteps = 2;

void refuse_ranks() {
  const auto launch = find_launch([](const char* variable) { return std::getenv(variable); });
  if (launch && launch->rank_count > 1)
    throw Error(ErrorCode::kUnsupported,
                fmt::format("tune: {} processes were started, and tune works with one; tune the "
                            "config alone, and check it for several with sluice plan --ranks {}",
                            launch->rank_count, launch->rank_count));
}

// A file of rates that is wrong is known before any measurement.
void check_gpu_rates(const std::string& file, const TrainConfig& config) {
  if (file.empty()) return;
  if (computes_on_host(config))
    throw Error(ErrorCode::kConfig,
                fmt::format("tune: --gpu-rates \"{}\" has the rates of a GPU, but this config "
                            "computes on the host; set run.device to \"cuda\", or leave it out",
                            file));
  PlanRateOptions rates;
  rates.gpu_file = file;
  (void)plan_rates(rates, state_format(config.engine));
}

ConfigDocument document_of(const TuneOptions& options) {
  std::vector<std::string> assignments = options.assignments;
  // In quotes, so that no name is read as JSON. JSON is UTF-8, and a name may have other bytes.
  if (!options.data_file.empty())
    assignments.push_back("data.file=" + (is_utf8(options.data_file)
                                              ? nlohmann::json(options.data_file).dump()
                                              : options.data_file));
  return std::move(
      read_config_source(options.config_file, options.deepspeed, assignments).document);
}

class Tuning {
 public:
  Tuning(const TuneOptions& options, ConfigDocument document, std::string data_file)
      : options_(options),
        data_file_(std::move(data_file)),
        document_(std::move(document)),
        model_(document_, calibration(), options.gpu_file),
        axes_(tune_axes(document_, model_.given(), outcome_.machine, options.kept)) {}

  TuneOutcome run() {
    const Clock::time_point begin = Clock::now();
    model_.assume(options_.flops.value_or(
        model_.is_on_host() ? kAssumedCoreFlops * granted_threads(model_.given().engine.threads)
                            : model_.gpu_flops()));
    if (!options_.dry_run) learn();
    search();
    if (outcome_.search.best.empty() && !outcome_.search.given.prediction.obstacle.empty())
      refuse(outcome_.search.given.prediction.obstacle);
    if (!options_.dry_run) hold_tournament();
    outcome_.seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    progress_.reset();
    return std::move(outcome_);
  }

  std::string text_of(const TuneOutcome& outcome) const {
    return model_.text_with(outcome.candidate(outcome.winner).settings);
  }

 private:
  [[noreturn]] static void refuse(const std::string& obstacle) {
    throw Error(ErrorCode::kOutOfMemory,
                "tune: the config does not fit this machine, and no other settings make it fit; as "
                "given: " +
                    obstacle);
  }

  void tell(const std::string& what) {
    progress_ ? progress_->set(what) : (void)progress_.emplace(what);
  }

  const MachineCalibration& calibration() {
    const TrainConfig config = train_config(document_);
    const CalibrationRequest request{.paths = config.engine.storage.paths,
                                     .format = state_format(config.engine),
                                     .threads = config.engine.threads,
                                     .backend = config.engine.storage.backend};
    const std::string hardware = hardware_of(request);
    const std::string path = calibration_file(hardware);
    std::string why;
    std::optional<MachineCalibration> cached;
    if (!options_.recalibrate && !path.empty())
      cached = load_calibration(path, hardware, request.paths.size(), why);
    if (!why.empty()) warn("sluice: {}; measuring again\n", why);
    if (cached && age_days(*cached) <= options_.calibration_days) {
      outcome_.machine = std::move(*cached);
      outcome_.was_cached = true;
      return outcome_.machine;
    }
    outcome_.machine = calibrate(request, [this](const std::string& what) { tell(what); });
    const std::string failure = path.empty() ? "there is neither HOME nor XDG_CACHE_HOME"
                                             : save_calibration(path, outcome_.machine);
    if (!failure.empty()) warn("sluice: the calibration is not kept: {}\n", failure);
    return outcome_.machine;
  }

  void search() {
    tell("searching by the model");
    outcome_.search = tune_search(
        axes_, [this](const TuneSettings& settings) { return predict(settings); },
        options_.finalists);
  }

  // The given config has run: where that took longer than the model says, others that the model
  // finds no better may be.
  TunePrediction predict(const TuneSettings& settings) const {
    TunePrediction prediction = model_.predict(settings);
    if (settings.empty() && prediction.obstacle.empty() && !probe_.step_s.empty())
      prediction.rank_s = std::max(prediction.rank_s, probe_.median_s());
    return prediction;
  }

  // The config names the text, and a run reads its tokens.
  TrainConfig trial_config(const TuneSettings& settings) const {
    TrainConfig config = model_.config_with(settings);
    config.data_file = data_file_;
    return config;
  }

  // Runs the given config, or the best that fits, for its times and rates.
  void learn() {
    TuneSettings settings;
    if (const TunePrediction given = model_.predict({}); !given.obstacle.empty()) {
      search();
      if (outcome_.search.best.empty()) refuse(given.obstacle);
      settings = outcome_.search.best.front().settings;
    }
    const TrainConfig config = trial_config(settings);
    probe_ = run_trial(config, kProbeSteps, [this](unsigned step) {
      tell(fmt::format("measuring computation, step {} of {}", step + 1, kProbeSteps + 1));
    });
    model_.learn(probe_, config);
  }

  void hold_tournament() {
    const bool given_fits = outcome_.search.given.prediction.obstacle.empty();
    outcome_.plan = plan_tournament(options_.seconds, probe_.median_s(), probe_.began_s,
                                    options_.steps, outcome_.search.best.size());
    outcome_.search.best.resize(outcome_.plan.candidates);
    const auto run = [&](std::size_t index, unsigned round) {
      if (index == 0 && !given_fits)
        throw Error(ErrorCode::kOutOfMemory, outcome_.search.given.prediction.obstacle);
      return run_trial(trial_config(outcome_.candidate(index).settings), outcome_.plan.steps,
                       [&](unsigned step) {
                         tell(fmt::format(
                             "round {} of {}: {}, step {} of {}", round + 1, outcome_.plan.rounds,
                             index == 0 ? "the given config" : fmt::format("candidate {}", index),
                             step + 1, outcome_.plan.steps + 1));
                       })
          .median_s();
    };
    outcome_.contenders =
        run_tournament(outcome_.search.best.size() + 1, outcome_.plan.rounds, given_fits, run);
    bool any = false;
    for (const Contender& contender : outcome_.contenders) any |= contender.failure.empty();
    if (!any) refuse(outcome_.contenders.back().failure);
    outcome_.winner = winner_of(outcome_.contenders);
  }

  const TuneOptions& options_;
  const std::string data_file_;
  ConfigDocument document_;
  TuneOutcome outcome_;
  std::optional<Progress> progress_;
  RunModel model_;
  std::vector<TuneAxis> axes_;
  Trial probe_;
};

}  // namespace

int run_tune(const TuneOptions& options) {
  catch_interrupts();
  say_at_interrupt("sluice: interrupted; no result was written\n");
  refuse_ranks();
  ConfigDocument document = document_of(options);
  TrainConfig config = train_config(document);
  validate(config.engine);
  (void)config_text_of(document);  // each candidate is a config file; this fails before the work
  check_gpu_config(config);
  check_gpu_rates(options.gpu_file, config);
  (void)tune_axes(document, config, {}, options.kept);
  OutputFiles outputs;
  add_config_inputs(outputs, options.config_file, config);
  outputs.add_input("--gpu-rates", options.gpu_file);
  OutputFile& output = outputs.add("--output", options.output);
  OutputFile& json = outputs.add("--json", options.json_file);
  outputs.check();
  if (!options.dry_run) {
    settle_data_file(config, /*is_quiet=*/false);
    compare_with_tokens(outputs, config);
    (void)Dataset(config);  // a wrong text is known before any measurement
  }
  Tuning tuning(options, std::move(document), config.data_file);
  const TuneOutcome outcome = tuning.run();
  if (output.is_wanted()) write_whole(output, tuning.text_of(outcome));
  if (json.is_wanted()) write_whole(json, tune_json(outcome));
  const bool is_better =
      outcome.contenders.empty() ? !outcome.search.best.empty() : outcome.winner != 0;
  say("{}\n{}",
      is_better ? coloured(said_descriptor(), Colour::kGood, tune_verdict(outcome))
                : tune_verdict(outcome),
      tune_table(outcome));
  if (!config.engine.storage.state.name.empty())
    say("the runs kept their state in scratch files, without the durable store's commits\n");
  if (output.is_wanted()) say("{} is written, without comments\n", output.path());
  return kExitOk;
}

}  // namespace sluice
