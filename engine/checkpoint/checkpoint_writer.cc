#include "engine/checkpoint/checkpoint_writer.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstring>
#include <functional>
#include <mutex>
#include <numeric>
#include <optional>
#include <span>
#include <sstream>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include "base/aligned_buffer.h"
#include "base/utf8.h"
#include "engine/checkpoint/checkpoint_kin.h"
#include "engine/checkpoint/safetensors_header.h"
#include "engine/ranks/local_units.h"

namespace sluice {
namespace {

// Files that a thread keeps open: those of a tensor's weights and of its moments, before and after
// the end of a file.
constexpr std::size_t kOpenFiles = 4;
constexpr std::string_view kCheckpointSubject = "a checkpoint";
constexpr std::size_t kSha256Digits = 64;

// The bytes of `count` elements from element `begin` of a block on, as files have them. Planes have
// the same bytes, but for smaller moments, which are decoded to `decoded`.
std::span<const std::byte> bytes_of(const Layout& layout, const BlockView& view,
                                    CheckpointPart part, std::uint64_t begin, std::uint64_t count,
                                    std::span<std::byte> decoded) {
  const auto in = [&](const std::byte* plane, std::uint64_t element_bytes) {
    return std::span(plane + begin * element_bytes, count * element_bytes);
  };
  const auto moment = [&](const float* values, StateKind kind) {
    if (values != nullptr) return std::as_bytes(std::span(values + begin, count));
    const std::span<std::byte> bytes = decoded.first(count * sizeof(float));
    read_values(layout, view, kind, begin, bytes);
    return std::span<const std::byte>(bytes);
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

std::vector<std::string> checked_sha256(std::vector<std::string> digests, const FileRanges& file) {
  if (digests.size() != file.ranges.size())
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("SaveOptions::sha256 returned {} digests for {} ranges of \"{}\"",
                            digests.size(), file.ranges.size(), file.path));
  const auto is_hex = [](char c) { return std::isxdigit(static_cast<unsigned char>(c)) != 0; };
  for (std::size_t i = 0; i < digests.size(); ++i) {
    if (digests[i].size() == kSha256Digits && std::ranges::all_of(digests[i], is_hex)) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("SaveOptions::sha256 returned \"{}\" for \"{}\" [{}, +{}); return {} "
                            "hexadecimal digits",
                            digests[i], file.path, file.ranges[i].begin_bytes,
                            file.ranges[i].size_bytes, kSha256Digits));
  }
  return digests;
}

constexpr const char* kIndexFile = "model.safetensors.index.json";

void check_options(const SaveOptions& options) {
  if (!is_utf8(options.application))
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("save: the application's text of {} bytes is not UTF-8",
                            options.application.size()));
  for (const auto& [name, value] : options.hyperparameters) {
    if (!is_utf8(name))
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("save: the name \"{}\" in SaveOptions::hyperparameters is not UTF-8",
                              valid_utf8(name)));
  }
}

void check_names(const std::map<std::string, std::string>& files, const CheckpointPlan& plan) {
  for (const auto& [name, text] : files) {
    const bool is_plain = !name.empty() && name[0] != '.' &&
                          name.find_first_of(std::string_view("/\0", 2)) == std::string::npos;
    const bool is_taken = name == kManifestName || name == kIndexFile ||
                          std::ranges::count(plan.files, name, &CheckpointPlan::File::name) != 0;
    if (!is_plain || is_taken)
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("SaveOptions::files has the name \"{}\", which {}", name,
                              is_taken ? "the checkpoint uses itself"
                                       : "is no name of a file in a checkpoint's folder: leave out "
                                         "'/', and do not begin with '.'"));
  }
}

}  // namespace

std::map<std::string, double> hyperparameters_of(const Config::Optimizer& optimizer) {
  return {{"beta1", optimizer.adam.beta1},     {"beta2", optimizer.adam.beta2},
          {"epsilon", optimizer.adam.epsilon}, {"weight_decay", optimizer.adam.weight_decay},
          {"momentum", optimizer.momentum},    {"clip_norm", optimizer.clip_norm}};
}

CheckpointWriter::CheckpointWriter(const Layout& layout, StateDescription description,
                                   std::uint32_t thread_count, Ranks& ranks)
    : layout_(layout),
      description_(std::move(description)),
      has_local_(ranks.are_several() && std::ranges::any_of(layout.units(), &UnitPlace::is_local)),
      room_(save_room(layout)),
      ranks_(ranks),
      open_files_(thread_count) {
  std::map<std::string, std::uint32_t> places;
  for (const StateDescription::Tensor& tensor : description_.tensors)
    places.emplace(tensor.name, static_cast<std::uint32_t>(places.size()));
  for (const TensorPlace& tensor : layout.tensors()) described_.push_back(places.at(tensor.name));
}

