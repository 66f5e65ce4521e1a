// The layout gives every element its place. Units consist of tensors, and are cut into blocks. Each
// state of a block takes a fixed number of bytes. The layout is a pure function of (model,
// precision, block size). A layout contains no budget, tier or file. A layout is constant after
// construction, and any thread may use it.
//
// If several ranks share the state, every unit is padded, and is cut into equal shards, one for
// each rank. The blocks are then the blocks of the rank's own shards. So code that works block by
// block processes only the rank's part.
//
// Invariants: each tensor begins at a multiple of 256 elements, counted from the beginning of the
// unit. So the tensor has the same address modulo 256 B in every placement. The lengths of units,
// shards and blocks are multiples of 256 elements. A leaf of the gradient norm has 256 elements. A
// group of 8-bit moments has 256 elements, too. Padding elements are zero. Padding elements stay
// zero, because their gradients are zero.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include <sluice/config.h>
#include <sluice/ids.h>
#include <sluice/model_spec.h>
#include <sluice/state.h>
#include "cpu_optim/update.h"

namespace sluice {

// The alignment of tensors, units and blocks, in elements.
inline constexpr std::uint64_t kAlignElements = 256;
// The alignment of everything that goes to storage, in bytes. This alignment satisfies O_DIRECT on
// every drive seen so far.
inline constexpr std::uint64_t kStorageAlignBytes = 4096;

// The formats of the states of one element.
struct StateFormat {
  DType parameter = DType::kBf16;
  DType gradient = DType::kBf16;
  MasterLayout master = MasterLayout::kSplitBf16;
  bool keeps_exp_avg = true;
  bool keeps_exp_avg_sq = true;
  OptimizerState moments = OptimizerState::kFp32;

  std::uint64_t parameter_bytes() const { return size_of(parameter); }
  std::uint64_t gradient_bytes() const { return size_of(gradient); }
  // The optimizer's record of a block is [rest of the master | exp_avg | exp_avg_sq]. A moment that
  // the optimizer does not keep is left out. If the parameters are bf16, the record has the low
  // half of each split master. If the parameters are fp16, the record has the whole fp32 master. If
  // the parameters are fp32, the record has no part of the master. With 8-bit moments, the record
  // has codes in place of the moments. The codes are followed by the scales of exp_avg, and then by
  // the scales of exp_avg_sq. The functions below return where each part of a record begins.
  // `elements` is the length of the block, and a multiple of kAlignElements.
  std::uint64_t moment_bytes() const {
    switch (moments) {
      case OptimizerState::kFp32: return sizeof(float);
      case OptimizerState::kBf16: return sizeof(std::uint16_t);
      case OptimizerState::k8bit: return 1;
    }
    return 0;
  }
  std::uint64_t exp_avg_begin(std::uint64_t elements) const {
    if (master == MasterLayout::kFp32) return 0;
    return elements * (master == MasterLayout::kSplitBf16 ? sizeof(std::int16_t) : sizeof(float));
  }
  std::uint64_t exp_avg_sq_begin(std::uint64_t elements) const {
    return exp_avg_begin(elements) + (keeps_exp_avg ? elements * moment_bytes() : 0);
  }
  std::uint64_t exp_avg_scales_begin(std::uint64_t elements) const {
    return exp_avg_sq_begin(elements) + (keeps_exp_avg_sq ? elements * moment_bytes() : 0);
  }
  std::uint64_t exp_avg_sq_scales_begin(std::uint64_t elements) const {
    return exp_avg_scales_begin(elements) + (keeps_exp_avg ? scale_bytes(elements) : 0);
  }
  std::uint64_t record_bytes(std::uint64_t elements) const {
    return exp_avg_sq_scales_begin(elements) + (keeps_exp_avg_sq ? scale_bytes(elements) : 0);
  }
  // Returns the average number of bytes that the state of one element takes. Rates are computed
  // from this number.
  double state_bytes_per_element() const {
    return static_cast<double>(parameter_bytes()) +
           static_cast<double>(record_bytes(kAlignElements)) / kAlignElements;
  }

