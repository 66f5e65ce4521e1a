// Saving and resuming an engine behind the C interface.
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <sluice/checkpoint.h>

#include "base/utf8.h"
#include "capi/engine_handle.h"
#include "capi/sluice.h"
#include "engine/store/commit_format.h"

using namespace sluice;

namespace {

SaveOptions save_options(std::uint32_t keep, const char* application) {
  SaveOptions options{.keep = keep};
  if (application != nullptr) options.application = application;
  return options;
}

void take_saved(sluice_engine& engine, const SavedCheckpoint& saved) {
  engine.saved_path = saved.path;
  engine.add_notes(saved.notes);
}

void take_saved(sluice_engine& engine, const std::optional<SavedCheckpoint>& saved, int* has_one) {
  if (saved) take_saved(engine, *saved);
  *has_one = saved ? 1 : 0;
}

}  // namespace

extern "C" {

sluice_status sluice_save(sluice_engine* engine, const char* root, uint32_t keep,
                          const char* application) {
  return guarded(engine, __func__, [&](const char* name) {
    require(root, name, "root");
    const auto shown = engine->shown_as(RunPhase::kSaving);
    take_saved(*engine, engine->engine->save(root, save_options(keep, application)));
  });
}

sluice_status sluice_begin_save(sluice_engine* engine, const char* root, uint32_t keep,
                                const char* application) {
  return guarded(engine, __func__, [&](const char* name) {
    require(root, name, "root");
    engine->engine->begin_save(root, save_options(keep, application));
  });
}

sluice_status sluice_poll_save(sluice_engine* engine, int* has_one) {
  return guarded(engine, __func__, [&](const char* name) {
    require(has_one, name, "the place for has_one");
    take_saved(*engine, engine->engine->poll_save(), has_one);
  });
}

sluice_status sluice_finish_save(sluice_engine* engine, int* has_one) {
  return guarded(engine, __func__, [&](const char* name) {
    require(has_one, name, "the place for has_one");
    const auto shown = engine->shown_as(RunPhase::kSaving);
    take_saved(*engine, engine->engine->finish_save(), has_one);
  });
}

sluice_status sluice_restore(sluice_engine* engine, const char* folder, int converts) {
  return guarded(engine, __func__, [&](const char* name) {
    require(folder, name, "folder");
    const OpenCheckpoint opened = open_checkpoint(
        folder, converts != 0 ? CheckpointPrecision::kConvert : CheckpointPrecision::kAsSaved);
    // Its own, as long as the checkpoint is of as many ranks.
    const std::vector<std::string>& texts = opened.application;
    const std::size_t own = engine->engine->rank();
    const std::string text = texts.empty() ? std::string() : texts[own < texts.size() ? own : 0];
    const bool fits = text.size() <= kApplicationBytesMax;
    const std::string kept =
        fits && !text.empty() ? text : engine->next_application.value_or(std::string());
    engine->engine->restore(*opened.source, kept);
    engine->application = text;
    if (fits || !kept.empty() || !engine->engine->committed_step()) return;
    const std::string note = fmt::format(
        "storage: the store's first commit has no text: the checkpoint's has {} B, and a commit "
        "has room for {} B",
        text.size(), kApplicationBytesMax);
    engine->add_notes(std::span(&note, 1));
  });
}

sluice_status sluice_open_or_create(sluice_engine* engine, sluice_values values, void* context,
                                    int accepts_changes, int* is_new) {
  return guarded(engine, __func__, [&](const char* name) {
    require(is_new, name, "the place for is_new");
    if (values == nullptr) refuse("sluice_open_or_create: the function for values is null");
    const OpenedState opened = engine->engine->open_or_create(
        engine->initial_values(values, context),
        {.accepts_changes = accepts_changes != 0,
         .application = engine->next_application.value_or(std::string())});
    engine->application = opened.application;
    *is_new = opened.is_new ? 1 : 0;
  });
}

sluice_status sluice_set_application(sluice_engine* engine, const char* text) {
  return guarded(engine, __func__, [&](const char* name) {
    require(text, name, "text");
    if (const std::size_t size_bytes = std::strlen(text); size_bytes > kApplicationBytesMax)
      refuse(
          fmt::format("{}: the text has {} B, but a commit has room for {} B; keep larger data in "
                      "a file, and its path here",
                      name, size_bytes, kApplicationBytesMax));
    if (!is_utf8(text))
      refuse(
          fmt::format("{}: the text of {} B is not UTF-8, as the text of a checkpoint has to be; "
                      "give other data as text, such as base64",
                      name, std::strlen(text)));
    engine->next_application = text;
  });
}

sluice_status sluice_commit_now(sluice_engine* engine) {
  return guarded(engine, __func__, [&](const char*) { engine->engine->commit_now(); });
}

sluice_status sluice_committed_step(sluice_engine* engine, uint64_t* step, int* has_one) {
  return guarded(engine, __func__, [&](const char* name) {
    require(step, name, "the place for the step");
    require(has_one, name, "the place for has_one");
    const std::optional<std::uint64_t> committed = engine->engine->committed_step();
    *has_one = committed ? 1 : 0;
    *step = committed.value_or(0);
  });
}

sluice_status sluice_application_text(sluice_engine* engine, const char** text) {
  return guarded(engine, __func__, [&](const char* name) {
    require(text, name, "the place for the text");
    *text = engine->application.c_str();
  });
}

sluice_status sluice_saved_path(sluice_engine* engine, const char** path) {
  return guarded(engine, __func__, [&](const char* name) {
    require(path, name, "the place for the path");
    *path = engine->saved_path.c_str();
  });
}

}  // extern "C"
