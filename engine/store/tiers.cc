#include "engine/store/tiers.h"

#include <algorithm>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "engine/plan/striping.h"
#include "engine/store/storage_files.h"

namespace sluice {
namespace {

constexpr std::uint64_t kPoolAlignBytes = 4096;

// Host memory that stays registered as long as the object lives.
class HostRegistration {
 public:
  HostRegistration(Device& device, std::span<std::byte> memory) : device_(device), memory_(memory) {
    device.register_host_memory(memory);
  }
  HostRegistration(const HostRegistration&) = delete;
  HostRegistration& operator=(const HostRegistration&) = delete;
  ~HostRegistration() { device_.unregister_host_memory(memory_); }

 private:
  Device& device_;
  std::span<std::byte> memory_;
};

}  // namespace

AlignedBuffer read_back(Device& device, const std::byte* source, std::uint64_t size_bytes) {
  AlignedBuffer target(size_bytes, "the text of an error");
  const HostRegistration registered(device, target.span());
  const Stream stream(device, "read back");  // goes first, and waits for the copy
  device.copy(target.data(), source, size_bytes, stream.id());
  device.synchronize(stream.id());
  return target;
}

Tiers::Tiers(const Layout& layout, const Placement& placement, const Config::Storage& storage,
             Device& device, DurableHomes durable)
    : layout_(layout),
      placement_(placement),
      device_(device),
      files_(std::move(durable.files)),
      drives_(std::move(durable.drives)),
      durable_planes_(std::move(durable.planes)),
      first_scratch_(static_cast<std::uint32_t>(files_.size())),
      device_homes_(layout.units().size()),
      gradients_(layout.units().size()),
      tally_begins_(layout.units().size()),
      host_parameters_(layout.blocks().size()),
      records_(layout.blocks().size()),
      parameter_extents_(storage_copies() * layout.blocks().size()),
      record_extents_(storage_copies() * layout.blocks().size()),
      gradient_extents_(placement.nvme_gradient_bytes == 0 ? 0 : layout.blocks().size()) {
  create_files(storage);  // first: a lack of space is found before memory is touched
  device_memory_ = DeviceBuffer(device, placement.device_slab_bytes(), "parameters and gradients");
  host_memory_ = AlignedBuffer(placement.host_bytes(), "the engine's host pools");
  device.register_host_memory(host_memory_.span());
  cut_device_memory();
  cut_host_memory();
}

Tiers::~Tiers() {
  device_.unregister_host_memory(host_memory_.span());
}

void Tiers::cut_device_memory() {
  std::byte* next = device_memory_.data();
  for (const UnitPlace& unit : layout_.units()) {
    if (!placement_.is_homed_on_device(unit)) continue;
    device_homes_[index_of(unit.id)] = next;
    next += align_up(layout_.home_parameter_bytes(unit.id), kPoolAlignBytes);
  }
  window_ = next;
  announced_window_ = window_ + placement_.window_bytes;
  gradient_slots_ = announced_window_ + placement_.announced_window.size_bytes();
  next = gradient_slots_ + placement_.gradient_slots.size_bytes();
  place_gradients(Tier::kDevice, next);
  next += placement_.device_gradient_bytes;
  for (const BlockPlace& block : layout_.blocks()) {
    if (placement_.record_tier[index_of(block.id)] != Tier::kDevice) continue;
    records_[index_of(block.id)] = next;
    next += layout_.record_slot_bytes(block.id);
  }
  device_tallies_ = next;
  std::uint64_t tallies_end = 0;
  for (const UnitPlace& unit : layout_.units()) {
    tally_begins_[index_of(unit.id)] = tallies_end;
    if (placement_.gradient_is_on_device(unit.id)) tallies_end += tally_bytes_of(unit);
  }
  update_slots_ = device_tallies_ + placement_.tally_bytes;
  activation_window_ = update_slots_ + placement_.update_staging.size_bytes();
  SLUICE_CHECK(activation_window_ + placement_.activation_window.size_bytes() ==
                   device_memory_.data() + placement_.device_slab_bytes(),
               "the pools must add up to the slab");
}

// Places the gradients that wait in `tier`, from `next` on.
void Tiers::place_gradients(Tier tier, std::byte* next) {
  for (const UnitPlace& unit : layout_.units()) {
    if (placement_.gradient_tier[index_of(unit.id)] != tier) continue;
    gradients_[index_of(unit.id)] = next;
    next += align_up(layout_.set_gradient_bytes(unit.id), kPoolAlignBytes);
  }
}

void Tiers::cut_host_memory() {
  std::byte* next = host_memory_.data();
  const auto take = [&](std::uint64_t size_bytes) {
    std::byte* begin = next;
    next += size_bytes;
    return begin;
  };
  place_gradients(Tier::kHost, take(placement_.gradient_set_bytes));
  // The parameters of a unit lie together, so that one copy brings them to the device, or a lease
  // uses them here.
  for (const BlockPlace& block : layout_.blocks()) {
    if (placement_.parameter_tier[index_of(block.id)] == Tier::kHost)
      host_parameters_[index_of(block.id)] = take(layout_.parameter_slot_bytes(block.id));
  }
  for (const BlockPlace& block : layout_.blocks()) {
    if (placement_.record_tier[index_of(block.id)] == Tier::kHost)
      records_[index_of(block.id)] = take(layout_.record_slot_bytes(block.id));
  }
  host_activations_ = take(placement_.host_activation_bytes);
  host_tallies_ = take(placement_.tally_bytes);
  update_flags_ = take(placement_.update_flag_bytes());
  parameter_slots_ = take(placement_.parameter_slots.size_bytes());
  lanes_ = take(placement_.lanes.size_bytes());
  lane_gradients_ = take(placement_.lane_gradients.size_bytes());
  activation_staging_ = take(placement_.activation_staging.size_bytes());
  gradient_staging_ = take(placement_.gradient_staging.size_bytes());
  commit_buffers_ = take(placement_.commit_buffers.size_bytes());
  save_buffers_ = take(placement_.save_buffers.size_bytes());
  SLUICE_CHECK(next == host_memory_.data() + placement_.host_bytes(),
               "the pools must add up to the arena");
}

void Tiers::create_files(const Config::Storage& storage) {
  place_copies();
  const bool has_scratch =
      durable_planes_.empty()
          ? placement_.nvme_bytes() != 0
          : placement_.nvme_gradient_bytes + placement_.nvme_activation_bytes != 0;
  if (has_scratch) create_scratch(storage);
  check_alignment(files_);
}

void Tiers::create_scratch(const Config::Storage& storage) {
  const std::vector<double> weights = storage_weights(storage);
  std::vector<std::uint64_t> file_bytes(storage.paths.size(), 0);
  place_blocks(weights, file_bytes);
  place_activations(weights, file_bytes);
  for (std::uint32_t file = 0; file < storage.paths.size(); ++file) {
    drives_.push_back(file);
    files_.push_back(DirectFile::create_scratch(storage.paths[file], file_bytes[file]));
  }
}

// Takes the places from the store.
void Tiers::place_copies() {
  for (std::size_t plane = 0; plane < durable_planes_.size(); ++plane) {
    const CommitPlane& from = durable_planes_[plane];
    std::vector<Extent>& extents = plane % 2 == 0 ? parameter_extents_ : record_extents_;
    for (std::uint32_t copy = 0; copy < from.copy_count; ++copy)
      extents[copy * layout_.blocks().size() + plane / 2] = {
          .file = from.copies[copy].file,
          .offset_bytes = from.copies[copy].offset_bytes,
          .length_bytes = from.length_bytes};
  }
}

// A block's parameters, record and gradients are next to each other on one drive.
void Tiers::place_blocks(std::span<const double> weights, std::vector<std::uint64_t>& file_bytes) {
  const Striping striping = plan_striping(layout_, placement_, weights);
  for (const BlockPlace& block : layout_.blocks()) {
    const std::uint32_t i = index_of(block.id);
    const std::uint32_t file = striping.drive[i];
    const auto extend = [&](std::uint64_t length_bytes) {
      const Extent extent{.file = first_scratch_ + file,
                          .offset_bytes = file_bytes[file],
                          .length_bytes = length_bytes};
      file_bytes[file] += length_bytes;
      return extent;
    };
    const std::uint32_t copies = !durable_planes_.empty()          ? 0
                                 : placement_.has_shadow(block.id) ? 2
                                                                   : 1;
    for (std::uint32_t copy = 0; copy < copies; ++copy) {
      const std::size_t at = copy * layout_.blocks().size() + i;
      if (placement_.parameter_tier[i] == Tier::kNvme)
        parameter_extents_[at] = extend(layout_.parameter_slot_bytes(block.id));
      if (placement_.record_tier[i] == Tier::kNvme)
        record_extents_[at] = extend(layout_.record_slot_bytes(block.id));
    }
    if (placement_.gradient_tier[index_of(block.unit)] == Tier::kNvme)
      gradient_extents_[i] = extend(layout_.gradient_slot_bytes(block.id));
  }
}

void Tiers::place_activations(std::span<const double> weights,
                              std::vector<std::uint64_t>& file_bytes) {
  if (placement_.nvme_activation_bytes == 0) return;
  DriveDealer dealer(weights);
  const ActivationHomes& homes = placement_.activation_homes;
  for (std::uint32_t home = 0; home < homes.count(); ++home) {
    first_activation_pieces_.push_back(activation_piece_count());
    std::uint64_t rest_bytes = align_up(homes.value_bytes(home), kStorageAlignBytes);
    while (rest_bytes != 0) {
      const std::uint64_t bytes = std::min(rest_bytes, placement_.activation_staging.slot_bytes);
      const std::uint32_t file = dealer.deal(bytes);
      activation_pieces_.push_back(
          {.file = first_scratch_ + file, .offset_bytes = file_bytes[file], .length_bytes = bytes});
      file_bytes[file] += bytes;
      rest_bytes -= bytes;
    }
  }
  first_activation_pieces_.push_back(activation_piece_count());
}

std::byte* Tiers::resident_parameters(UnitId unit) const {
  SLUICE_CHECK(placement_.unit_is_on_device(layout_.unit(unit)), "the unit is on the device");
  return device_homes_[index_of(unit)];
}

std::byte* Tiers::device_parameters(const BlockPlace& block) const {
  const UnitPlace& unit = layout_.unit(block.unit);
  SLUICE_CHECK(placement_.is_homed_on_device(unit), "the block's home is the device");
  const std::uint64_t begin = unit.is_sharded ? unit.shard_begin : 0;
  return device_homes_[index_of(block.unit)] +
         (block.offset_elements - begin) * layout_.format().parameter_bytes();
}

std::byte* Tiers::leased_home(UnitId id) const {
  const UnitPlace& unit = layout_.unit(id);
  SLUICE_CHECK(placement_.is_leased_at_home(unit), "the unit is leased at home");
  return placement_.unit_is_on_device(unit) ? resident_parameters(id)
                                            : host_parameters(BlockId{unit.first_block});
}

std::byte* Tiers::parameters_at_home(const BlockPlace& block) const {
  return placement_.parameter_tier[index_of(block.id)] == Tier::kDevice ? device_parameters(block)
                                                                        : host_parameters(block.id);
}

std::byte* Tiers::gradient_slot(std::uint32_t slot) const {
  return gradient_slots_ + slot * placement_.gradient_slots.slot_bytes;
}

std::byte* Tiers::gradient_set(UnitId unit) const {
  SLUICE_CHECK(gradients_[index_of(unit)] != nullptr, "the unit's gradients wait in memory");
  return gradients_[index_of(unit)];
}

std::byte* Tiers::waiting_gradient(const BlockPlace& block) const {
  return gradient_set(block.unit) + offset_in_set(block);
}

std::byte* Tiers::gradient(const BlockPlace& block) const {
  SLUICE_CHECK(!placement_.gradient_leaves(block.unit), "the unit's gradients wait in host memory");
  return gradient_set(block.unit) + offset_in_set(block);
}

std::byte* Tiers::device_gradient(const BlockPlace& block) const {
  SLUICE_CHECK(placement_.gradient_is_on_device(block.unit),
               "the unit's gradients wait on the device");
  return gradient_set(block.unit) + offset_in_set(block);
}

Tally Tiers::tally_at(std::byte* tallies, UnitId unit) const {
  SLUICE_CHECK(placement_.gradient_is_on_device(unit), "the unit's gradients wait on the device");
  auto* const leaves = reinterpret_cast<double*>(tallies + tally_begins_[index_of(unit)]);
  const std::uint64_t count = layout_.unit(unit).shard_elements / kAlignElements;
  return {.leaves = leaves, .overflow = reinterpret_cast<std::uint32_t*>(leaves + count)};
}

Tally Tiers::device_tally(UnitId unit) const {
  return tally_at(device_tallies_, unit);
}

Tally Tiers::host_tally(UnitId unit) const {
  return tally_at(host_tallies_, unit);
}

std::uint64_t Tiers::offset_in_set(const BlockPlace& block) const {
  return (block.offset_elements - layout_.set_begin(block.unit)) *
         layout_.format().gradient_bytes();
}

std::byte* Tiers::activation_place(std::uint32_t place) const {
  return activation_window_ + place * placement_.activation_window.slot_bytes;
}

std::byte* Tiers::host_activations(std::uint32_t home) const {
  SLUICE_CHECK(placement_.host_activation_bytes != 0, "activations are homed in host memory");
  return host_activations_ + placement_.activation_homes.offset_bytes(home);
}

std::byte* Tiers::activation_staging(std::uint32_t slot) const {
  return activation_staging_ + slot * placement_.activation_staging.slot_bytes;
}

std::string Tiers::describe_activation(std::uint32_t piece) const {
  const auto next = std::ranges::upper_bound(first_activation_pieces_, piece);
  const auto home = static_cast<std::uint32_t>(next - first_activation_pieces_.begin()) - 1;
  const ActivationHomes& homes = placement_.activation_homes;
  return fmt::format("activations of unit \"{}\", micro-batch {}, piece {}",
                     layout_.unit(homes.unit(home)).name, homes.micro_batch(home),
                     piece - first_activation_piece(home));
}

std::byte* Tiers::update_slot(std::uint32_t slot) const {
  return update_slots_ + slot * placement_.update_staging.slot_bytes;
}

std::uint32_t* Tiers::update_flag(std::uint32_t slot) const {
  return reinterpret_cast<std::uint32_t*>(update_flags_) + slot;
}

std::byte* Tiers::gradient_staging(std::uint32_t slot) const {
  return gradient_staging_ + slot * placement_.gradient_staging.slot_bytes;
}

std::byte* Tiers::host_parameters(BlockId block) const {
  SLUICE_CHECK(host_parameters_[index_of(block)] != nullptr,
               "the block's parameters are not homed in host memory");
  return host_parameters_[index_of(block)];
}

std::byte* Tiers::host_record(BlockId block) const {
  SLUICE_CHECK(placement_.record_tier[index_of(block)] == Tier::kHost,
               "the block's record is homed in host memory");
  return records_[index_of(block)];
}

std::byte* Tiers::device_record(BlockId block) const {
  SLUICE_CHECK(placement_.record_tier[index_of(block)] == Tier::kDevice,
               "the block's record is homed on the device");
  return records_[index_of(block)];
}

std::byte* Tiers::parameter_slot(std::uint32_t slot) const {
  return parameter_slots_ + slot * placement_.parameter_slots.slot_bytes;
}

std::byte* Tiers::lane(std::uint32_t lane) const {
  return lanes_ + lane * placement_.lanes.slot_bytes;
}

std::byte* Tiers::lane_gradient(std::uint32_t lane) const {
  return lane_gradients_ + lane * placement_.lane_gradients.slot_bytes;
}

std::span<std::byte> Tiers::save_buffer(std::uint32_t buffer) const {
  const std::uint64_t bytes = placement_.save_buffers.slot_bytes;
  return {save_buffers_ + buffer * bytes, bytes};
}

std::byte* Tiers::commit_buffer(std::uint32_t buffer) const {
  return commit_buffers_ + buffer * placement_.commit_buffers.slot_bytes;
}

std::span<std::byte> Tiers::transfer_memory() const {
  return {parameter_slots_, host_memory_.data() + host_memory_.size_bytes()};
}

const Extent& Tiers::parameter_extent(BlockId block, std::uint32_t copy) const {
  const Extent& extent = parameter_extents_[copy * layout_.blocks().size() + index_of(block)];
  SLUICE_CHECK(extent.length_bytes != 0, "the block's parameters are not on storage");
  return extent;
}

const Extent& Tiers::record_extent(BlockId block, std::uint32_t copy) const {
  const Extent& extent = record_extents_[copy * layout_.blocks().size() + index_of(block)];
  SLUICE_CHECK(extent.length_bytes != 0, "the block's record is not on storage");
  return extent;
}

const Extent& Tiers::gradient_extent(BlockId block) const {
  const Extent& extent = gradient_extents_[index_of(block)];
  SLUICE_CHECK(extent.length_bytes != 0, "the block's gradients do not wait on storage");
  return extent;
}

}  // namespace sluice
