#include "engine/checkpoint/checkpoint_export.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <fmt/format.h>

#include <sluice/host_device.h>
#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "base/utf8.h"
#include "engine/checkpoint/checkpoint_writer.h"
#include "engine/plan/layout.h"
#include "engine/ranks/ranks.h"
#include "engine/store/block_places.h"
#include "engine/store/block_values.h"

namespace sluice {
namespace {

// Blocks in memory at once: one is filled while others are written.
constexpr std::uint32_t kPlaces = 4;

// Gives every block of a state the values that an engine would give it.
void visit_blocks(const Layout& layout, StateSource& source, const StateAccess::Visit& visit) {
  std::uint64_t parameter_bytes = 0;
  std::uint64_t record_bytes = 0;
  for (const BlockPlace& block : layout.blocks()) {
    parameter_bytes = std::max(parameter_bytes, layout.parameter_slot_bytes(block.id));
    record_bytes = std::max(record_bytes, layout.record_slot_bytes(block.id));
  }
  AlignedBuffer memory(kPlaces * (parameter_bytes + record_bytes), "blocks of a checkpoint");
  const auto fill = [&](const BlockView& view) {
    std::memset(view.parameters, 0, parameter_bytes);
    std::memset(view.record, 0, record_bytes);
    set_values(layout, view, source);
  };
  BlockPlaces places(kPlaces);
  for (const BlockPlace& block : layout.blocks()) {
    const std::uint32_t place = index_of(block.id) % kPlaces;
    std::byte* const begin = memory.data() + place * (parameter_bytes + record_bytes);
    const BlockView view{.block = block.id, .parameters = begin, .record = begin + parameter_bytes};
    places.await(place);
    if (!source.allows_threads()) fill(view);
    places.start(place, [&, view, place] {
      if (source.allows_threads()) fill(view);
      visit(view, place);
    });
  }
  places.finish();
}

// The texts as a manifest can have them. A store of an earlier version may hold any bytes.
std::vector<std::string> texts_for_manifest(const std::vector<std::string>& application,
                                            std::vector<std::string>& notes) {
  std::vector<std::string> texts;
  for (const std::string& text : application) {
    if (!is_utf8(text))
      notes.push_back(
          fmt::format("export: the application's text of rank {}, of {} B, is not UTF-8, as a "
                      "checkpoint's has to be; U+FFFD takes the place of each byte that is not",
                      texts.size(), text.size()));
    texts.push_back(valid_utf8(text));
  }
  return texts;
}

}  // namespace

SavedCheckpoint export_checkpoint(StateSource& source, const ModelSpec& given_model,
                                  const Config& config, const std::string& root,
                                  const SaveOptions& options,
                                  const std::vector<std::string>& application) {
  const ModelSpec model = validated(given_model);
  const DType type = config.precision.parameters;
  const StateDescription description =
      describe_state(model, type, config.optimizer.kind, config.optimizer.state);
  source.prepare(description);
  const Layout layout(model, state_format(config), config.storage.block_elements);
  const auto device = make_host_device({.memory_bytes = 1_MiB});
  Ranks ranks({}, nullptr, *device);
  SaveOptions all = options;
  all.hyperparameters.merge(hyperparameters_of(config.optimizer));
  std::vector<std::string> notes;
  SavedCheckpoint saved =
      CheckpointWriter(layout, description, kPlaces, ranks)
          .save(
              root, source.position(), all,
              [&](const StateAccess::Visit& visit) { visit_blocks(layout, source, visit); },
              texts_for_manifest(application, notes));
  saved.notes.insert(saved.notes.begin(), notes.begin(), notes.end());
  return saved;
}

}  // namespace sluice
