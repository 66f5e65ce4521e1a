#include "engine/checkpoint/checkpoint_source.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <set>
#include <utility>

#include <fmt/format.h>

#include <sluice/dtype.h>
#include <sluice/error.h>
#include <sluice/units.h>
#include "base/file_flush.h"
#include "base/optimizer_math.h"
#include "base/text_file.h"
#include "engine/checkpoint/resolved_folder.h"
#include "engine/checkpoint/same_state.h"
#include "engine/checkpoint/universal_source.h"

namespace sluice {
namespace {

constexpr std::uint64_t kManifestBytesMax = 1_GiB;  // far more than any has

std::string text_of_file(const std::string& path) {
  std::string why;
  int error = 0;
  std::error_code unknown;
  if (std::filesystem::is_fifo(path, unknown))  // whose reader would wait for a writer
    throw Error(ErrorCode::kInput,
                fmt::format("checkpoint: \"{}\" is a pipe, and no file; remove it", path));
  if (auto text = read_text_file(path, kManifestBytesMax, why, &error)) return *std::move(text);
  // The process, the drive or the server has failed, whatever the checkpoint holds.
  if (const ErrorCode code = file_error_code(error, ErrorCode::kInput); code != ErrorCode::kInput)
    throw Error(code, fmt::format("checkpoint: \"{}\" cannot be read: {}; {}", path, why,
                                  file_remedy(error)));
  throw Error(ErrorCode::kInput,
              fmt::format("checkpoint: \"{}\" cannot be read: {}; a checkpoint is a folder with "
                          "this file in it, such as \"latest\" below the root of all",
                          path, why));
}

std::uint64_t element_count(const StateDescription::Tensor& tensor) {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : tensor.shape) count *= extent;
  return count;
}

void floats_from(std::string_view dtype, const std::byte* bytes, std::span<float> values) {
  if (dtype == "F32") {
    std::memcpy(values.data(), bytes, values.size_bytes());
    return;
  }
  const auto convert = [&](auto float_from) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      std::uint16_t half = 0;
      std::memcpy(&half, bytes + i * sizeof half, sizeof half);
      values[i] = float_from(half);
    }
  };
  if (dtype == "BF16")
    convert([](std::uint16_t half) { return float_from_bf16(half); });
  else
    convert([](std::uint16_t half) { return float_from_fp16(half); });
}

// `highs` are bf16 values; the lower halves of the masters lie in `lows`, which may have any
// alignment.
void join_low(std::span<float> highs, const std::byte* __restrict lows) {
  float* __restrict masters = highs.data();
  for (std::size_t i = 0; i < highs.size(); ++i) {
    SplitMaster split{.high = static_cast<std::uint16_t>(bits_from_float(masters[i]) >> 16),
                      .low = 0};
    std::memcpy(&split.low, lows + i * sizeof split.low, sizeof split.low);
    masters[i] = join_master(split);
  }
}

}  // namespace

CheckpointManifest read_manifest(const std::string& folder) {
  const std::string path = fmt::format("{}/{}", folder, kManifestName);
  return parse_manifest(text_of_file(path), path);
}

CheckpointSource::CheckpointSource(const std::string& folder, CheckpointPrecision precision)
    : folder_(resolved_folder(folder)), precision_(precision), manifest_(read_manifest(folder_)) {
  for (const CheckpointManifest::Stored& stored : manifest_.stored)
    places_[{stored.tensor, stored.part}] = &stored;
  check_places();
  open_files();
}

CheckpointSource::~CheckpointSource() = default;

// Checks that the manifest's model and its stored tensors fit together.
void CheckpointSource::check_places() const {
  const std::string path = path_of(std::string(kManifestName));
  for (const StateDescription::Tensor& tensor : manifest_.state.tensors) {
    const auto require = [&](CheckpointPart part, std::string_view dtype) {
      const CheckpointManifest::Stored* const stored = find(tensor.name, part);
      if (stored == nullptr)
        throw Error(ErrorCode::kInput,
                    fmt::format("\"{}\": field \"tensors\" has no {} of \"{}\"; {}", path,
                                name_of(part), tensor.name, kCheckpointRemedy));
      std::uint64_t count = 0;
      for (const CheckpointManifest::Piece& piece : stored->pieces) count += piece.element_count;
      if (count != element_count(tensor))
        throw Error(ErrorCode::kInput,
                    fmt::format("\"{}\": field \"tensors\" has {} elements for the {} of \"{}\", "
                                "expected {}; {}",
                                path, count, name_of(part), tensor.name, element_count(tensor),
                                kCheckpointRemedy));
      if (!dtype.empty() && stored->dtype != dtype)
        throw Error(
            ErrorCode::kInput,
            fmt::format("\"{}\": field \"tensors\" has dtype \"{}\" for the {} of \"{}\", "
                        "expected \"{}\"; {}",
                        path, stored->dtype, name_of(part), tensor.name, dtype, kCheckpointRemedy));
    };
    require(CheckpointPart::kWeight, "");
    if (tensor.is_opaque) check_words(tensor.name);
    if (tensor.is_frozen) continue;
    if (manifest_.state.parameter == DType::kBf16) require(CheckpointPart::kMasterLow, "I16");
    if (manifest_.state.parameter == DType::kFp16) require(CheckpointPart::kMaster, "F32");
    for (const CheckpointPart moment : {CheckpointPart::kExpAvg, CheckpointPart::kExpAvgSq})
      if (find(tensor.name, moment) != nullptr) require(moment, "F32");
  }
}

