#include "engine/durable/new_store.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include "base/aligned_buffer.h"
#include "base/file_flush.h"
#include "engine/durable/copy_places.h"
#include "engine/plan/sharding.h"
#include "engine/plan/striping.h"
#include "engine/step/loss_scaler.h"
#include "engine/store/block_places.h"
#include "engine/store/block_values.h"
#include "engine/store/commit_opening.h"
#include "engine/store/durable_identity.h"
#include "engine/store/store_files.h"
#include "engine/store/store_lock.h"
#include "engine/store/unit_versions.h"
#include "io/checksum.h"

namespace sluice {
namespace {

constexpr std::uint32_t kFilledPlaces = 4;  // blocks on their way to storage at once

// All of it on storage: later runs decide where the homes are.
Placement placement_on_storage(const Layout& layout, std::uint32_t copies) {
  Placement placement;
  placement.gradient_tier.assign(layout.units().size(), Tier::kHost);
  for (const BlockPlace& block : layout.blocks()) {
    placement.parameter_tier.push_back(Tier::kNvme);
    placement.record_tier.push_back(layout.is_frozen(block.id) ? Tier::kHost : Tier::kNvme);
    placement.nvme_parameter_bytes += layout.parameter_slot_bytes(block.id);
    placement.nvme_record_bytes += layout.record_slot_bytes(block.id);
  }
  add_copies(layout, copies, placement);
  return placement;
}

// The files of one rank.
class RankFiles {
 public:
  RankFiles(const Config& config, const ModelSpec& model, std::uint32_t rank, std::uint32_t ranks,
            const StoreId& id)
      : layout_(model, state_format(config), config.storage.block_elements, {},
                shard_of(config.sharding, rank, ranks)),
        identity_(config, model, layout_, ranks),
        places_(place_copies(layout_, placement_on_storage(layout_, durable_copies(config, ranks)),
                             storage_weights(config.storage))),
        files_(StoreFiles::create(
            {.directories = config.storage.paths,
             .name = config.storage.state.name,
             .id = id,
             .rank = rank},
            places_.file_bytes,
            commit_slot_bytes(static_cast<std::uint64_t>(std::ranges::count_if(
                places_.planes,
                [](const CommitPlane& plane) { return plane.length_bytes != 0; }))))),
        scale_options_(config.precision.loss_scale),
        record_{.store_id = id, .rank = rank, .rank_count = ranks} {}

  StoreFiles& files() { return files_; }
  std::uint64_t size_bytes() const {
    std::uint64_t bytes = kCommitTwins * kCommitSlots * files_.commit_files().slot_bytes;
    for (const std::uint64_t file : places_.file_bytes) bytes += file;
    return bytes;
  }

  // Fills the first copy of every plane, several blocks at once.
  void fill(StateSource& source) {
    std::uint64_t record_offset = 0;
    std::uint64_t record_bytes = 0;
    for (const BlockPlace& block : layout_.blocks()) {
      record_offset = std::max(record_offset, layout_.parameter_slot_bytes(block.id));
      record_bytes = std::max(record_bytes, layout_.record_slot_bytes(block.id));
    }
    const std::uint64_t place_bytes = record_offset + record_bytes;
    const AlignedBuffer buffer(kFilledPlaces * place_bytes, "blocks of the store");
    std::vector<std::unique_ptr<IoQueue>> queues;
    while (queues.size() < kFilledPlaces) queues.push_back(make_sync_queue({}));
    UnitVersions versions(layout_);
    versions.restore(source.position());
    BlockPlaces places(kFilledPlaces);
    for (const BlockPlace& block : layout_.blocks()) {
      const std::uint32_t place = index_of(block.id) % kFilledPlaces;
      std::byte* const begin = buffer.data() + place * place_bytes;
      const BlockView view{.block = block.id, .parameters = begin, .record = begin + record_offset};
      const auto take = [this, &source, view, begin, place_bytes] {
        std::memset(begin, 0, place_bytes);
        set_values(layout_, view, source);
      };
      places.await(place);
      if (!source.allows_threads()) take();
      places.start(place, [&, this, view, take, place, version = versions.of(block.unit)] {
        if (source.allows_threads()) take();
        write(*queues[place], 2 * index_of(view.block), version, view.parameters);
        write(*queues[place], 2 * index_of(view.block) + 1, version, view.record);
      });
    }
    places.finish();
    for (const CommitPlane& plane : places_.planes)
      if (plane.length_bytes != 0) record_.planes.push_back(plane);
  }

  // Requires: fill(). Durable on return.
  void commit(IoQueue& queue, const StatePosition& position, const std::string& application) {
    LossScaler scaler(scale_options_);
    if (position.loss_scale) scaler.restore(*position.loss_scale);
    const LossScaleState& scale = scaler.state();
    record_.generation = 1;
    record_.step = position.step;
    record_.model_hash = identity_.model_hash();
    record_.layout_hash = identity_.layout_hash();
    record_.config_hash = identity_.config_hash();
    record_.settings = identity_.settings();
    record_.file_count = static_cast<std::uint32_t>(places_.file_bytes.size());
    record_.scale = {.scale = scale.scale,
                     .good_steps = scale.good_steps,
                     .hysteresis_left = scale.hysteresis_left};
    const auto bytes = std::as_bytes(std::span(application));
    record_.application.assign(bytes.begin(), bytes.end());
    const CommitFiles files = files_.commit_files();
    write_commit(queue, files, commit_sequence(record_.file_count), 0, record_);
  }