SavedCheckpoint CheckpointWriter::save(const std::string& root, const StatePosition& position,
                                       const SaveOptions& options, const VisitBlocks& visit_blocks,
                                       std::vector<std::string> application) {
  begin(root, position, options);
  ranks_.together_for_long(kCheckpointSubject, [&] {
    if (!writes_blocks()) return;
    std::vector<AlignedBuffer> rooms(open_files_.size());
    visit_blocks([&](const BlockView& view, std::uint32_t place) {
      AlignedBuffer& room = rooms[place];
      if (room.size_bytes() == 0) room = AlignedBuffer(room_bytes(), "writing a checkpoint");
      write(view, place, {room.data(), room_bytes()});
    });
    sync();
  });
  return finish(std::nullopt, std::move(application));
}

// Rank 0 makes the files; all ranks learn where.
void CheckpointWriter::begin(const std::string& root, const StatePosition& position,
                             const SaveOptions& options) {
  ranks_.together(kCheckpointSubject, [&] { check_options(options); });
  position_ = position;
  if (has_local_) position_.tensor_updates = updates_of_all_ranks(position.tensor_updates, ranks_);
  options_ = options;
  plan_ = plan_checkpoint(description_, layout_.format(), options.file_bytes_max);
  std::string folder;
  ranks_.together(kCheckpointSubject, [&] {
    if (ranks_.rank() != 0) return;
    check_names(options.files, plan_);
    fresh_.emplace(root);
    for (const CheckpointPlan::File& file : plan_.files)
      fresh_->create(file.name, file.beginning, file.size_bytes);
    folder = fresh_->folder();
  });
  folder_ = ranks_.share(folder, kCheckpointSubject);
}

// Block by block, so that each is fetched once.
void CheckpointWriter::write(const BlockView& view, std::uint32_t thread,
                             std::span<std::byte> room) {
  if (!writes_shared_blocks() && !layout_.unit(layout_.block(view.block).unit).is_local) return;
  const std::vector<Written> added = write_block(view, open_files_[thread], room);
  const std::scoped_lock lock(mutex_);
  written_.insert(written_.end(), added.begin(), added.end());
}

void CheckpointWriter::sync() {
  for (OpenFiles& files : open_files_) {
    for (OpenFiles::Open& open : files.files) open.file.sync();
    files.files.clear();
  }
}

