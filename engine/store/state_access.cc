#include "engine/store/state_access.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include <sluice/error.h>
#include <sluice/units.h>

namespace sluice {
namespace {

// Beyond this, a drive gains nothing, and every place has a thread.
constexpr std::uint32_t kPlacesMax = 16;
// The memory beside the pools is at most this part of them, or that of one place.
constexpr std::uint64_t kPoolsPerRoom = 5;

// The memory that a place takes beside the pools: for writing a checkpoint, and for a piece of one
// that is read.
std::uint64_t place_room_bytes(const Layout& layout) {
  const std::uint64_t elements = std::min(layout.block_elements(), kSavedPieceElements);
  return save_room(layout).size_bytes() + elements * sizeof(float);
}

// A place is a lane with a parameter slot; blocks whose home the CPU uses need neither.
std::uint32_t places_of(const Layout& layout, const Placement& placement, const Device& device) {
  const auto lies_elsewhere = [](Tier tier) { return tier != Tier::kHost; };
  std::uint64_t places = std::min<std::uint64_t>(kPlacesMax, layout.blocks().size());
  if (std::ranges::any_of(layout.blocks(), [&](const BlockPlace& block) {
        return !placement.updates_parameters_at_home(block.id);
      }))
    places = std::min<std::uint64_t>(places, placement.parameter_slots.count);
  if (std::ranges::any_of(placement.record_tier, lies_elsewhere))
    places = std::min<std::uint64_t>(places, placement.lanes.count);
  const std::uint64_t pool_bytes =
      placement.host_bytes() + (device.has_own_memory() ? 0 : placement.device_bytes());
  places = std::min(places, pool_bytes / kPoolsPerRoom / place_room_bytes(layout));
  return static_cast<std::uint32_t>(std::max<std::uint64_t>(places, 1));
}

// The state of a block, from a copy of its bytes, but for tensors that get other masters.
class ReplacedMasters final : public StateSource {
 public:
  ReplacedMasters(const Layout& layout, const BlockView& before, const std::vector<bool>& is_wanted,
                  const InitialValues& values)
      : layout_(layout), before_(before), is_wanted_(is_wanted), values_(values) {}

  StatePosition position() const override { return {}; }
  void read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
            std::span<float> values) override {
    if (kind == StateKind::kMaster && is_wanted_[index_of(tensor.id)])
      return InitialSource(values_).read(tensor, kind, first_element, values);
    const std::uint64_t begin = layout_.block(before_.block).offset_elements;
    read_values(layout_, before_, kind, tensor.offset_elements + first_element - begin,
                std::as_writable_bytes(values));
  }

 private:
  const Layout& layout_;
  const BlockView before_;
  const std::vector<bool>& is_wanted_;
  const InitialValues& values_;
};

}  // namespace

StateAccess::StateAccess(const Layout& layout, const Placement& placement, const Tiers& tiers,
                         BlockStore& store, Device& device, Scheduler& scheduler)
    : layout_(layout),
      placement_(placement),
      tiers_(tiers),
      store_(store),
      device_(device),
      scheduler_(scheduler),
      stream_(device, "state access"),
      loaded_(places_of(layout, placement, device)) {}

BlockView StateAccess::view_of(const BlockPlace& block, std::uint32_t place) const {
  const std::uint32_t i = index_of(block.id);
  return {.block = block.id,
          .parameters = placement_.updates_parameters_at_home(block.id)
                            ? tiers_.parameters_at_home(block)
                            : tiers_.parameter_slot(place),
          .record = placement_.record_tier[i] == Tier::kHost ? tiers_.host_record(block.id)
                                                             : tiers_.lane(place)};
}

BlockView StateAccess::load(const BlockPlace& block) {
  const std::uint32_t place = place_of(block);
  const BlockView view = view_of(block, place);
  if (is_loaded(block)) return view;
  loaded_[place].reset();
  const std::uint32_t i = index_of(block.id);
  store_.read_now(block.id, placement_.parameter_tier[i] == Tier::kNvme ? view.parameters : nullptr,
                  placement_.record_tier[i] == Tier::kNvme ? view.record : nullptr);
  if (!placement_.updates_parameters_at_home(block.id) &&
      placement_.parameter_tier[i] == Tier::kDevice)
    copy_now(view.parameters, tiers_.device_parameters(block), layout_.parameter_bytes(block.id));
  if (placement_.record_tier[i] == Tier::kDevice)
    copy_now(view.record, tiers_.device_record(block.id), layout_.record_bytes(block.id));
  loaded_[place] = block.id;
  return view;
}