// Words are read as they are, so a stored word must be as large as one of the state.
void CheckpointSource::check_words(const std::string& tensor) const {
  const std::string& dtype = find(tensor, CheckpointPart::kWeight)->dtype;
  const std::uint64_t stored_bytes = safetensors_element_bytes(dtype);
  const std::uint64_t word_bytes = size_of(manifest_.state.parameter);
  if (stored_bytes == word_bytes) return;
  throw Error(ErrorCode::kInput,
              fmt::format("\"{}\": field \"tensors\" has dtype \"{}\" of {} bytes for the weight "
                          "of \"{}\", which is opaque and has words of {} bytes; {}",
                          path_of(std::string(kManifestName)), dtype, stored_bytes, tensor,
                          word_bytes, kCheckpointRemedy));
}

void CheckpointSource::open_files() {
  for (const CheckpointManifest::File& file : manifest_.files) {
    const std::string path = path_of(file.name);
    try {
      files_.push_back(std::make_unique<SafetensorsFile>(path));
    } catch (const Error& error) {
      throw Error(error.code(), fmt::format("{}; {}", error.what(), kCheckpointRemedy));
    }
    if (const std::uint64_t found = files_.back()->file_bytes(); found != file.size_bytes)
      throw Error(ErrorCode::kDamaged,
                  fmt::format("\"{}\" has {} bytes, expected {} (sluice_state.json): it was "
                              "truncated, or belongs to another checkpoint; {}",
                              path, found, file.size_bytes, kCheckpointRemedy));
    const Checksum128 found = files_.back()->beginning_sum();
    if (found != file.beginning)
      throw Error(ErrorCode::kDamaged,
                  fmt::format("\"{}\": the checksum of its header is {}, expected {} "
                              "(sluice_state.json): it is damaged, or another checkpoint's; {}",
                              path, hex_of(found), hex_of(file.beginning), kCheckpointRemedy));
  }
  for (const CheckpointManifest::Stored& stored : manifest_.stored) {
    std::uint64_t count = 0;
    for (const CheckpointManifest::Piece& piece : stored.pieces) count += piece.element_count;
    const std::uint64_t end = stored.begin_bytes + count * safetensors_element_bytes(stored.dtype);
    if (end < stored.begin_bytes || end > manifest_.files[stored.file].size_bytes)
      throw Error(ErrorCode::kInput,
                  fmt::format("\"{}\": field \"tensors\" has the {} of \"{}\" end at byte {} of "
                              "\"{}\", which has {}; {}",
                              path_of(std::string(kManifestName)), name_of(stored.part),
                              stored.tensor, end, manifest_.files[stored.file].name,
                              manifest_.files[stored.file].size_bytes, kCheckpointRemedy));
  }
}

const CheckpointManifest::Stored* CheckpointSource::find(const std::string& tensor,
                                                         CheckpointPart part) const {
  const auto found = places_.find({tensor, part});
  return found == places_.end() ? nullptr : found->second;
}

bool CheckpointSource::was_frozen(const std::string& tensor) const {
  return std::ranges::any_of(manifest_.state.tensors, [&](const StateDescription::Tensor& own) {
    return own.name == tensor && own.is_frozen;
  });
}

void CheckpointSource::prepare(const StateDescription& wanted) {
  require_same_state(manifest_.state, wanted, precision_,
                     fmt::format("\"{}\"", path_of(std::string(kManifestName))));
  restart_unfrozen(manifest_.state, wanted, manifest_.position);
}

CheckpointSource::Checked CheckpointSource::load(const CheckpointManifest::Stored& stored,
                                                 std::size_t piece) {
  return pieces_.get({&stored, piece}, [&](AlignedBuffer& buffer) {
    const CheckpointManifest::Piece& range = stored.pieces[piece];
    const std::uint64_t element_bytes = safetensors_element_bytes(stored.dtype);
    const std::uint64_t begin = stored.begin_bytes + range.first_element * element_bytes;
    const SafetensorsFile& file = *files_[stored.file];
    const std::span<const std::byte> bytes =
        file.read_direct(begin, range.element_count * element_bytes, buffer);
    if (const Checksum128 found = checksum128(bytes); found != range.sum)
      throw Error(
          ErrorCode::kDamaged,
          fmt::format("\"{}\" [{}, +{}), the {} of \"{}\" from element {} on: the checksum "
                      "is {}, expected {}: the checkpoint is damaged; {}",
                      file.path(), begin, bytes.size(), name_of(stored.part), stored.tensor,
                      range.first_element, hex_of(found), hex_of(range.sum), kCheckpointRemedy));
    return bytes;
  });
}

