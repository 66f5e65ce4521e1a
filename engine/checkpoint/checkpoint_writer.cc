#include "engine/checkpoint/checkpoint_writer.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include <fmt/format.h>

#include <sluice/dtype.h>
#include <sluice/error.h>
#include "base/optimizer_math.h"

namespace sluice {
namespace {

// If larger, the manifest has fewer checksums; if smaller, reading a range takes less memory.
constexpr std::uint64_t kWrittenElements = 1 << 20;
constexpr std::string_view kCheckpointSubject = "a checkpoint";

}  // namespace

std::map<std::string, double> hyperparameters_of(const Config::Optimizer& optimizer) {
  return {{"beta1", optimizer.adam.beta1},     {"beta2", optimizer.adam.beta2},
          {"epsilon", optimizer.adam.epsilon}, {"weight_decay", optimizer.adam.weight_decay},
          {"momentum", optimizer.momentum},    {"clip_norm", optimizer.clip_norm}};
}

CheckpointWriter::CheckpointWriter(const Layout& layout, const StateDescription& description,
                                   ReadState state, Ranks& ranks)
    : layout_(layout), description_(description), read_state_(std::move(state)), ranks_(ranks) {}

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
  for (const BlockPlace& block : layout_.blocks()) {
    for (const TensorPlace& tensor : layout_.tensors_of(block.unit)) {
      const std::uint64_t begin = std::max(tensor.offset_elements, block.offset_elements);
      const std::uint64_t end = std::min(tensor.offset_elements + tensor.element_count,
                                         block.offset_elements + block.element_count);
      for (std::uint64_t at = begin; at < end; at += kWrittenElements)
        write_range(plan,
                    {.tensor = tensor.id,
                     .first_element = at - tensor.offset_elements,
                     .element_count = std::min(kWrittenElements, end - at)},
                    files, written);
    }
  }
  for (CheckpointFile& file : files) file.sync();
  return written;
}

void CheckpointWriter::write_range(const CheckpointPlan& plan, const Range& range,
                                   std::vector<CheckpointFile>& files,
                                   std::vector<Written>& written) {
  masters_.resize(range.element_count);
  read_state_(range.tensor, StateKind::kMaster, range.first_element,
              std::as_writable_bytes(std::span(masters_)));
  std::vector<std::byte> bytes;
  const std::vector<std::uint32_t>& stored = plan.stored_of[index_of(range.tensor)];
  for (const std::uint32_t index : stored) {
    const CheckpointPlan::Tensor& place = plan.tensors[index];
    read(place.part, range, bytes);
    const std::uint64_t element_bytes = bytes.size() / range.element_count;
    files[place.file].write(place.begin_bytes + range.first_element * element_bytes, bytes);
    written.push_back({.stored = index,
                       .piece = {.first_element = range.first_element,
                                 .element_count = range.element_count,
                                 .sum = checksum128(bytes)}});
  }
}

// Reads in the form of the file. Requires: `masters_` are those of the range.
void CheckpointWriter::read(CheckpointPart part, const Range& range,
                            std::vector<std::byte>& bytes) {
  const auto read_as = [&](StateKind kind, std::uint64_t element_bytes) {
    bytes.resize(range.element_count * element_bytes);
    read_state_(range.tensor, kind, range.first_element, bytes);
  };
  switch (part) {
    case CheckpointPart::kWeight:
      return read_as(StateKind::kParameter, layout_.format().parameter_bytes());
    case CheckpointPart::kExpAvg: return read_as(StateKind::kExpAvg, sizeof(float));
    case CheckpointPart::kExpAvgSq: return read_as(StateKind::kExpAvgSq, sizeof(float));
    case CheckpointPart::kMaster: {
      const auto all = std::as_bytes(std::span(masters_));
      bytes.assign(all.begin(), all.end());
      return;
    }
    case CheckpointPart::kMasterLow: break;
  }
  bytes.resize(range.element_count * sizeof(std::int16_t));
  for (std::size_t i = 0; i < masters_.size(); ++i) {
    const std::int16_t low = split_master(masters_[i]).low;
    std::memcpy(bytes.data() + i * sizeof low, &low, sizeof low);
  }
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
