#include "engine/checkpoint/checkpoint_writer.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <mutex>
#include <optional>
#include <span>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/aligned_buffer.h"
#include "engine/store/block_values.h"

namespace sluice {
namespace {

// If larger, the manifest has fewer checksums; if smaller, reading a range takes less memory.
constexpr std::uint64_t kWrittenElements = 1 << 20;
// A thread writes this much at once. With less, a drive reaches its rate only if more threads
// write.
constexpr std::uint64_t kWriteBytes = 1_MiB;
constexpr std::string_view kCheckpointSubject = "a checkpoint";

// The bytes of `count` elements from element `begin` of a block on, as files have them. Planes have
// the same bytes, but for 8-bit moments, which are decoded to `decoded`.
std::span<const std::byte> bytes_of(const Layout& layout, const BlockView& view,
                                    CheckpointPart part, std::uint64_t begin, std::uint64_t count,
                                    std::vector<std::byte>& decoded) {
  const auto in = [&](const std::byte* plane, std::uint64_t element_bytes) {
    return std::span(plane + begin * element_bytes, count * element_bytes);
  };
  const auto moment = [&](const float* values, StateKind kind) {
    if (values != nullptr) return std::as_bytes(std::span(values + begin, count));
    decoded.resize(count * sizeof(float));
    read_values(layout, view, kind, begin, decoded);
    return std::span<const std::byte>(decoded);
  };
  switch (part) {
    case CheckpointPart::kWeight: return in(view.parameters, layout.format().parameter_bytes());
    case CheckpointPart::kMaster: return in(view.record, sizeof(float));
    case CheckpointPart::kMasterLow: return in(view.record, sizeof(std::int16_t));
    case CheckpointPart::kExpAvg:
    case CheckpointPart::kExpAvgSq: break;
  }
  const RecordMoments moments =
      moments_of(layout.format(), layout.block(view.block).element_count, view.record);
  return part == CheckpointPart::kExpAvg ? moment(moments.exp_avg, StateKind::kExpAvg)
                                         : moment(moments.exp_avg_sq, StateKind::kExpAvgSq);
}

}  // namespace

std::map<std::string, double> hyperparameters_of(const Config::Optimizer& optimizer) {
  return {{"beta1", optimizer.adam.beta1},     {"beta2", optimizer.adam.beta2},
          {"epsilon", optimizer.adam.epsilon}, {"weight_decay", optimizer.adam.weight_decay},
          {"momentum", optimizer.momentum},    {"clip_norm", optimizer.clip_norm}};
}

CheckpointWriter::CheckpointWriter(const Layout& layout, const StateDescription& description,
                                   Blocks blocks, Ranks& ranks)
    : layout_(layout), description_(description), blocks_(std::move(blocks)), ranks_(ranks) {}

SavedCheckpoint CheckpointWriter::save(const std::string& root, const StatePosition& position,
                                       const SaveOptions& options,
                                       std::vector<std::string> application) {
  const CheckpointPlan plan =
      plan_checkpoint(description_, layout_.format(), options.file_bytes_max);
  std::optional<NewCheckpoint> fresh;
  const std::string folder = begin(plan, fresh, root);
  std::vector<Written> own;
  ranks_.together(kCheckpointSubject, [&] { own = write_own(plan, folder); });
  std::vector<Written> written;
  for (const auto& bytes : ranks_.gather(std::as_bytes(std::span(own)), kCheckpointSubject)) {
    const std::size_t before = written.size();
    written.resize(before + bytes.size() / sizeof(Written));
    if (!bytes.empty()) std::memcpy(written.data() + before, bytes.data(), bytes.size());
  }
  std::vector<std::string> own_application;
  for (const auto& bytes :
       ranks_.gather(std::as_bytes(std::span(options.application)), kCheckpointSubject))
    own_application.emplace_back(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (application.empty()) application = std::move(own_application);
  SavedCheckpoint saved{.path = {}, .step = position.step, .size_bytes = plan.size_bytes};
  ranks_.together(kCheckpointSubject, [&] {
    if (!fresh) return;
    const CheckpointManifest manifest =
        manifest_of(plan, position, options, std::move(written), std::move(application));
    fresh->write("model.safetensors.index.json", plan.index);
    for (const auto& [name, text] : options.files) fresh->write(name, text);
    fresh->write(std::string(kManifestName), manifest_text(manifest));
    saved.path = fresh->commit(position.step, options.keep);
  });
  saved.path = ranks_.share(saved.path, kCheckpointSubject);
  return saved;
}

// Rank 0 makes the files; all ranks learn where.
std::string CheckpointWriter::begin(const CheckpointPlan& plan, std::optional<NewCheckpoint>& fresh,
                                    const std::string& root) {
  std::string folder;
  ranks_.together(kCheckpointSubject, [&] {
    if (ranks_.rank() != 0) return;
    fresh.emplace(root);
    for (const CheckpointPlan::File& file : plan.files)
      fresh->create(file.name, file.beginning, file.size_bytes);
    folder = fresh->folder();
  });
  return ranks_.share(folder, kCheckpointSubject);
}

// Block by block, so that each is fetched once. The first of the ranks with the same data writes.
std::vector<CheckpointWriter::Written> CheckpointWriter::write_own(const CheckpointPlan& plan,
                                                                   const std::string& folder) {
  std::vector<Written> written;
  if (ranks_.rank() >= ranks_.owner_count()) return written;
  std::vector<CheckpointFile> files;
  for (const CheckpointPlan::File& file : plan.files) files.emplace_back(folder, file.name);
  std::vector<AlignedBuffer> rooms(blocks_.place_count);
  std::mutex mutex;  // for `written`
  blocks_.visit([&](const BlockView& view, std::uint32_t place) {
    AlignedBuffer& room = rooms[place];
    if (room.size_bytes() == 0) room = AlignedBuffer(kWriteBytes, "writing a checkpoint");
    const std::vector<Written> added = write_block(plan, view, files, room);
    const std::scoped_lock lock(mutex);
    written.insert(written.end(), added.begin(), added.end());
  });
  for (CheckpointFile& file : files) file.sync();
  return written;
}

std::vector<CheckpointWriter::Written> CheckpointWriter::write_block(
    const CheckpointPlan& plan, const BlockView& view, std::vector<CheckpointFile>& files,
    AlignedBuffer& room) const {
  std::vector<Written> written;
  std::vector<std::byte> decoded;
  const BlockPlace& block = layout_.block(view.block);
  const auto write = [&](std::uint32_t index, const TensorPlace& tensor, std::uint64_t at,
                         std::uint64_t count) {
    const CheckpointPlan::Tensor& place = plan.tensors[index];
    const std::span<const std::byte> bytes =
        bytes_of(layout_, view, place.part, at - block.offset_elements, count, decoded);
    const std::uint64_t first = at - tensor.offset_elements;
    files[place.file].write(place.begin_bytes + first * (bytes.size() / count), bytes, room);
    written.push_back(
        {.stored = index,
         .piece = {.first_element = first, .element_count = count, .sum = checksum128(bytes)}});
  };
  for (const TensorPlace& tensor : layout_.tensors_of(block.unit)) {
    const std::uint64_t begin = std::max(tensor.offset_elements, block.offset_elements);
    const std::uint64_t end = std::min(tensor.offset_elements + tensor.element_count,
                                       block.offset_elements + block.element_count);
    for (std::uint64_t at = begin; at < end; at += kWrittenElements) {
      for (const std::uint32_t index : plan.stored_of[index_of(tensor.id)])
        write(index, tensor, at, std::min(kWrittenElements, end - at));
    }
  }
  return written;
}

CheckpointManifest CheckpointWriter::manifest_of(const CheckpointPlan& plan,
                                                 const StatePosition& position,
                                                 const SaveOptions& options,
                                                 std::vector<Written> written,
                                                 std::vector<std::string> application) const {
  CheckpointManifest manifest{.position = position,
                              .state = description_,
                              .hyperparameters = options.hyperparameters,
                              .application = std::move(application),
                              .files = {},
                              .stored = {}};
  for (const CheckpointPlan::File& file : plan.files)
    manifest.files.push_back({.name = file.name,
                              .size_bytes = file.size_bytes,
                              .beginning = checksum128(std::as_bytes(std::span(file.beginning))),
                              .beginning_bytes = file.beginning.size()});
  for (const CheckpointPlan::Tensor& tensor : plan.tensors)
    manifest.stored.push_back({.tensor = description_.tensors[tensor.tensor].name,
                               .part = tensor.part,
                               .file = tensor.file,
                               .dtype = tensor.dtype,
                               .begin_bytes = tensor.begin_bytes,
                               .pieces = {}});
  std::ranges::sort(written, {}, [](const Written& piece) {
    return std::pair(piece.stored, piece.piece.first_element);
  });
  for (const Written& piece : written) manifest.stored[piece.stored].pieces.push_back(piece.piece);
  for (std::size_t i = 0; i < plan.tensors.size(); ++i) {
    std::uint64_t next = 0;
    for (const CheckpointManifest::Piece& piece : manifest.stored[i].pieces) {
      SLUICE_CHECK(piece.first_element == next, "every element is written by one rank");
      next += piece.element_count;
    }
    SLUICE_CHECK(next == layout_.tensors()[plan.tensors[i].tensor].element_count,
                 "every element is written by one rank");
  }
  return manifest;
}

}  // namespace sluice