 private:
  std::uint64_t scale_bytes(std::uint64_t elements) const {
    return moments == OptimizerState::k8bit ? elements / kMomentGroupElements * sizeof(float) : 0;
  }
};
static_assert(kAlignElements == kMomentGroupElements, "a block's groups are those of its tensors");

// The moments in a record. Each moment is stored as fp32, as bf16 or as codes. A moment that the
// optimizer does not keep is null.
struct RecordMoments {
  float* exp_avg = nullptr;
  float* exp_avg_sq = nullptr;
  std::uint16_t* exp_avg_bf16 = nullptr;
  std::uint16_t* exp_avg_sq_bf16 = nullptr;
  MomentCodes exp_avg_codes = {};
  MomentCodes exp_avg_sq_codes = {};
};
// `elements` is the length of the block to which `record` belongs.
RecordMoments moments_of(const StateFormat& format, std::uint64_t elements, std::byte* record);

// The part of every unit that this rank owns. A unit has `count` equal parts, and this rank owns
// part number `index`.
struct Shard {
  std::uint32_t index = 0;
  std::uint32_t count = 1;
  // If keeps_all_gradients is true, the rank keeps the gradients of all parts. Otherwise the rank
  // keeps only the gradients of its own part. keeps_all_parameters says the same about the
  // parameters.
  bool keeps_all_gradients = false;
  bool keeps_all_parameters = false;
  // A unit stays whole if its size without padding is at most this number.
  std::uint64_t keep_gathered_bytes = 0;
  // A reduction cuts each part into this number of pieces.
  std::uint32_t pieces = 1;
};

struct BlockPlace {
  BlockId id{};
  UnitId unit{};
  std::uint64_t offset_elements = 0;  // in the unit
  std::uint64_t element_count = 0;
};

struct UnitPlace {
  UnitId id{};
  std::string name;
  std::uint64_t element_count = 0;     // with padding; `count` shards of equal length
  std::uint64_t payload_elements = 0;  // without padding
  std::uint64_t shard_begin = 0;       // where this rank's part begins
  std::uint64_t shard_elements = 0;
  std::uint32_t first_tensor = 0;
  std::uint32_t tensor_count = 0;
  std::uint32_t first_block = 0;
  std::uint32_t block_count = 0;
  bool is_frozen = false;     // no gradient, no record
  bool is_announced = false;  // UnitSpec::is_announced
  bool is_pinned = false;     // UnitSpec::is_pinned
  bool is_local = false;      // UnitSpec::is_local: only one rank has the unit, and has all of it
  bool is_sharded = false;    // ranks share its parameters, which are gathered for each use
};

class Layout {
 public:
  // `model` is a result of validated(). `block_elements` is a multiple of 4096. If `block_elements`
  // is empty, the block size follows from the model's size. `hyperparameter_sets` has one number
  // per tensor of the model, or is empty.
  Layout(const ModelSpec& model, StateFormat format, std::optional<std::uint64_t> block_elements,
         std::span<const std::uint32_t> hyperparameter_sets = {}, Shard shard = {});

  Shard shard() const { return shard_; }

  const StateFormat& format() const { return format_; }
  std::span<const UnitPlace> units() const { return units_; }
  std::span<const TensorPlace> tensors() const { return tensors_; }
  std::span<const BlockPlace> blocks() const { return blocks_; }
  // Fails with kInvalidArgument if the model does not have the id. All functions that take an id
  // fail in this case.
  std::span<const TensorPlace> tensors_of(UnitId unit) const;
  std::span<const BlockPlace> blocks_of(UnitId unit) const;
  const UnitPlace& unit(UnitId id) const {
    return units_[checked(index_of(id), units_.size(), "unit")];
  }
  const TensorPlace& tensor(TensorId id) const {
    return tensors_[checked(index_of(id), tensors_.size(), "tensor")];
  }
  const BlockPlace& block(BlockId id) const {
    return blocks_[checked(index_of(id), blocks_.size(), "block")];
  }
  bool is_frozen(BlockId id) const { return unit(block(id).unit).is_frozen; }

  std::uint64_t block_elements() const { return block_elements_; }
  std::uint64_t parameter_count() const { return parameter_count_; }  // without padding
  // The bytes of this rank's parameters, masters and moments, including padding.
  std::uint64_t state_bytes() const;

  // The exact sizes of one block's states, in bytes. A frozen block has no record, and its unit has
  // no gradient.
  std::uint64_t parameter_bytes(BlockId block) const;
  std::uint64_t record_bytes(BlockId block) const;
  // The next three functions return the sizes that the states have in slots and in file extents.
  // These sizes are rounded up to multiples of kStorageAlignBytes.
  std::uint64_t parameter_slot_bytes(BlockId block) const;
  std::uint64_t record_slot_bytes(BlockId block) const;
  std::uint64_t gradient_slot_bytes(BlockId block) const;
  std::uint64_t unit_parameter_bytes(UnitId unit) const;
  std::uint64_t unit_gradient_bytes(UnitId unit) const;
  std::uint64_t shard_parameter_bytes(UnitId unit) const;
  // Returns the size of the parameters that this rank stores for the unit. If the unit is sharded,
  // the rank has only its part. Otherwise the rank has the whole unit.
  std::uint64_t home_parameter_bytes(UnitId unit) const;
  // Whether every device keeps all of the unit's parameters, although ranks share the parameters of
  // other units.
  bool keeps_gathered(UnitId unit) const;
  // The gradient set has room for the gradients of one part of each unit. set_begin() returns the
  // first element of this part, and set_elements() returns the number of elements in this part.
  std::uint64_t set_begin(UnitId id) const {
    return shard_.keeps_all_gradients ? 0 : unit(id).shard_begin;
  }
  std::uint64_t set_elements(UnitId id) const {
    if (unit(id).is_frozen) return 0;
    return shard_.keeps_all_gradients ? unit(id).element_count : unit(id).shard_elements;
  }
  std::uint64_t set_gradient_bytes(UnitId unit) const;

 private:
  void add_unit(const UnitSpec& spec);
  static std::uint32_t checked(std::uint32_t index, std::size_t count, const char* kind) {
    if (index >= count) [[unlikely]]
      fail_id(index, count, kind);
    return index;
  }
  [[noreturn]] static void fail_id(std::uint32_t index, std::size_t count, const char* kind);

  // Constant after construction.
  StateFormat format_;
  Shard shard_;
  std::uint64_t block_elements_ = 0;
  std::uint64_t parameter_count_ = 0;
  std::vector<UnitPlace> units_;
  std::vector<TensorPlace> tensors_;
  std::vector<BlockPlace> blocks_;
};

// The formats that the config's precision and optimizer need.
StateFormat state_format(const Config& config);

}  // namespace sluice