template <class Take>
void CheckpointSource::read_part(const CheckpointManifest::Stored& stored,
                                 std::uint64_t first_element, std::uint64_t count,
                                 const Take& take) {
  const std::uint64_t element_bytes = safetensors_element_bytes(stored.dtype);
  auto piece = std::ranges::upper_bound(stored.pieces, first_element, {},
                                        &CheckpointManifest::Piece::first_element) -
               1;
  for (std::uint64_t at = first_element; at < first_element + count; ++piece) {
    const std::uint64_t end =
        std::min(first_element + count, piece->first_element + piece->element_count);
    const Checked checked = load(stored, static_cast<std::size_t>(piece - stored.pieces.begin()));
    take(checked->data() + (at - piece->first_element) * element_bytes, at - first_element,
         end - at);
    at = end;
  }
}

void CheckpointSource::read_masters(const std::string& tensor, std::uint64_t first_element,
                                    std::span<float> values) {
  const auto convert = [&](const CheckpointManifest::Stored& stored) {
    read_part(stored, first_element, values.size(),
              [&](const std::byte* bytes, std::uint64_t first, std::uint64_t count) {
                floats_from(stored.dtype, bytes, values.subspan(first, count));
              });
  };
  if (const auto* const master = find(tensor, CheckpointPart::kMaster)) return convert(*master);
  convert(*find(tensor, CheckpointPart::kWeight));
  const auto* const low = find(tensor, CheckpointPart::kMasterLow);
  if (low == nullptr) return;  // fp32, or frozen
  read_part(*low, first_element, values.size(),
            [&](const std::byte* bytes, std::uint64_t first, std::uint64_t count) {
              join_low(values.subspan(first, count), bytes);
            });
}

void CheckpointSource::read_words(const std::string& tensor, std::uint64_t first_element,
                                  std::span<float> values) {
  const CheckpointManifest::Stored& stored = *find(tensor, CheckpointPart::kWeight);
  const std::uint64_t word_bytes = safetensors_element_bytes(stored.dtype);
  read_part(stored, first_element, values.size(),
            [&](const std::byte* bytes, std::uint64_t first, std::uint64_t count) {
              for (std::uint64_t i = 0; i < count; ++i) {
                std::uint32_t word = 0;
                std::memcpy(&word, bytes + i * word_bytes, word_bytes);
                values[first + i] = float_of_word(word, word_bytes);
              }
            });
}

void CheckpointSource::read(const TensorPlace& tensor, StateKind kind, std::uint64_t first_element,
                            std::span<float> values) {
  if (tensor.is_opaque) return read_words(tensor.name, first_element, values);
  if (kind == StateKind::kMaster) return read_masters(tensor.name, first_element, values);
  const auto part =
      kind == StateKind::kExpAvg ? CheckpointPart::kExpAvg : CheckpointPart::kExpAvgSq;
  const CheckpointManifest::Stored* const stored = find(tensor.name, part);
  if (stored == nullptr) {
    if (!was_frozen(tensor.name))
      throw Error(ErrorCode::kInput,
                  fmt::format("\"{}\": field \"tensors\" has no {} of \"{}\"",
                              path_of(std::string(kManifestName)), name_of(part), tensor.name));
    std::ranges::fill(values, 0.0f);
    return;
  }
  read_part(*stored, first_element, values.size(),
            [&](const std::byte* bytes, std::uint64_t first, std::uint64_t count) {
              std::memcpy(values.data() + first, bytes, count * sizeof(float));
            });
}

OpenCheckpoint open_checkpoint(const std::string& given_folder, CheckpointPrecision precision) {
  const std::string folder = resolved_folder(given_folder);
  std::error_code error;
  if (!std::filesystem::exists(folder + "/" + std::string(kManifestName), error)) {
    if (const auto parameters = universal_parameters(folder))
      return {.source = std::make_unique<UniversalSource>(*parameters), .application = {}};
  }
  auto source = std::make_unique<CheckpointSource>(folder, precision);
  std::vector<std::string> application = source->manifest().application;
  return {.source = std::move(source), .application = std::move(application)};
}

void CheckpointSource::verify() {
  for (const CheckpointManifest::Stored& stored : manifest_.stored) {
    for (std::size_t piece = 0; piece < stored.pieces.size(); ++piece) (void)load(stored, piece);
  }
}

}  // namespace sluice
