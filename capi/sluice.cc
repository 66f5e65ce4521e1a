#include "capi/sluice.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <sluice/config_document.h>
#include <sluice/error.h>
#include <sluice/host_device.h>
#include <sluice/plan.h>
#include <sluice/units.h>
#include <sluice/version.h>

#include "capi/call_guard.h"
#include "capi/engine_handle.h"
#include "capi/model.h"
#include "capi/ranks_handle.h"
#include "engine/ranks/ranks.h"

using namespace sluice;

namespace {

constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();

const TensorPlace& tensor_of(const sluice_engine& engine, const char* call, std::uint32_t id) {
  const std::span<const TensorPlace> all = engine.engine->tensors();
  if (id >= all.size())
    refuse(fmt::format("{}: tensor {} does not exist; the model has {}", call, id, all.size()));
  return all[id];
}

std::vector<double> rates_of(const char* call, const double* rates, std::uint32_t count) {
  if (rates == nullptr && count != 0)
    refuse(fmt::format("{}: group_learning_rates is null, but group_count is {}", call, count));
  return rates == nullptr ? std::vector<double>() : std::vector<double>(rates, rates + count);
}

// Reads the words around bytes [first, first + target.size()).
void read_opaque(sluice_engine& engine, const TensorPlace& tensor, std::int32_t kind,
                 std::uint64_t first, std::span<std::byte> target) {
  if (kind != SLUICE_PARAMETER)
    refuse(fmt::format("sluice_read_state: \"{}\" is opaque, so it has only SLUICE_PARAMETER",
                       tensor.name));
  if (const std::uint64_t count = engine.count_of(tensor); first > count - target.size())
    refuse(
        fmt::format("sluice_read_state: {} bytes from {} on reach beyond the end of \"{}\", "
                    "which has {}",
                    target.size(), first, tensor.name, count));
  const std::uint64_t word_bytes = size_of(engine.precision.parameters);
  const std::uint64_t first_word = first / word_bytes;
  const std::uint64_t skipped = first - first_word * word_bytes;
  std::vector<std::byte> words(align_up(skipped + target.size(), word_bytes));
  engine.engine->read_state(tensor.id, StateKind::kParameter, first_word, words);
  std::ranges::copy(std::span(words).subspan(skipped, target.size()), target.begin());
}

// Leases end before the step that they belong to.
void end_step(sluice_engine& engine) {
  engine.leases.clear();
  engine.step.reset();
}

// `ranks` may be null, for one rank.
MakeDevice on_the_host(sluice_ranks* ranks) {
  return [ranks](const Config& config) {
    if (ranks != nullptr) {
      require_levels(config.sharding, ranks->rank_count);
      require_host_reduction(config.sharding);
    }
    auto host = make_host_device(
        {.memory_bytes = host_device_bytes(config), .at_once_bytes_max = kAtOnceBytes});
    std::unique_ptr<Collectives> collectives;
    if (ranks != nullptr) {
      ranks->has_engine = true;
      collectives = ranks->world->join(*host);
    }
    return EngineDevice{.device = std::move(host),
                        .ranks = ranks == nullptr ? nullptr : ranks->world,
                        .collectives = std::move(collectives)};
  };
}

}  // namespace

std::unique_ptr<sluice_engine> sluice::make_engine(const char* config_json,
                                                   const sluice_model& model,
                                                   const MakeDevice& make_device) {
  const Config config = engine_config(ConfigDocument(config_json, "config"));
  // Also what is wrong with the model is found before `make_device` uses the ranks up.
  const ModelSpec spec = validated(model_from_c(model, config.precision.parameters));
  auto made = std::make_unique<sluice_engine>();
  made->model = spec;
  made->opaque_bytes = opaque_bytes_of(model);
  made->precision = config.precision;
  EngineDevice device = make_device(config);
  made->device = std::move(device.device);
  made->gpu = device.gpu;
  made->ranks = std::move(device.ranks);
  made->collectives = std::move(device.collectives);
  made->engine = std::make_unique<Engine>(config, spec, *made->device, made->collectives.get());
  made->engine->set_last_words(
      [](const std::string& message) { (void)set_error(SLUICE_INTERNAL, message.c_str()); });
  made->stream = Stream(*made->device, "caller");
  made->add_notes(made->engine->notes());
  return made;
}

