// Batch, precision and activations.
#include <algorithm>

#include <fmt/format.h>

#include "tools/deepspeed/import_pass.h"

namespace sluice {
namespace {

constexpr double kScalePowerMax = 32;  // of precision.loss_scale.initial_power
constexpr const char* kTrainBatch = "train_batch_size";
constexpr const char* kMicroBatch = "train_micro_batch_size_per_gpu";
constexpr const char* kMicroBatches = "gradient_accumulation_steps";

// The data-parallel ranks as DeepSpeed counts them: half a rank is not a number of ranks, and its
// check says so with the three numbers.
double data_ranks(const ImportPass& pass) {
  const double ranks = pass.values().ranks;
  return ranks / std::max(1.0, pass.written_number("sequence_parallel_size").value_or(1));
}

// The precision that --set gives, if there is one. It decides, whatever the file says.
std::string assigned_precision(const ImportPass& pass) {
  const auto found = pass.values().assigned.find("precision.parameters");
  if (found == pass.values().assigned.end()) return "";
  return OrderedJson::parse(found->second).get<std::string>();
}

std::string precision_of(const ImportPass& pass) {
  if (std::string assigned = assigned_precision(pass); !assigned.empty()) return assigned;
  const std::string& chosen = pass.values().precision;
  const bool is_for_the_program =
      !chosen.empty() && !pass.has_section("bf16") && !pass.has_section("fp16");
  const bool bf16_is_open = is_for_the_program || pass.is_auto("bf16.enabled");
  const bool fp16_is_open = is_for_the_program || pass.is_auto("fp16.enabled");
  const bool bf16 = pass.boolean("bf16.enabled").value_or(bf16_is_open && chosen == "bf16");
  const bool fp16 = pass.boolean("fp16.enabled").value_or(fp16_is_open && chosen == "fp16");
  if (bf16) return "bf16";
  if (fp16) return "fp16";
  return bf16_is_open && chosen.empty() ? "bf16" : "fp32";
}

void import_loss_scale(ImportPass& pass) {
  const std::string section = "precision.loss_scale.";
  const auto number = [&pass](const char* key) {
    const std::string full = std::string("fp16.") + key;
    return pass.number(full).value_or(pass.default_number(full));
  };
  const double scale = number("loss_scale");
  pass.map("fp16.loss_scale", section + "static", scale);
  if (scale != 0) return;
  const auto whole = [&](const char* key, const char* new_key) {
    const double value = number(key);
    if (value < 1) {
      pass.refuse(std::string("fp16.") + key,
                  fmt::format("it is {}, but must be at least 1 with a scale that moves "
                              "(fp16.loss_scale 0)",
                              value));
      return;
    }
    pass.map(std::string("fp16.") + key, section + new_key, static_cast<std::uint64_t>(value));
  };
  const double power = number("initial_scale_power");
  if (power > kScalePowerMax)
    pass.understood("fp16.initial_scale_power",
                    fmt::format("it is {} here: the scale begins there instead of being halved "
                                "{} times, with as many skipped steps",
                                kScalePowerMax, power - kScalePowerMax));
  pass.map("fp16.initial_scale_power", section + "initial_power",
           static_cast<std::uint64_t>(std::min(power, kScalePowerMax)));
  whole("loss_scale_window", "window");
  const bool has_zero = pass.integer("zero_optimization.stage").value_or(0) > 0;
  if (has_zero) {
    whole("hysteresis", "hysteresis");
  } else {
    pass.map("fp16.hysteresis", section + "hysteresis", 1,
             "without ZeRO, DeepSpeed halves the scale at each overflow, whatever it says");
  }
  whole("min_loss_scale", "minimum");
  if (pass.find("fp16.consecutive_hysteresis") != nullptr)
    pass.map("fp16.consecutive_hysteresis", section + "consecutive_hysteresis",
             pass.boolean("fp16.consecutive_hysteresis").value_or(false));
}

}  // namespace

void import_batch(ImportPass& pass) {
  std::optional<std::uint64_t> total = pass.integer(kTrainBatch);
  std::optional<std::uint64_t> batch = pass.integer(kMicroBatch);
  std::optional<std::uint64_t> micro_batches = pass.integer(kMicroBatches);
  if (!batch && pass.find(kMicroBatch) == nullptr && !total)
    batch = pass.given_integer(kMicroBatch);
  if (!micro_batches && !(total && batch)) micro_batches = pass.given_integer(kMicroBatches);
  // The file's own numbers are at least 1 by now. Options may not be.
  const auto is_none = [&pass](const char* key, std::optional<std::uint64_t> value) {
    if (value == 0) pass.refuse(key, "the value given for it is 0, but must be at least 1");
    return value == 0;
  };
  if (is_none(kMicroBatch, batch) || is_none(kMicroBatches, micro_batches)) return;
  const double ranks = data_ranks(pass);
  const auto share = [ranks](std::uint64_t value, std::uint64_t by) {
    return static_cast<std::uint64_t>(std::min(static_cast<double>(value / by) / ranks, 0x1p63));
  };
  if (!total && !batch) {
    if (pass.is_auto(kMicroBatch)) return;  // asked for already
    pass.ask_for("--batch");
    return pass.refuse(kMicroBatch,
                       "neither it nor train_batch_size is there, and DeepSpeed wants one: write "
                       "one, or give --batch");
  }
  if (pass.is_auto(kMicroBatches) && !micro_batches) return;
  if (!micro_batches) micro_batches = total && batch ? share(*total, *batch) : 1;
  if (!batch) batch = share(*total, *micro_batches);
  const double product = static_cast<double>(*batch) * static_cast<double>(*micro_batches) * ranks;
  if (total && static_cast<double>(*total) != product)
    return pass.refuse(kTrainBatch, fmt::format("it is {}, but {} {} x {} {} x {} ranks are {}",
                                                *total, kMicroBatch, *batch, kMicroBatches,
                                                *micro_batches, ranks, product));
  // Values that the file does not write, but that follow from its others.
  const auto compare = [&pass](const char* key, std::uint64_t derived, const char* option,
                               std::optional<std::uint64_t> given) {
    if (pass.find(key) == nullptr && given && derived != *given)
      pass.refuse_conflict(key, fmt::format("{}, by its train_batch_size", derived), option,
                           std::to_string(*given));
  };
  compare(kMicroBatch, *batch, "--batch", pass.values().batch);
  compare(kMicroBatches, *micro_batches, "--micro-batches", pass.values().micro_batches);
  pass.map(kMicroBatch, "batch.sequences", *batch);
  pass.map(kMicroBatches, "batch.micro_batches", *micro_batches);
  if (total) pass.not_needed(kTrainBatch, fmt::format("it is their product with {} ranks", ranks));
}

void import_precision(ImportPass& pass) {
  const bool bf16 = pass.boolean("bf16.enabled").value_or(false);
  const bool fp16 = pass.boolean("fp16.enabled").value_or(false);
  if (bf16 && fp16)
    return pass.refuse("fp16.enabled",
                       "bf16.enabled is true, too; DeepSpeed refuses both: write false here");
  const bool is_assigned = !assigned_precision(pass).empty();
  if (pass.is_auto("fp16.enabled") && !bf16 && !pass.is_auto("bf16.enabled") && !is_assigned &&
      pass.values().precision.empty()) {
    pass.ask_for("--precision");
    return pass.refuse("fp16.enabled",
                       "Sluice has no value for \"auto\": give --precision fp16, bf16 or fp32");
  }
  const std::string precision = precision_of(pass);
  const char* key = precision == "fp16" ? "fp16.enabled" : "bf16.enabled";
  pass.map(key, "precision.parameters", precision,
           precision == "fp32" ? "neither bf16 nor fp16 is on" : "");
  if (!pass.values().precision.empty() && pass.values().precision != precision && !is_assigned)
    pass.refuse_conflict(key, precision, "--precision", pass.values().precision);
  if (precision == "fp16") {
    import_loss_scale(pass);
    pass.map("fp16.enabled", "optimizer.non_finite", "skip");
  }
  const auto stage = pass.integer("zero_optimization.stage").value_or(0);
  const bool checks = pass.boolean("bf16.check_grad_overflow").value_or(true);
  if (precision == "bf16")
    pass.map("bf16.check_grad_overflow", "optimizer.non_finite",
             checks || stage == 3 ? "skip" : "stop");
  if (precision == "fp32" && stage > 0)
    pass.map("zero_optimization.stage", "optimizer.non_finite", "skip",
             "under ZeRO, DeepSpeed skips a step whose gradients are not finite, also in fp32");
  if (const auto type = pass.text("data_types.grad_accum_dtype"))
    pass.map("data_types.grad_accum_dtype", "precision.gradients", *type);
  if (pass.has_section("activation_checkpointing"))
    pass.map("activation_checkpointing.cpu_checkpointing", "activations",
             pass.boolean("activation_checkpointing.cpu_checkpointing").value_or(false)
                 ? "host"
                 : "recompute",
             "DeepSpeed's section acts where the model asks for it; here it always does");
}

}  // namespace sluice
