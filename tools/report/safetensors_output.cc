#include "tools/report/safetensors_output.h"

#include <algorithm>

#include "engine/checkpoint/safetensors_header.h"

namespace sluice {
namespace {

constexpr std::uint64_t kPieceElements = 256 << 10;

template <class Sink>
void for_each_piece(std::span<const SavedTensor> tensors, const TensorSource& source,
                    const Sink& sink) {
  std::vector<float> piece(kPieceElements);
  for (std::size_t index = 0; index < tensors.size(); ++index) {
    const std::uint64_t count = tensors[index].element_count();
    for (std::uint64_t first = 0; first < count; first += kPieceElements) {
      const auto values = std::span(piece).first(std::min(kPieceElements, count - first));
      source(index, first, values);
      sink(values);
    }
  }
}

}  // namespace

std::uint64_t SavedTensor::element_count() const {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : shape) count *= extent;
  return count;
}

void write_safetensors(OutputFile& file, std::span<const SavedTensor> tensors,
                       const std::map<std::string, std::string>& metadata,
                       const TensorSource& source) {
  std::vector<SafetensorsEntry> entries;
  for (const SavedTensor& tensor : tensors)
    entries.push_back({.name = tensor.name, .dtype = "F32", .shape = tensor.shape});
  file.write(safetensors_beginning(entries, metadata));
  for_each_piece(tensors, source, [&](std::span<const float> values) {
    file.write({reinterpret_cast<const char*>(values.data()), values.size_bytes()});
  });
}

void read_as_if_written(std::span<const SavedTensor> tensors, const TensorSource& source) {
  for_each_piece(tensors, source, [](std::span<const float>) {});
}

}  // namespace sluice
