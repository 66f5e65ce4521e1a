#include "engine/checkpoint/store_source.h"

#include <algorithm>
#include <array>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/checkpoint/same_state.h"
#include "engine/plan/sharding.h"
#include "engine/store/commit_opening.h"
#include "engine/store/store_survey.h"

namespace sluice {
namespace {

// The store's records and data files of one rank.
struct OpenedRank {
  StoreFiles files;
  CommitFiles records;
  CommitOpening opening;

  OpenedRank(const StoreFiles::Options& options, IoQueue& queue)
      : files(StoreFiles::open_records(options)),
        records(files.commit_files()),
        opening(queue, records) {}
};

std::string offer_text(const CommitOffer& offer) {
  return offer.newest ? fmt::format("{}", *offer.newest) : "none";
}

}  // namespace

StoreSource::StoreSource(const std::string& name, const std::vector<std::string>& directories,
                         CheckpointPrecision precision, const std::string& job)
    : options_{.directories = directories, .name = name}, precision_(precision) {
  const StoreSurvey survey = survey_store(name, directories);
  if (survey.presence != StorePresence::kMade)
    throw Error(ErrorCode::kInput,
                fmt::format("there is no store \"{}\" in {}", name, fmt::join(directories, ", ")));
  options_.id = survey.id;
  for (const std::string& directory : directories) locks_.emplace_back(directory, name, job);
  std::vector<StorePath> paths;
  for (const std::string& directory : directories) paths.push_back(look_at_path(directory, name));
  if (const std::string user = store_user(paths); !user.empty())
    throw Error(ErrorCode::kInput, fmt::format("the store \"{}\" is in use by {}; wait for that "
                                               "process to end, or end it",
                                               name, user));
  std::vector<std::uint32_t> ranks;
  for (const SurveyedRank& rank : survey.ranks) ranks.push_back(rank.rank);
  open_parts(ranks);
}

StoreSource::~StoreSource() = default;

void StoreSource::open_parts(const std::vector<std::uint32_t>& ranks) {
  const std::unique_ptr<IoQueue> queue = make_sync_queue({});
  std::vector<std::unique_ptr<OpenedRank>> opened;
  std::vector<CommitOffer> offers;
  std::string steps;
  const auto open = [&](std::uint32_t rank) {
    StoreFiles::Options options = options_;
    options.rank = rank;
    opened.push_back(std::make_unique<OpenedRank>(options, *queue));
    offers.push_back(opened.back()->opening.offer());
    steps += fmt::format("{}rank {}: {}", rank == 0 ? "" : "; ", rank, offer_text(offers.back()));
  };
  open(0);
  if (opened[0]->opening.newest() == nullptr)
    throw Error(ErrorCode::kDamaged, fmt::format("the store \"{}\" has no commit", options_.name));
  run_ = described_run(opened[0]->opening.newest()->settings, options_.name);
  const auto local = std::ranges::find_if(run_.model.units, &UnitSpec::is_local);
  if (run_.ranks > 1 && local != run_.model.units.end())
    throw Error(ErrorCode::kUnsupported,
                fmt::format("the store \"{}\": unit \"{}\" is local to rank 0, and each of the {} "
                            "ranks has others in its place, which no single state holds; continue "
                            "the run with {} ranks, and save a checkpoint (Engine::save), which "
                            "has the units of all and goes on with others",
                            options_.name, local->name, run_.ranks, run_.ranks));
  if (ranks.size() != run_.ranks)
    throw Error(ErrorCode::kInput,
                fmt::format("the store \"{}\" is of {} ranks, and {} has the files of {}; name all "
                            "of its paths, on a host that has them",
                            options_.name, run_.ranks, fmt::join(options_.directories, ", "),
                            ranks.size()));
  for (std::uint32_t rank = 1; rank < run_.ranks; ++rank) open(rank);
  const std::optional<std::uint64_t> step = common_step(offers);
  if (!step)
    throw Error(ErrorCode::kDamaged,
                fmt::format("the ranks of the store \"{}\" have no step in common ({})",
                            options_.name, steps));
  const CommitRecord& first = opened[0]->opening.of_step(*step);
  position_ = {.step = first.step, .loss_scale = moving_scale(first)};
  description_ = describe_state(run_.model, run_.config.precision.parameters,
                                run_.config.optimizer.kind, run_.config.optimizer.state);
  const std::uint32_t owners = shard_of(run_.config.sharding, 0, run_.ranks).count;
  for (std::uint32_t rank = 0; rank < run_.ranks; ++rank) {
    const CommitRecord& record = opened[rank]->opening.of_step(*step);
    application_.emplace_back(reinterpret_cast<const char*>(record.application.data()),
                              record.application.size());
    if (rank < owners) add_part(rank, std::move(opened[rank]->files), record);
  }
  for (const TensorPlace& tensor : parts_[0].layout.tensors()) {
    const UnitPlace& unit = parts_[0].layout.unit(tensor.unit);
    const std::uint64_t updates = parts_[0].planes[2 * unit.first_block].version;
    if (!unit.is_frozen && updates != position_.step)
      position_.tensor_updates[tensor.name] = updates;
  }
  std::uint64_t record_bytes = 0;
  for (const Part& part : parts_) {
    for (std::size_t plane = 0; plane < part.planes.size(); plane += 2) {
      record_offset_ = std::max(record_offset_, part.planes[plane].length_bytes);
      record_bytes = std::max(record_bytes, part.planes[plane + 1].length_bytes);
    }
  }
  slot_bytes_ = record_offset_ + record_bytes;
}

// Adds the record's planes by block, without those that have no bytes.
void StoreSource::add_part(std::uint32_t rank, StoreFiles files, const CommitRecord& record) {
  Layout layout(run_.model, state_format(run_.config), run_.config.storage.block_elements, {},
                shard_of(run_.config.sharding, rank, run_.ranks));
  files.open_data(record.file_count);
  std::vector<CommitPlane> planes(2 * layout.blocks().size());
  auto from = record.planes.begin();
  for (std::uint32_t plane = 0; plane < planes.size(); ++plane) {
    const BlockId block{plane / 2};
    const std::uint64_t bytes =
        plane % 2 == 0 ? layout.parameter_slot_bytes(block) : layout.record_slot_bytes(block);
    if (bytes == 0) continue;
    if (from == record.planes.end() || from->length_bytes != bytes)
      throw Error(ErrorCode::kDamaged,
                  fmt::format("the store \"{}\": plane {} of rank {}'s record does not fit block "
                              "{}, which takes {} B",
                              options_.name, from - record.planes.begin(), rank, plane / 2, bytes));
    planes[plane] = *from++;
  }
  parts_.push_back({std::move(layout), std::move(files), std::move(planes)});
}

void StoreSource::prepare(const StateDescription& wanted) {
  require_same_state(description_, wanted, precision_,
                     fmt::format("the store \"{}\"", options_.name));
  restart_unfrozen(description_, wanted, position_);
}

const TensorPlace& StoreSource::find(const std::string& tensor) const {
  const auto all = parts_[0].layout.tensors();
  const auto found = std::ranges::find(all, tensor, &TensorPlace::name);
  if (found == all.end())
    throw Error(ErrorCode::kInput,
                fmt::format("the store \"{}\" has no tensor \"{}\"", options_.name, tensor));
  return *found;
}

void StoreSource::read_plane_of(const Slot& slot, std::size_t part, std::uint32_t plane,
                                std::byte* target) const {
  const CommitPlane& place = parts_[part].planes[plane];
  if (place.length_bytes == 0) return;
  const std::string damage =
      read_plane(*slot.queue, parts_[part].files, place, {target, place.length_bytes});
  if (!damage.empty())
    throw Error(ErrorCode::kDamaged, fmt::format("the store \"{}\" is damaged: {}; continue from a "
                                                 "checkpoint",
                                                 options_.name, damage));
}

void StoreSource::load(Slot& slot, std::size_t part, const BlockPlace& block) const {
  if (slot.is_loaded && slot.part == part && slot.view.block == block.id) return;
  slot.is_loaded = false;
  if (slot.queue == nullptr) {
    slot.queue = make_sync_queue({});
    slot.buffer = AlignedBuffer(slot_bytes_, "a block of the store");
  }
  slot.part = part;
  slot.view = {.block = block.id,
               .parameters = slot.buffer.data(),
               .record = slot.buffer.data() + record_offset_};
  read_plane_of(slot, part, 2 * index_of(block.id), slot.view.parameters);
  read_plane_of(slot, part, 2 * index_of(block.id) + 1, slot.view.record);
  slot.is_loaded = true;
}

// The slot that has the block, else the one that was used longest ago. A thread that reads the
// kinds of a range in turn finds its blocks again: each thread has two slots' worth.
StoreSource::Slot& StoreSource::take_slot(std::size_t part, const BlockPlace& block) {
  const std::scoped_lock lock(mutex_);
  Slot* best = nullptr;
  std::size_t taken = 0;
  for (const auto& slot : slots_) {
    taken += slot->is_taken ? 1 : 0;
    if (slot->is_taken) continue;
    const bool has_block = slot->is_loaded && slot->part == part && slot->view.block == block.id;
    if (best == nullptr || has_block || slot->use < best->use) best = slot.get();
    if (has_block) break;
  }
  const bool has_block =
      best != nullptr && best->is_loaded && best->part == part && best->view.block == block.id;
  if (!has_block && slots_.size() < 2 * (taken + 1))
    best = slots_.emplace_back(std::make_unique<Slot>()).get();
  best->is_taken = true;
  best->use = ++uses_;
  return *best;
}

void StoreSource::give_back(Slot& slot) {
  const std::scoped_lock lock(mutex_);
  slot.is_taken = false;
}

void StoreSource::read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
                       std::span<float> values) {
  const TensorPlace& own = find(tensor.name);
  const UnitPlace& unit = parts_[0].layout.unit(own.unit);
  const std::uint64_t begin = own.offset_elements + first_element;
  const std::uint64_t end = begin + values.size();
  for (std::uint64_t at = begin; at < end;) {
    const auto part = static_cast<std::size_t>(at / unit.shard_elements);
    const Layout& layout = parts_[part].layout;
    const auto blocks = layout.blocks_of(own.unit);
    const BlockPlace& block = blocks[(at % unit.shard_elements) / layout.block_elements()];
    const std::uint64_t next = std::min(end, block.offset_elements + block.element_count);
    auto give = [this](Slot* slot) { give_back(*slot); };
    const std::unique_ptr<Slot, decltype(give)> slot(&take_slot(part, block), give);
    load(*slot, part, block);
    read_values(layout, slot->view, kind, at - block.offset_elements,
                std::as_writable_bytes(values.subspan(at - begin, next - at)));
    at = next;
  }
}

}  // namespace sluice