InitialValues sluice_engine::initial_values(sluice_values values, void* context) const {
  return [this, values, context](const TensorPlace& tensor, std::uint64_t first,
                                 std::span<float> target) {
    const auto fill = [&](std::uint64_t begin, float* place, std::uint64_t count) {
      if (values(context, index_of(tensor.id), begin, place, count) != 0) throw CallbackFailed{};
    };
    if (!tensor.is_opaque) return fill(first, target.data(), target.size());
    const std::uint64_t word_bytes = size_of(precision.parameters);
    const std::uint64_t begin = first * word_bytes;
    // The first `count` bytes come from the application; the last word may have more.
    const std::uint64_t count = std::min(target.size() * word_bytes, count_of(tensor) - begin);
    std::vector<float> room(div_ceil(target.size() * word_bytes, sizeof(float)));
    fill(begin, room.data(), count);
    for (std::uint64_t i = 0; i < target.size(); ++i) {
      std::uint32_t word = 0;
      std::memcpy(&word, reinterpret_cast<const std::byte*>(room.data()) + i * word_bytes,
                  word_bytes);
      target[i] = float_of_word(word, word_bytes);
    }
  };
}

void sluice_engine::add_notes(std::span<const std::string> added) {
  for (const std::string& added_note : added) {
    if (notes.size() == kNotesMax) {
      notes.pop_front();
      ++dropped_notes;
    }
    notes.push_back(added_note);
  }
}

