#include "tools/report/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>
#include "base/unique_fd.h"

namespace sluice {
namespace {

constexpr std::uint64_t kPieceElements = 256 << 10;
constexpr std::uint64_t kLengthBytes = 8;
// The format's own limit, which keeps a damaged length from asking for any amount of memory.
constexpr std::uint64_t kHeaderBytesMax = 100'000'000;

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
  nlohmann::ordered_json header;
  header["__metadata__"] = metadata;
  std::uint64_t offset = 0;
  for (const SavedTensor& tensor : tensors) {
    const std::uint64_t end = offset + tensor.element_count() * sizeof(float);
    header[tensor.name] = {
        {"dtype", "F32"}, {"shape", tensor.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // data starts at a multiple of 8
  std::array<unsigned char, kLengthBytes> length{};
  for (std::size_t i = 0; i < length.size(); ++i)
    length[i] = static_cast<unsigned char>(text.size() >> (8 * i));
  file.write({reinterpret_cast<const char*>(length.data()), length.size()});
  file.write(text);
  for_each_piece(tensors, source, [&](std::span<const float> values) {
    file.write({reinterpret_cast<const char*>(values.data()), values.size_bytes()});
  });
  file.commit();
}

void read_as_if_written(std::span<const SavedTensor> tensors, const TensorSource& source) {
  for_each_piece(tensors, source, [](std::span<const float>) {});
}

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  open_file();
  parse_header();
}

void SafetensorsFile::fail(const std::string& why) const {
  throw Error(ErrorCode::kInput,
              fmt::format("\"{}\" is no usable safetensors file: {}", path_, why));
}

void SafetensorsFile::open_file() {
  // O_NONBLOCK: opening a pipe that nobody writes to would wait forever.
  file_ = UniqueFd(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file_ || ::fstat(file_.get(), &status) != 0)
    throw Error(ErrorCode::kInput,
                fmt::format("cannot open the model file \"{}\": {}", path_, errno_text(errno)));
  if (!S_ISREG(status.st_mode)) fail("it is not a regular file");
  file_bytes_ = static_cast<std::uint64_t>(status.st_size);
}

void SafetensorsFile::read_bytes(std::uint64_t offset_bytes, std::span<std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t got =
        ::pread(file_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset_bytes));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0)
      throw Error(ErrorCode::kIo, fmt::format("read of \"{}\" [{}, +{}) failed: {}", path_,
                                              offset_bytes, bytes.size(), errno_text(errno)));
    if (got == 0)
      fail(fmt::format("it ends at byte {}, but had {} bytes when it was opened", offset_bytes,
                       file_bytes_));
    bytes = bytes.subspan(static_cast<std::size_t>(got));
    offset_bytes += static_cast<std::uint64_t>(got);
  }
}

void SafetensorsFile::parse_header() {
  std::array<std::byte, kLengthBytes> prefix{};
  if (file_bytes_ < prefix.size())
    fail(fmt::format("it has {} bytes, fewer than the {} of the header's length", file_bytes_,
                     prefix.size()));
  read_bytes(0, prefix);
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < prefix.size(); ++i)
    length |= std::to_integer<std::uint64_t>(prefix[i]) << (8 * i);
  if (length > std::min(file_bytes_ - prefix.size(), kHeaderBytesMax))
    fail(fmt::format("its header claims {} bytes; the file has {}, and a header at most {}", length,
                     file_bytes_, kHeaderBytesMax));
  std::string text(length, '\0');
  read_bytes(prefix.size(), std::as_writable_bytes(std::span(text)));
  SafetensorsHeader header;
  try {
    header = parse_safetensors_header(text);
  } catch (const Error& error) {
    fail(error.what());
  }
  metadata_ = std::move(header.metadata);
  for (const auto& [name, tensor] : header.tensors) {
    if (tensor.dtype == "F32")
      add_entry(name, tensor, prefix.size() + length);
    else
      other_types_[name] = tensor.dtype;  // such as the masks of published checkpoints
  }
}

void SafetensorsFile::add_entry(const std::string& name, const HeaderTensor& tensor,
                                std::uint64_t data_begin) {
  const auto& [dtype, shape, begin, end] = tensor;
  const std::uint64_t data_bytes = file_bytes_ - data_begin;
  if (begin > end || end > data_bytes)
    fail(fmt::format("tensor \"{}\" lies at [{}, {}) of {} data bytes; the file is cut or damaged",
                     name, begin, end, data_bytes));
  // Divided down instead of multiplied up: a damaged shape may have any product.
  std::uint64_t rest = (end - begin) / sizeof(float);
  bool fits = (end - begin) % sizeof(float) == 0;
  for (const std::uint64_t extent : shape) {
    fits = fits && extent != 0 && rest % extent == 0;
    if (fits) rest /= extent;
  }
  if (!fits || rest != 1)
    fail(fmt::format("tensor \"{}\" of shape [{}] cannot have {} bytes", name,
                     fmt::join(shape, ", "), end - begin));
  entries_.emplace(
      name, Entry{.shape = shape, .offset_bytes = data_begin + begin, .size_bytes = end - begin});
}

std::string SafetensorsFile::why_not(const std::string& name) const {
  const auto other = other_types_.find(name);
  if (other == other_types_.end()) return {};
  return fmt::format("; it has one of type {}, so save the model in float32", other->second);
}

const SafetensorsFile::Entry& SafetensorsFile::entry(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end())
    throw Error(ErrorCode::kInput,
                fmt::format("\"{}\" has no F32 tensor \"{}\"{}", path_, name, why_not(name)));
  return found->second;
}

const std::vector<std::uint64_t>& SafetensorsFile::shape(const std::string& name) const {
  return entry(name).shape;
}

void SafetensorsFile::read(const std::string& name, std::uint64_t first_element,
                           std::span<float> values) const {
  const Entry& found = entry(name);
  SLUICE_CHECK(first_element * sizeof(float) + values.size_bytes() <= found.size_bytes,
               "a read stays inside its tensor");
  read_bytes(found.offset_bytes + first_element * sizeof(float), std::as_writable_bytes(values));
}

}  // namespace sluice
