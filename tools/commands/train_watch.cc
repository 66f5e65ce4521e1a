#include "tools/commands/train_watch.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include "base/utf8.h"
#include "tools/cli/print.h"
#include "tools/cli/terminal.h"
#include "tools/gpt/model/sampling.h"
#include "tools/report/event_file.h"

namespace sluice {
namespace {

// At most, where a sequence has no more. Enough for a loss that is good to about 0.02 nats, at the
// cost of a few steps.
constexpr std::uint64_t kValidationTokens = 32 << 10;

bool is_due(std::uint64_t step, std::uint64_t every) {
  return every != 0 && step % every == 0;
}

double wall_time_s() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

}  // namespace

TrainWatch::TrainWatch(const WatchOptions& options, const WatchedRun& run, OutputFile& events)
    : options_(options),
      config_(run.config),
      dataset_(run.dataset),
      trainer_(run.trainer),
      publisher_(run.publisher),
      events_(events),
      is_quiet_(run.is_quiet),
      stop_(run.stop) {
  if (options.sample_every == 0) return;
  if (!trainer_.can_sample())
    throw Error(ErrorCode::kUnsupported,
                "--sample-every draws samples on the host only so far, and this run computes on a "
                "GPU; leave it out, or take checkpoints and `sluice generate`");
  if (!config_.tokenizer.empty()) {
    tokenizer_.emplace(config_.tokenizer);
    tokenizer_->encode(options.sample_prompt, prompt_);
  } else if (config_.model.vocabulary == 256) {
    for (const char letter : options.sample_prompt)
      prompt_.push_back(static_cast<unsigned char>(letter));
  } else {
    throw Error(ErrorCode::kConfig,
                fmt::format("--sample-every needs a tokenizer for model.vocabulary = {}; pass "
                            "--tokenizer FILE",
                            config_.model.vocabulary));
  }
  if (prompt_.empty())
    throw Error(ErrorCode::kInput,
                "--sample-prompt is empty; a sample needs at least one byte to go on from");
}

void TrainWatch::begin() {
  events_.begin();
  events_.write(event_file_header(wall_time_s()));
}

const std::vector<TokenBatch>& TrainWatch::validation_batches() {
  if (batches_.empty())
    batches_ = dataset_.validation_batches(
        std::max<std::uint64_t>(1, kValidationTokens / config_.model.context));
  return batches_;
}

std::optional<double> TrainWatch::validation_loss(std::uint64_t steps) {
  if (validated_steps_ == steps && validation_loss_) return validation_loss_;
  publisher_.enter(RunPhase::kEvaluating, steps);
  const Progress progress(fmt::format("evaluating on {} batches", validation_batches().size()),
                          is_quiet_);
  validation_loss_ = trainer_.evaluate_until(stop_, validation_batches());
  validated_steps_ = steps;
  return validation_loss_;
}

bool TrainWatch::evaluates_after(std::uint64_t step) const {
  return is_due(step, options_.validate_every) || is_due(step, options_.sample_every);
}

void TrainWatch::step_ended(StepRecord& record) {
  if (is_due(record.step, options_.validate_every))
    record.validation_loss = validation_loss(record.step);
}

void TrainWatch::tell(const StepRecord& record, bool is_logged) {
  std::string text;
  if (is_due(record.step, options_.sample_every)) text = sample(record.step);
  if (!is_quiet_ && record.validation_loss)
    say("step {:>5}: validation loss {:.4f} nats per token\n", record.step,
        *record.validation_loss);
  if (!is_quiet_ && !text.empty())
    say("step {:>5}: sample: {}\n", record.step,
        is_terminal(said_descriptor()) ? plain_text(text) : text);
  flush_said();
  if (evaluates_after(record.step)) publisher_.enter(RunPhase::kTraining, record.step);
  if (!events_.is_wanted()) return;
  std::vector<EventScalar> scalars{
      {"train/loss", static_cast<float>(record.loss)},
      {"train/gradient_norm", static_cast<float>(record.gradient_norm)},
      {"train/learning_rate", static_cast<float>(learning_rate_at(config_, record.step - 1))},
      {"speed/step_s", static_cast<float>(record.time_s)},
      {"speed/tokens_per_s", static_cast<float>(record.tokens_per_s())},
      {"speed/flops_per_s", static_cast<float>(record.flops_per_s())},
      {"traffic/nvme_read_bytes", static_cast<float>(record.nvme_read_bytes)},
      {"traffic/nvme_write_bytes", static_cast<float>(record.nvme_write_bytes)}};
  if (const auto share = record.mfu()) scalars.push_back({"speed/mfu", static_cast<float>(*share)});
  if (record.validation_loss)
    scalars.push_back({"validation/loss", static_cast<float>(*record.validation_loss)});
  pending_event_ = event_of_scalars(wall_time_s(), record.step, scalars);
  if (!is_logged && !record.validation_loss && text.empty()) return;
  append_events(std::exchange(pending_event_, {}));
  if (!text.empty())
    append_events(event_of_text(wall_time_s(), record.step, "sample", valid_utf8(text)));
}

// The run's seed draws it, so that the same run has the same samples.
std::string TrainWatch::sample(std::uint64_t step) {
  publisher_.enter(RunPhase::kEvaluating, step);
  const Progress progress("drawing a sample", is_quiet_);
  std::vector<std::uint32_t> tokens = prompt_;
  std::string text = options_.sample_prompt;
  // Each token takes a whole pass; a run that has been told to end does not wait for all.
  for (std::uint64_t position = 0; position < options_.sample_tokens && !stop_.is_agreed();
       ++position) {
    const std::size_t seen = std::min<std::size_t>(tokens.size(), config_.model.context);
    const auto logits = trainer_.next_logits(std::span(tokens).last(seen));
    if (!std::ranges::all_of(logits, [](float logit) { return std::isfinite(logit); }))
      return "(the logits are not finite)";
    const std::uint32_t token = gpt::sample_token(
        logits, {.temperature = options_.sample_temperature, .top_k = 40, .seed = config_.seed},
        position);
    tokens.push_back(token);
    if (tokenizer_)
      text += tokenizer_->bytes_of(token);
    else
      text += static_cast<char>(token);
  }
  return text;
}

// A failure is said once, and training goes on.
void TrainWatch::append_events(const std::string& record) {
  if (events_failure_ != nullptr || !events_.is_wanted()) return;
  try {
    events_.write(record);
  } catch (const std::exception& error) {
    events_failure_ = std::current_exception();
    warn("sluice: {}; training goes on\n", error.what());
  }
}

void TrainWatch::finish(std::uint64_t steps, std::optional<double> validation_loss) {
  if (!pending_event_.empty()) append_events(std::exchange(pending_event_, {}));
  if (validation_loss && !is_due(steps, options_.validate_every)) {
    const EventScalar scalar{"validation/loss", static_cast<float>(*validation_loss)};
    append_events(event_of_scalars(wall_time_s(), steps, {&scalar, 1}));
  }
  if (events_failure_ != nullptr) std::rethrow_exception(events_failure_);
  events_.commit();
}

}  // namespace sluice