extern "C" {

uint32_t sluice_abi_version(void) {
  return SLUICE_ABI_VERSION;
}

const char* sluice_version(void) {
  return kVersion.data();
}

const char* sluice_last_error(void) {
  return last_error_text();
}

sluice_status sluice_engine_create(const char* config_json, const sluice_model* model,
                                   sluice_engine** engine) {
  const char* const name = __func__;
  return guarded([&] {
    require(engine, name, "the place for the engine");
    *engine = nullptr;
    require(config_json, name, "config_json");
    require(model, name, "the model");
    *engine = make_engine(config_json, *model, on_the_host(nullptr)).release();
  });
}

sluice_status sluice_engine_create_ranked(const char* config_json, const sluice_model* model,
                                          sluice_ranks* ranks, sluice_engine** engine) {
  return guarded(ranks, __func__, [&](const char* name) {
    require(engine, name, "the place for the engine");
    *engine = nullptr;
    require(config_json, name, "config_json");
    require(model, name, "the model");
    if (ranks->world == nullptr)
      refuse(fmt::format("{}: the ranks are not connected; call sluice_ranks_connect()", name));
    if (ranks->has_engine)
      refuse(fmt::format("{}: these ranks have had an engine; each engine needs its own", name));
    *engine = make_engine(config_json, *model, on_the_host(ranks)).release();
  });
}

void sluice_engine_destroy(sluice_engine* engine) {
  destroy(engine);
}

sluice_status sluice_initialize(sluice_engine* engine, sluice_values values, void* context) {
  return guarded(engine, __func__, [&](const char*) {
    if (values == nullptr) refuse("sluice_initialize: the function for values is null");
    engine->engine->initialize(engine->initial_values(values, context));
  });
}

sluice_status sluice_replace_values(sluice_engine* engine, const uint32_t* tensors,
                                    uint32_t tensor_count, sluice_values values, void* context) {
  return guarded(engine, __func__, [&](const char* name) {
    if (values == nullptr) refuse("sluice_replace_values: the function for values is null");
    if (tensor_count != 0) require(tensors, name, "the list of tensors");
    std::vector<TensorId> ids;
    for (std::uint32_t i = 0; i < tensor_count; ++i) ids.push_back(TensorId{tensors[i]});
    engine->engine->replace_values(ids, engine->initial_values(values, context));
  });
}

sluice_status sluice_close(sluice_engine* engine) {
  return guarded(engine, __func__, [&](const char*) { engine->engine->close(); });
}

sluice_status sluice_drain(sluice_engine* engine) {
  return guarded(engine, __func__, [&](const char*) { engine->engine->drain(); });
}

sluice_status sluice_set_norm_group(sluice_engine* engine, sluice_sums add, void* context,
                                    const uint32_t* elsewhere, uint32_t elsewhere_count) {
  return guarded(engine, __func__, [&](const char* name) {
    if (elsewhere_count != 0) require(elsewhere, name, "the list of tensors");
    NormGroup group;
    for (std::uint32_t i = 0; i < elsewhere_count; ++i)
      group.counted_elsewhere.push_back(TensorId{elsewhere[i]});
    if (add != nullptr)
      group.add = [add, context](std::span<std::uint64_t> sums) {
        if (const int returned = add(context, sums.data(), sums.size()); returned != 0)
          throw Error(ErrorCode::kRanks,
                      fmt::format("sluice_set_norm_group: the function for sums has failed with {}",
                                  returned));
      };
    engine->engine->set_norm_group(std::move(group));
  });
}

sluice_status sluice_begin_step(sluice_engine* engine, const sluice_step_options* options) {
  return guarded(engine, __func__, [&](const char* name) {
    require(options, name, "options");
    StepOptions begin{.learning_rate = options->learning_rate,
                      .micro_batches = options->micro_batches,
                      .group_learning_rates =
                          rates_of(name, options->group_learning_rates, options->group_count)};
    if (options->gradient_divisor != 0) begin.gradient_divisor = options->gradient_divisor;
    engine->step.emplace(engine->engine->begin_step(begin));
  });
}

sluice_status sluice_finish_step(sluice_engine* engine, const sluice_finish_options* options,
                                 sluice_step_report* report) {
  return guarded(engine, __func__, [&](const char* name) {
    require(report, name, "the report");
    if (!engine->step) refuse("sluice_finish_step: no step is active");
    FinishOptions finish;
    if (options != nullptr) {
      if (options->reserved != 0)
        refuse(fmt::format("{}: options->reserved is {}; it must be 0", name, options->reserved));
      if (!(options->learning_rate < 0)) finish.learning_rate = options->learning_rate;
      if (options->gradient_divisor != 0) finish.gradient_divisor = options->gradient_divisor;
      if (options->group_learning_rates != nullptr || options->group_count != 0)
        finish.group_learning_rates =
            rates_of(name, options->group_learning_rates, options->group_count);
    }
    finish.application = engine->next_application;
    StepReport done;
    try {
      done = engine->step->finish(finish);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kInvalidArgument) end_step(*engine);
      throw;
    } catch (...) {
      end_step(*engine);
      throw;
    }
    engine->step.reset();
    engine->add_notes(done.notes);
    if (engine->status) engine->status->step_ended(done, engine->figures);
    engine->figures.loss = kUnknown;
    *report = {.step = done.step,
               .gradient_norm = done.gradient_norm,
               .clip_factor = done.clip_factor,
               .loss_scale = done.loss_scale,
               .nvme_read_bytes = done.nvme_read_bytes,
               .nvme_write_bytes = done.nvme_write_bytes,
               .stall_ns = done.stall_ns,
               .optimizer_ns = done.optimizer_ns,
               .schedule_changes = done.schedule_changes,
               .is_skipped = done.skipped ? 1 : 0};
  });
}

sluice_status sluice_abandon_step(sluice_engine* engine) {
  return guarded(engine, __func__, [&](const char*) {
    if (!engine->step) refuse("sluice_abandon_step: no step is active");
    end_step(*engine);
  });
}

sluice_status sluice_loss_scale(sluice_engine* engine, double* scale) {
  return guarded(engine, __func__, [&](const char* name) {
    require(scale, name, "the place for the scale");
    if (!engine->step) refuse("sluice_loss_scale: no step is active");
    *scale = engine->step->loss_scale();
  });
}

