// The plan and the storage files of an engine, for Sluice's own tools and tests. The functions
// return internal types, so Engine itself has no such functions. Applications find plain values in
// Engine::tensors() and in sluice/plan.h.
//
// Thread rule: the same as for Engine. The results live as long as the engine.
#pragma once

#include <span>

#include <sluice/engine.h>
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "io/direct_file.h"

namespace sluice {

// A friend of Engine, for the functions below.
struct EngineAccess {
  static const Layout& layout(const Engine& engine);
  static const Placement& placement(const Engine& engine);
  static std::span<const DirectFile> storage_files(const Engine& engine);
};

inline const Layout& layout_of(const Engine& engine) {
  return EngineAccess::layout(engine);
}
inline const Placement& placement_of(const Engine& engine) {
  return EngineAccess::placement(engine);
}
// The scratch files, one per path of storage.paths. There are no such files if nothing is on
// storage.
inline std::span<const DirectFile> storage_files_of(const Engine& engine) {
  return EngineAccess::storage_files(engine);
}

}  // namespace sluice
