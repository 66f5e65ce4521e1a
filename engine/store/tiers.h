// The memory and the files of a placement. Memory and files are allocated once, and cut into pools.
// There is one slab of device memory, one arena of host memory, and one scratch file per storage
// path. With a durable store, the store's data files hold the state, and scratch files hold all
// other data. The tiers hand out addresses. Other components decide when and for what purpose a
// slot is used. The tiers are constant after construction, and any thread may use them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <sluice/config.h>
#include <sluice/device.h>
#include "base/aligned_buffer.h"
#include "engine/plan/layout.h"
#include "engine/plan/placement.h"
#include "engine/store/commit_format.h"
#include "io/direct_file.h"

namespace sluice {

// A block's place in a scratch file.
struct Extent {
  std::uint32_t file = 0;
  std::uint64_t offset_bytes = 0;
  std::uint64_t length_bytes = 0;
};

// The function copies device memory to the host. The copy is slow, so the function is meant only
// for messages.
AlignedBuffer read_back(Device& device, const std::byte* source, std::uint64_t size_bytes);

// A tally holds the device's results for the gradients and the update of one unit (see
// tally_bytes_of()).
struct Tally {
  double* leaves = nullptr;           // sums of squares, for the part that this rank owns
  std::uint32_t* overflow = nullptr;  // 1 = an update has made a weight overflow
};

// The data files of a durable store, and the places of the planes' copies in these files.
struct DurableHomes {
  std::vector<DirectFile> files = {};
  std::vector<std::uint32_t> drives = {};  // by file: its storage path
  // One entry per plane. Each block has two planes: its parameters and its record. A plane without
  // bytes has no copies.
  std::vector<CommitPlane> planes = {};
};

class Tiers {
 public:
  // `layout`, `placement` and `device` must outlive the tiers. If `durable` contains no planes, the
  // state lies in scratch files.
  // Fails with kOutOfMemory if there is too little memory. Fails with kNoSpace, kInput or kIo if a
  // file cannot be made. After a failure, no file is left behind.
  Tiers(const Layout& layout, const Placement& placement, const Config::Storage& storage,
        Device& device, DurableHomes durable = {});
  ~Tiers();
  Tiers(const Tiers&) = delete;
  Tiers& operator=(const Tiers&) = delete;

  // Device memory.
  std::span<std::byte> device_memory() const {
    return {device_memory_.data(), device_memory_.size_bytes()};
  }
  std::byte* resident_parameters(UnitId unit) const;  // Requires: all of the unit is at home there
  std::byte* device_parameters(const BlockPlace& block) const;  // Requires: homed on the device
  // The parameters of the whole unit.
  // Requires: the unit is leased at home. The home is either on the device or in host memory.
  std::byte* leased_home(UnitId unit) const;
  // Requires: the block's home is host or device memory.
  std::byte* parameters_at_home(const BlockPlace& block) const;
  std::byte* window() const { return window_; }
  std::byte* announced_window() const { return announced_window_; }
  std::byte* gradient_slot(std::uint32_t slot) const;
  std::byte* activation_place(std::uint32_t place) const;
  std::byte* device_gradient(const BlockPlace& block) const;  // Requires: waits there
  std::byte* device_record(BlockId block) const;              // Requires: homed on the device
  std::byte* update_slot(std::uint32_t slot) const;           // see sluice::update_slot()
  Tally device_tally(UnitId unit) const;                      // Requires: its gradients wait there

  // The unit's whole set of gradients, in host memory or in device memory.
  std::byte* gradient_set(UnitId unit) const;                  // Requires: gradients wait in memory
  std::byte* waiting_gradient(const BlockPlace& block) const;  // the block's part of it

  // Host memory.
  std::span<std::byte> host_memory() const {
    return {host_memory_.data(), host_memory_.size_bytes()};
  }
  std::byte* gradient(const BlockPlace& block) const;  // Requires: waits there
  Tally host_tally(UnitId unit) const;                 // Requires: its gradients are on the device
  std::uint32_t* update_flag(std::uint32_t slot) const;  // of a block that the device updates
  std::byte* gradient_staging(std::uint32_t slot) const;
  std::byte* host_parameters(BlockId block) const;  // Requires: homed in host memory
  std::byte* host_record(BlockId block) const;      // Requires: homed in host memory
  std::byte* parameter_slot(std::uint32_t slot) const;
  std::byte* lane(std::uint32_t lane) const;
  std::byte* lane_gradient(std::uint32_t lane) const;
  std::byte* host_activations(std::uint32_t home) const;  // Requires: homed in host memory
  std::byte* activation_staging(std::uint32_t slot) const;
  std::byte* commit_buffer(std::uint32_t buffer) const;
  std::span<std::byte> save_buffer(std::uint32_t buffer) const;
  // The part of host memory that is used by transfers from and to storage. This part lies at the
  // end of the arena. This part contains the parameter slots, the lanes, and the staging buffers of
  // activations and gradients.
  std::span<std::byte> transfer_memory() const;