void StateAccess::store(const BlockView& view) {
  const std::uint32_t i = index_of(view.block);
  const bool is_durable = store_.copies() != nullptr;  // storage then has all of it
  const bool has_parameters = placement_.parameter_tier[i] == Tier::kNvme || is_durable;
  const bool has_record =
      placement_.record_tier[i] == Tier::kNvme || (is_durable && !layout_.is_frozen(view.block));
  store_.write_now(view.block, has_parameters ? view.parameters : nullptr,
                   has_record ? view.record : nullptr);
  bring_to_device(view);
}

void StateAccess::copy_now(std::byte* target, const std::byte* source, std::uint64_t size_bytes) {
  const std::scoped_lock lock(device_mutex_);
  device_.copy(target, source, size_bytes, stream_.id());
  device_.synchronize(stream_.id());
}

// A source that allows it is read on the places' threads. Otherwise this thread reads it, while the
// places' threads store. If the source has initial values, this thread reads the masters alone: the
// places' threads convert and store them. Where the block that comes next would leave some of the
// memory as it is, they also clear the memory, unless it is as new.
void StateAccess::restore(StateSource& source, const UnitVersions& versions) {
  invalidate();
  filled_ = {};
  const bool is_initial = dynamic_cast<const InitialSource*>(&source) != nullptr;
  const std::span<const BlockPlace> blocks = layout_.blocks();
  const bool are_new = std::exchange(are_pools_clear_, false);
  BlockPlaces places(place_count());
  const std::size_t first_count = are_new ? 0 : std::min<std::size_t>(place_count(), blocks.size());
  for (const BlockPlace& block : blocks.first(first_count))
    places.start(place_of(block), [this, &block] { clear(block); });
  for (const BlockPlace& block : blocks) {
    const BlockView view = view_of(block, place_of(block));
    places.await(place_of(block));
    const bool has_masters = is_initial && read_masters(layout_, view, source);
    const bool is_filled = !has_masters && !source.allows_threads();
    if (is_filled) set_values(layout_, view, source);
    places.start(place_of(block),
                 [this, &source, &versions, &block, blocks, are_new, view, has_masters, is_filled] {
                   if (has_masters)
                     set_initial_values(layout_, view);
                   else if (!is_filled)
                     set_values(layout_, view, source);
                   store_.begin_at(view.block, versions.of(block.unit));
                   store(view);
                   const std::size_t next = index_of(block.id) + place_count();
                   if (next < blocks.size() && !is_overwritten(block, blocks[next]) &&
                       !(are_new && lies_at_home(blocks[next])))
                     clear(blocks[next]);
                 });
  }
  places.finish();
  for (const BlockPlace& block : blocks) count_homes(block);
}

void StateAccess::clear(const BlockPlace& block) {
  const BlockView view = view_of(block, place_of(block));
  std::memset(view.parameters, 0, layout_.parameter_bytes(view.block));
  std::memset(view.record, 0, layout_.record_bytes(view.block));
}

// Whether view_of() shows memory that no other block uses.
bool StateAccess::lies_at_home(const BlockPlace& block) const {
  return placement_.updates_parameters_at_home(block.id) &&
         placement_.record_tier[index_of(block.id)] == Tier::kHost;
}

// Whether the values of `next` leave nothing of those of `before` in the place. Bytes that no value
// reaches are then zero in both.
bool StateAccess::is_overwritten(const BlockPlace& before, const BlockPlace& next) const {
  const BlockView old_view = view_of(before, place_of(before));
  const BlockView new_view = view_of(next, place_of(next));
  if (old_view.parameters != new_view.parameters || old_view.record != new_view.record ||
      before.element_count != next.element_count ||
      layout_.is_frozen(before.id) != layout_.is_frozen(next.id))
    return false;
  std::uint64_t covered = 0;
  const std::uint64_t block_end = next.offset_elements + next.element_count;
  for (const TensorPlace& tensor : layout_.tensors_of(next.unit)) {
    const std::uint64_t begin = std::max(tensor.offset_elements, next.offset_elements);
    const std::uint64_t end = std::min(tensor.offset_elements + tensor.element_count, block_end);
    covered += end > begin ? end - begin : 0;
  }
  return covered == next.element_count;
}