SavedCheckpoint CheckpointWriter::finish(const std::optional<Error>& failure,
                                         std::vector<std::string> application) {
  ranks_.together(kCheckpointSubject, [&] {
    if (failure) throw *failure;
  });
  std::vector<Written> written;
  for (const auto& bytes : ranks_.gather(std::as_bytes(std::span(written_)), kCheckpointSubject)) {
    const std::size_t before = written.size();
    written.resize(before + bytes.size() / sizeof(Written));
    if (!bytes.empty()) std::memcpy(written.data() + before, bytes.data(), bytes.size());
  }
  std::vector<std::string> own_application;
  for (const auto& bytes :
       ranks_.gather(std::as_bytes(std::span(options_.application)), kCheckpointSubject))
    own_application.emplace_back(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (application.empty()) application = std::move(own_application);
  CheckpointManifest manifest;
  if (fresh_ || options_.sha256) manifest = manifest_of(std::move(written), std::move(application));
  if (options_.sha256) add_sha256(manifest);
  SavedCheckpoint saved{.path = {}, .step = position_.step, .size_bytes = plan_.size_bytes};
  ranks_.together(kCheckpointSubject, [&] {
    if (!fresh_) return;
    fresh_->write(kIndexFile, plan_.index);
    for (const auto& [name, text] : options_.files) fresh_->write(name, text);
    fresh_->write(std::string(kManifestName), manifest_text(manifest));
    saved.path = fresh_->commit(position_.step, options_.keep,
                                [&](const std::string& other) { return kin_of(manifest, other); });
    saved.notes = fresh_->notes();
  });
  saved.path = ranks_.share(saved.path, kCheckpointSubject);
  return saved;
}

// A file is synced before it is closed, since the kernel reports a failed write to those who have
// the file open.
CheckpointFile& CheckpointWriter::open(OpenFiles& files, std::uint32_t index) const {
  std::vector<OpenFiles::Open>& opened = files.files;
  const auto found = std::ranges::find(opened, index, &OpenFiles::Open::index);
  if (found != opened.end()) {
    std::rotate(found, found + 1, opened.end());
    return opened.back().file;
  }
  if (opened.size() == kOpenFiles) {
    opened.front().file.sync();
    opened.erase(opened.begin());
  }
  opened.push_back({.index = index, .file = CheckpointFile(folder_, plan_.files[index].name)});
  return opened.back().file;
}

std::vector<CheckpointWriter::Written> CheckpointWriter::write_block(
    const BlockView& view, OpenFiles& files, std::span<std::byte> room) const {
  std::vector<Written> written;
  const BlockPlace& block = layout_.block(view.block);
  const auto write = [&](std::uint32_t index, const TensorPlace& tensor, std::uint64_t at,
                         std::uint64_t count) {
    const CheckpointPlan::Tensor& place = plan_.tensors[index];
    const std::span<const std::byte> bytes =
        bytes_of(layout_, view, place.part, at - block.offset_elements, count,
                 room.subspan(room_.write_bytes));
    const std::uint64_t first = at - tensor.offset_elements;
    open(files, place.file)
        .write(place.begin_bytes + first * (bytes.size() / count), bytes,
               room.first(room_.write_bytes));
    written.push_back(
        {.stored = index,
         .piece = {.first_element = first, .element_count = count, .sum = checksum128(bytes)}});
  };
  for (const TensorPlace& tensor : layout_.tensors_of(block.unit)) {
    const std::uint64_t begin = std::max(tensor.offset_elements, block.offset_elements);
    const std::uint64_t end = std::min(tensor.offset_elements + tensor.element_count,
                                       block.offset_elements + block.element_count);
    for (std::uint64_t at = begin; at < end; at += kSavedPieceElements) {
      for (const std::uint32_t index : plan_.stored_of[described_[index_of(tensor.id)]])
        write(index, tensor, at, std::min(kSavedPieceElements, end - at));
    }
  }
  return written;
}

CheckpointManifest CheckpointWriter::manifest_of(std::vector<Written> written,
                                                 std::vector<std::string> application) const {
  CheckpointManifest manifest{.position = position_,
                              .state = description_,
                              .hyperparameters = options_.hyperparameters,
                              .application = std::move(application),
                              .files = {},
                              .stored = {}};
  for (const CheckpointPlan::File& file : plan_.files)
    manifest.files.push_back({.name = file.name,
                              .size_bytes = file.size_bytes,
                              .beginning = checksum128(std::as_bytes(std::span(file.beginning))),
                              .beginning_bytes = file.beginning.size()});
  for (const CheckpointPlan::Tensor& tensor : plan_.tensors)
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
  for (std::size_t i = 0; i < plan_.tensors.size(); ++i) {
    std::uint64_t next = 0;
    for (const CheckpointManifest::Piece& piece : manifest.stored[i].pieces) {
      SLUICE_CHECK(piece.first_element == next, "every element is written by one rank");
      next += piece.element_count;
    }
    const std::vector<std::uint64_t>& shape = description_.tensors[plan_.tensors[i].tensor].shape;
    SLUICE_CHECK(
        next == std::accumulate(shape.begin(), shape.end(), std::uint64_t{1}, std::multiplies()),
        "every element is written by one rank");
  }
  return manifest;
}

// The digests of this rank's share of the files, one a line. The ranks take the files in turns.
std::string CheckpointWriter::own_sha256(const CheckpointManifest& manifest) const {
  std::string own;
  for (std::size_t i = ranks_.rank(); i < manifest.files.size(); i += ranks_.count()) {
    FileRanges file{.path = folder_ + "/" + manifest.files[i].name,
                    .ranges = {{.size_bytes = manifest.files[i].size_bytes}}};
    for (const CheckpointManifest::Stored& stored : manifest.stored) {
      if (stored.file != i) continue;
      const CheckpointManifest::Piece last =  // of a tensor without elements there is none
          stored.pieces.empty() ? CheckpointManifest::Piece{} : stored.pieces.back();
      file.ranges.push_back({.begin_bytes = stored.begin_bytes,
                             .size_bytes = (last.first_element + last.element_count) *
                                           safetensors_element_bytes(stored.dtype)});
    }
    for (const std::string& digest : checked_sha256(options_.sha256(file), file))
      own += digest + "\n";
  }
  return own;
}

void CheckpointWriter::add_sha256(CheckpointManifest& manifest) const {
  std::string own;
  ranks_.together_for_long(kCheckpointSubject, [&] { own = own_sha256(manifest); });
  std::vector<std::istringstream> lines;
  for (const auto& bytes : ranks_.gather(std::as_bytes(std::span(own)), kCheckpointSubject))
    lines.emplace_back(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  for (std::size_t i = 0; i < manifest.files.size(); ++i) {
    std::istringstream& line = lines[i % lines.size()];
    line >> manifest.files[i].sha256;
    for (CheckpointManifest::Stored& stored : manifest.stored)
      if (stored.file == i) line >> stored.sha256;
  }
}

}  // namespace sluice