sluice_status sluice_begin_inference(sluice_engine* engine) {
  return guarded(engine, __func__, [&](const char*) {
    engine->inference.emplace(engine->engine->begin_inference());
    engine->show_phase(RunPhase::kEvaluating);
  });
}

sluice_status sluice_end_inference(sluice_engine* engine) {
  return guarded(engine, __func__, [&](const char*) {
    if (!engine->inference) refuse("sluice_end_inference: no inference is active");
    engine->leases.clear();
    engine->inference.reset();
    engine->show_phase(RunPhase::kTraining);
  });
}

sluice_status sluice_read_state(sluice_engine* engine, uint32_t tensor, int32_t kind,
                                uint64_t first, uint64_t element_count, void* target) {
  return guarded(engine, __func__, [&](const char* name) {
    if (kind < SLUICE_PARAMETER || kind > SLUICE_EXP_AVG_SQ)
      refuse(fmt::format("sluice_read_state: kind is {}; it must be a sluice_state", kind));
    const TensorPlace& place = tensor_of(*engine, name, tensor);
    const std::uint64_t count = engine->count_of(place);
    if (element_count > count)
      refuse(fmt::format("sluice_read_state: {} {} of tensor \"{}\", which has {}", element_count,
                         place.is_opaque ? "bytes" : "elements", place.name, count));
    if (element_count != 0) require(target, name, "the target");
    if (place.is_opaque)
      return read_opaque(*engine, place, kind, first,
                         std::span(static_cast<std::byte*>(target), element_count));
    const std::uint64_t element_bytes =
        kind == SLUICE_PARAMETER ? size_of(engine->precision.parameters) : sizeof(float);
    engine->engine->read_state(
        TensorId{tensor}, static_cast<StateKind>(kind), first,
        std::span(static_cast<std::byte*>(target), element_count * element_bytes));
  });
}

sluice_status sluice_applied_step(sluice_engine* engine, uint64_t* step) {
  return guarded(engine, __func__, [&](const char* name) {
    require(step, name, "the place for the step");
    *step = engine->engine->applied_step();
  });
}

sluice_status sluice_unit_describe(sluice_engine* engine, uint32_t unit, sluice_unit_info* info) {
  return guarded(engine, __func__, [&](const char* name) {
    require(info, name, "the place for the description");
    *info = describe_unit(engine->model, engine->engine->tensors(), engine->precision, unit);
  });
}

sluice_status sluice_tensor_describe(sluice_engine* engine, uint32_t tensor,
                                     sluice_tensor_info* info) {
  return guarded(engine, __func__, [&](const char* name) {
    require(info, name, "the place for the description");
    const TensorPlace& place = tensor_of(*engine, name, tensor);
    *info = {.offset_elements = place.offset_elements,
             .element_count = engine->count_of(place),
             .unit = index_of(place.unit),
             .reserved = 0};
  });
}

sluice_status sluice_predicted_traffic(sluice_engine* engine, uint32_t micro_batches,
                                       sluice_traffic* traffic) {
  return guarded(engine, __func__, [&](const char* name) {
    require(traffic, name, "the place for the prediction");
    const Traffic predicted = engine->engine->predicted_traffic(micro_batches);
    *traffic = {.nvme_read_bytes = predicted.nvme_read_bytes,
                .nvme_write_bytes = predicted.nvme_write_bytes};
  });
}

sluice_status sluice_next_note(sluice_engine* engine, const char** note) {
  return guarded(engine, __func__, [&](const char* name) {
    require(note, name, "the place for the note");
    *note = nullptr;
    if (engine->notes.empty()) return;
    if (const std::uint64_t dropped = std::exchange(engine->dropped_notes, 0); dropped != 0) {
      engine->note = fmt::format(
          "{} older notes were dropped: only the newest {} are kept; call sluice_next_note() after "
          "each step",
          dropped, sluice_engine::kNotesMax);
    } else {
      engine->note = std::move(engine->notes.front());
      engine->notes.pop_front();
    }
    *note = engine->note.c_str();
  });
}

}  // extern "C"