 private:
  // Any thread; each has other planes.
  void write(IoQueue& queue, std::uint32_t index, std::uint64_t version, std::byte* bytes) {
    CommitPlane& plane = places_.planes[index];
    if (plane.length_bytes == 0) return;
    const DirectFile& file = files_.data()[plane.copies[0].file];
    plane.version = version;
    plane.checksum = checksum({bytes, plane.length_bytes});
    IoRequest request{.kind = IoKind::kWrite,
                      .descriptor = file.descriptor(),
                      .offset_bytes = plane.copies[0].offset_bytes,
                      .data = bytes,
                      .length_bytes = plane.length_bytes,
                      .on_complete = [](IoRequest&) {}};
    IoRequest* const pointer = &request;
    queue.submit({&pointer, 1});
    queue.wait_idle();
    if (request.error != 0)
      throw Error(
          file_error_code(request.error, ErrorCode::kIo),
          fmt::format("write of {} [{}, +{}): {}; {}", file.name(), request.offset_bytes,
                      plane.length_bytes, errno_text(request.error), file_remedy(request.error)));
  }

  Layout layout_;
  DurableIdentity identity_;
  CopyPlaces places_;
  StoreFiles files_;
  LossScaleOptions scale_options_;
  CommitRecord record_;
};

// Takes the paths' locks; no store of that name may exist.
std::vector<StoreLock> locks_of_free_name(const Config::Storage& storage) {
  const std::string& name = storage.state.name;
  std::vector<StoreLock> locks;
  std::vector<StorePath> paths;
  for (const std::string& directory : storage.paths) {
    locks.emplace_back(directory, name, "");
    paths.push_back(look_at_path(directory, name));
  }
  const StoreFinding found = find_store(name, paths);
  if (found.presence == StorePresence::kMade)
    throw Error(ErrorCode::kInput,
                fmt::format("there is a store \"{}\" in {} already; choose another "
                            "storage.state.name, or remove it with `sluice state remove`",
                            name, fmt::join(storage.paths, ", ")));
  FileLocks users(storage.timeout_s);
  await_users(paths, users);
  if (found.presence == StorePresence::kAbandoned) remove_store_files(paths, found.id);
  return locks;
}

void set_marks(std::vector<StoreLock>& locks, StoreStage stage, const StoreId& id) {
  for (StoreLock& lock : locks) lock.set_mark({.stage = stage, .id = id});
}

// Makes the names and the first commits of all ranks' files.
void name_and_commit(std::vector<RankFiles>& files, const StateSource& source,
                     std::span<const std::string> application) {
  for (RankFiles& rank : files) rank.files().name_data();
  const std::unique_ptr<IoQueue> queue = make_sync_queue({});
  for (std::size_t rank = 0; rank < files.size(); ++rank) {
    const std::string own = rank < application.size() ? application[rank]
                            : application.empty()     ? std::string()
                                                      : application[0];
    files[rank].commit(*queue, source.position(), own);
  }
  for (std::size_t rank = files.size(); rank-- > 0;) files[rank].files().name_records();
}

// The next opening or making of a store of this name removes what is left here.
void remove_unfinished(const Config::Storage& storage, std::vector<StoreLock>& locks,
                       const StoreId& id) noexcept {
  try {
    set_marks(locks, StoreStage::kCreating, id);  // a store that is half removed is none
    std::vector<StorePath> paths;
    for (const std::string& directory : storage.paths)
      paths.push_back(look_at_path(directory, storage.state.name));
    remove_store_files(paths, id);
    set_marks(locks, StoreStage::kNone, id);
  } catch (const std::exception&) {
  }
}

}  // namespace

NewStore make_store(const Config& config, const ModelSpec& given_model, std::uint32_t ranks,
                    StateSource& source, std::span<const std::string> application) {
  const ModelSpec model = validated(given_model);
  require_group_number(config.sharding, ranks);
  source.prepare(describe_state(model, config.precision.parameters, config.optimizer.kind,
                                config.optimizer.state));
  std::vector<StoreLock> locks = locks_of_free_name(config.storage);
  const StoreId id = random_store_id();
  std::vector<RankFiles> files;
  NewStore made{.step = source.position().step};
  files.reserve(ranks);
  for (std::uint32_t rank = 0; rank < ranks; ++rank) {
    made.size_bytes += files.emplace_back(config, model, rank, ranks, id).size_bytes();
  }
  for (RankFiles& rank : files) rank.fill(source);
  try {
    set_marks(locks, StoreStage::kCreating, id);
    name_and_commit(files, source, application);
    set_marks(locks, StoreStage::kMade, id);
  } catch (...) {
    files.clear();
    remove_unfinished(config.storage, locks, id);
    throw;
  }
  return made;
}

}  // namespace sluice
