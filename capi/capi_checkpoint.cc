// Saving and resuming an engine behind the C interface.
#include <sluice/checkpoint.h>

#include "capi/engine_handle.h"
#include "capi/sluice.h"

using namespace sluice;

extern "C" {

sluice_status sluice_save(sluice_engine* engine, const char* root, uint32_t keep,
                          const char* application) {
  return guarded(engine, __func__, [&](const char* name) {
    require(root, name, "root");
    SaveOptions options{.keep = keep};
    if (application != nullptr) options.application = application;
    engine->saved_path = engine->engine->save(root, options).path;
  });
}

sluice_status sluice_restore(sluice_engine* engine, const char* folder) {
  return guarded(engine, __func__, [&](const char* name) {
    require(folder, name, "folder");
    const OpenCheckpoint opened = open_checkpoint(folder);
    engine->engine->restore(*opened.source);
    engine->application = opened.application.empty() ? std::string() : opened.application.front();
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