  // Storage.
  const DirectFile& file(std::uint32_t index) const { return files_[index]; }
  // If the state is scratch, there is one file per path. If nothing is kept on storage, there is no
  // file. With a durable store, the data files come first, and the scratch files follow.
  std::span<const DirectFile> files() const { return files_; }
  std::uint32_t drive(std::uint32_t file) const { return drives_[file]; }
  // Returns how many copies of each block are on storage. One of the copies is the home
  // (engine/store/block_store.h).
  std::uint32_t storage_copies() const {
    return std::max(placement_.storage_copies, placement_.durable_copies);
  }
  // The planes in the order of DurableHomes::planes. The list is empty if the state is scratch.
  std::span<const CommitPlane> durable_planes() const { return durable_planes_; }
  // The place of one copy on storage.
  // Requires: the block's home is on storage, or the state is durable.
  const Extent& parameter_extent(BlockId block, std::uint32_t copy) const;
  const Extent& record_extent(BlockId block, std::uint32_t copy) const;
  const Extent& gradient_extent(BlockId block) const;
  // The number of extents for gradients that are kept on storage until the update. There is one
  // extent per block. If no gradients are kept on storage, the result is 0.
  std::uint32_t gradient_extent_count() const {
    return static_cast<std::uint32_t>(gradient_extents_.size());
  }
  // The homes of activations are cut into pieces. A piece is as large as a staging slot. The last
  // piece of a home may be smaller. The pieces of all homes are numbered in one sequence.
  std::uint32_t activation_piece_count() const {
    return static_cast<std::uint32_t>(activation_pieces_.size());
  }
  std::uint32_t first_activation_piece(std::uint32_t home) const {
    return first_activation_pieces_[home];
  }
  const Extent& activation_extent(std::uint32_t piece) const { return activation_pieces_[piece]; }
  // Describes the piece for messages. For example, the text is: activations of unit "h.3",
  // micro-batch 1, piece 0.
  std::string describe_activation(std::uint32_t piece) const;

 private:
  void cut_device_memory();
  void cut_host_memory();
  std::uint64_t offset_in_set(const BlockPlace& block) const;
  Tally tally_at(std::byte* tallies, UnitId unit) const;
  void create_files(const Config::Storage& storage);
  void create_scratch(const Config::Storage& storage);
  void place_copies();
  void place_blocks(std::span<const double> weights, std::vector<std::uint64_t>& file_bytes);
  void place_gradients(Tier tier, std::byte* next);
  void place_activations(std::span<const double> weights, std::vector<std::uint64_t>& file_bytes);

  const Layout& layout_;
  const Placement& placement_;
  Device& device_;
  DeviceBuffer device_memory_;
  AlignedBuffer host_memory_;
  std::vector<DirectFile> files_;
  std::vector<std::uint32_t> drives_;  // by file
  std::vector<CommitPlane> durable_planes_;
  const std::uint32_t first_scratch_;  // file

  // Constant after construction.
  std::byte* window_ = nullptr;
  std::byte* announced_window_ = nullptr;
  std::byte* gradient_slots_ = nullptr;
  std::byte* gradient_staging_ = nullptr;
  std::byte* parameter_slots_ = nullptr;
  std::byte* lanes_ = nullptr;
  std::byte* lane_gradients_ = nullptr;
  std::byte* activation_window_ = nullptr;
  std::byte* host_activations_ = nullptr;
  std::byte* activation_staging_ = nullptr;
  std::byte* commit_buffers_ = nullptr;
  std::byte* save_buffers_ = nullptr;
  std::vector<std::byte*> device_homes_;     // of parameters, by unit
  std::vector<std::byte*> gradients_;        // by unit; on the device, or in host memory
  std::vector<std::uint64_t> tally_begins_;  // by unit, in the tallies of its tier
  std::byte* device_tallies_ = nullptr;
  std::byte* host_tallies_ = nullptr;
  std::byte* update_slots_ = nullptr;
  std::byte* update_flags_ = nullptr;
  std::vector<std::byte*> host_parameters_;  // by block
  std::vector<std::byte*> records_;          // by block; on the device, or in host memory
  std::vector<Extent> parameter_extents_;    // by block, for each copy
  std::vector<Extent> record_extents_;       // by block, for each copy
  std::vector<Extent> gradient_extents_;     // by block; empty if none waits on storage
  std::vector<Extent> activation_pieces_;
  std::vector<std::uint32_t> first_activation_pieces_;  // by home; the last entry counts all
};

}  // namespace sluice