void StateAccess::replace(const std::vector<bool>& is_wanted, const InitialValues& values,
                          const UnitVersions& versions) {
  stop_reading();
  const auto has_wanted = [&](const BlockPlace& block) {
    return std::ranges::any_of(layout_.tensors_of(block.unit), [&](const TensorPlace& tensor) {
      return is_wanted[index_of(tensor.id)] &&
             tensor.offset_elements < block.offset_elements + block.element_count &&
             block.offset_elements < tensor.offset_elements + tensor.element_count;
    });
  };
  std::vector<std::byte> parameters;
  std::vector<std::byte> record;
  BlockPlaces places(place_count());
  for (const BlockPlace& block : layout_.blocks()) {
    if (!has_wanted(block)) continue;
    places.await(place_of(block));
    const BlockView view = load(block);
    parameters.assign(view.parameters, view.parameters + layout_.parameter_bytes(block.id));
    record.assign(view.record, view.record + layout_.record_bytes(block.id));
    std::memset(view.parameters, 0, parameters.size());
    std::memset(view.record, 0, record.size());
    ReplacedMasters source(
        layout_, {.block = block.id, .parameters = parameters.data(), .record = record.data()},
        is_wanted, values);
    try {
      set_values(layout_, view, source);
    } catch (...) {  // the place may be the block's home
      std::ranges::copy(parameters, view.parameters);
      std::ranges::copy(record, view.record);
      throw;
    }
    places.start(place_of(block), [this, &versions, &block, view] {
      store_.begin_at(view.block, versions.of(block.unit));
      store(view);
    });
  }
  places.finish();
}

void StateAccess::open() {
  invalidate();
  are_pools_clear_ = false;
  filled_ = {};
  BlockPlaces places(place_count());
  for (const BlockPlace& block : layout_.blocks()) {
    places.await(place_of(block));
    places.start(place_of(block), [this, &block] { open(block); });
  }
  places.finish();
  for (const BlockPlace& block : layout_.blocks()) count_homes(block);
}

void StateAccess::open(const BlockPlace& block) {
  const BlockView view = view_of(block, place_of(block));
  const std::uint32_t i = index_of(block.id);
  const bool has_record = placement_.record_tier[i] != Tier::kNvme && !layout_.is_frozen(block.id);
  store_.read_now(block.id, placement_.parameter_tier[i] != Tier::kNvme ? view.parameters : nullptr,
                  has_record ? view.record : nullptr);
  bring_to_device(view);
}

void StateAccess::invalidate() {
  stop_reading();
  read_end_.reset();
  loaded_.assign(loaded_.size(), std::nullopt);
}

void StateAccess::visit_blocks(const Visit& visit) {
  stop_reading();
  BlockPlaces places(place_count());
  for (const BlockPlace& block : layout_.blocks()) {
    places.await(place_of(block));
    places.start(place_of(block), [this, &visit, &block] { visit(load(block), place_of(block)); });
  }
  places.finish();
}

void StateAccess::bring_to_device(const BlockView& view) {
  const BlockPlace& block = layout_.block(view.block);
  const std::uint32_t i = index_of(view.block);
  if (!placement_.updates_parameters_at_home(block.id) &&
      placement_.parameter_tier[i] == Tier::kDevice)
    copy_now(tiers_.device_parameters(block), view.parameters, layout_.parameter_bytes(block.id));
  if (placement_.record_tier[i] == Tier::kDevice)
    copy_now(tiers_.device_record(view.block), view.record, layout_.record_bytes(view.block));
}

void StateAccess::lend_homes() {
  scheduler_.run([this] {
    for (std::size_t i = 0; i < kMemoryPools; ++i)
      scheduler_.pools().lend(static_cast<MemoryPool>(i), filled_.pool_bytes[i]);
  });
}

// A unit's home on the device is whole, whichever part of it this rank owns, if the ranks bring the
// rest together there.
void StateAccess::count_homes(const BlockPlace& block) {
  const auto pool_of = [](Tier tier, MemoryPool device, MemoryPool host, MemoryPool nvme) {
    return tier == Tier::kDevice ? device : tier == Tier::kHost ? host : nvme;
  };
  const std::uint32_t i = index_of(block.id);
  const Tier tier = placement_.parameter_tier[i];
  const std::uint64_t parameter_bytes =
      tier != Tier::kDevice ? layout_.parameter_slot_bytes(block.id)
      : i == layout_.unit(block.unit).first_block
          ? align_up(layout_.home_parameter_bytes(block.unit), kStorageAlignBytes)
          : 0;
  filled_.add(pool_of(tier, MemoryPool::kResidentParameters, MemoryPool::kHostParameters,
                      MemoryPool::kNvmeParameters),
              parameter_bytes);
  filled_.add(pool_of(placement_.record_tier[i], MemoryPool::kDeviceRecords,
                      MemoryPool::kHostRecords, MemoryPool::kNvmeRecords),
              layout_.record_slot_bytes(block.id));
}

}  // namespace sluice
