#include "engine/checkpoint/safetensors_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "base/file_flush.h"

namespace sluice {
namespace {

constexpr std::uint64_t kLengthBytes = 8;
// The format's own limit, which keeps a damaged length from asking for any amount of memory.
constexpr std::uint64_t kHeaderBytesMax = 100'000'000;
// Shorter reads use the page cache, whose readahead serves their neighbours.
constexpr std::uint64_t kDirectBytesMin = 64_KiB;

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path) : path_(path) {
  open_file();
  parse_header();
}

void SafetensorsFile::fail(const std::string& why) const {
  throw Error(ErrorCode::kInput,
              fmt::format("\"{}\" is not a usable safetensors file: {}", path_, why));
}

void SafetensorsFile::open_file() {
  // O_NONBLOCK: opening a pipe without a writer would wait forever.
  file_ = UniqueFd(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!file_ || ::fstat(file_.get(), &status) != 0) {
    const int error = errno;
    throw Error(file_error_code(error, ErrorCode::kInput),
                fmt::format("cannot open the model file \"{}\": {}; {}{}", path_, errno_text(error),
                            file_remedy(error),
                            error == EMFILE ? ", or save into larger files (--shard-size)" : ""));
  }
  if (!S_ISREG(status.st_mode)) fail("it is not a regular file");
  file_bytes_ = static_cast<std::uint64_t>(status.st_size);
  // The same file, whatever has the path by now.
  direct_ = UniqueFd(::open(fmt::format("/proc/self/fd/{}", file_.get()).c_str(),
                            O_RDONLY | O_DIRECT | O_CLOEXEC));
}

void SafetensorsFile::read_at(std::uint64_t offset_bytes, std::span<std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t got =
        ::pread(file_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset_bytes));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      const int error = errno;
      throw Error(ErrorCode::kIo,
                  fmt::format("read of \"{}\" [{}, +{}) failed: {}; {}", path_, offset_bytes,
                              bytes.size(), errno_text(error), file_remedy(error)));
    }
    if (got == 0)
      fail(fmt::format("it ends at byte {}, but had {} bytes when it was opened", offset_bytes,
                       file_bytes_));
    bytes = bytes.subspan(static_cast<std::size_t>(got));
    offset_bytes += static_cast<std::uint64_t>(got);
  }
}

std::span<const std::byte> SafetensorsFile::read_direct(std::uint64_t offset_bytes,
                                                        std::uint64_t size_bytes,
                                                        AlignedBuffer& buffer) const {
  const std::uint64_t begin = offset_bytes / kPageBytes * kPageBytes;
  const std::uint64_t end = align_up(offset_bytes + size_bytes, kPageBytes);
  if (buffer.size_bytes() < end - begin)
    buffer = AlignedBuffer(end - begin, "a piece of a checkpoint");
  const auto bytes = buffer.span().subspan(offset_bytes - begin, size_bytes);
  const std::uint64_t wanted = offset_bytes + size_bytes - begin;
  std::uint64_t done = 0;
  while (direct_ && size_bytes >= kDirectBytesMin && done < wanted) {
    const ssize_t got = ::pread(direct_.get(), buffer.data() + done, end - begin - done,
                                static_cast<off_t>(begin + done));
    if (got < 0 && errno == EINTR) continue;
    // The rest is left to read_at(), which says why it cannot be read.
    if (got <= 0) break;
    done += static_cast<std::uint64_t>(got);
    if (done % kPageBytes != 0) break;
  }
  if (done < wanted) {
    const std::uint64_t missing = std::max(begin + done, offset_bytes) - offset_bytes;
    read_at(offset_bytes + missing, bytes.subspan(missing));
  }
  return bytes;
}

void SafetensorsFile::parse_header() {
  std::array<std::byte, kLengthBytes> prefix{};
  if (file_bytes_ < prefix.size())
    fail(fmt::format("it has {} bytes, fewer than the {} of the header's length", file_bytes_,
                     prefix.size()));
  read_at(0, prefix);
  std::uint64_t length = 0;
  for (std::size_t i = 0; i < prefix.size(); ++i)
    length |= std::to_integer<std::uint64_t>(prefix[i]) << (8 * i);
  if (length > std::min(file_bytes_ - prefix.size(), kHeaderBytesMax))
    fail(fmt::format("its header claims {} bytes; the file has {}, and a header at most {}", length,
                     file_bytes_, kHeaderBytesMax));
  std::string beginning(prefix.size() + length, '\0');
  read_at(0, std::as_writable_bytes(std::span(beginning)));
  beginning_sum_ = checksum128(std::as_bytes(std::span(beginning)));
  SafetensorsHeader header;
  try {
    header = parse_safetensors_header(std::string_view(beginning).substr(prefix.size()));
  } catch (const Error& error) {
    fail(error.what());
  }
  metadata_ = std::move(header.metadata);
  for (const auto& [name, tensor] : header.tensors) add_entry(name, tensor, prefix.size() + length);
}

void SafetensorsFile::add_entry(const std::string& name, const HeaderTensor& tensor,
                                std::uint64_t data_begin) {
  const auto& [dtype, shape, begin, end] = tensor;
  const std::uint64_t data_bytes = file_bytes_ - data_begin;
  if (begin > end || end > data_bytes)
    fail(fmt::format("tensor \"{}\" lies at [{}, {}) of {} data bytes; the file is cut or damaged",
                     name, begin, end, data_bytes));
  // Divides instead of multiplying, because a damaged shape may have any product. Tensors of other
  // types are checked where they are used.
  const std::uint64_t element_bytes = safetensors_element_bytes(dtype);
  const bool is_empty = std::ranges::count(shape, 0u) != 0;
  std::uint64_t rest = element_bytes == 0 ? 1 : (end - begin) / element_bytes;
  bool fits = element_bytes == 0 || (end - begin) % element_bytes == 0;
  for (const std::uint64_t extent : shape) {
    if (element_bytes == 0 || is_empty) break;
    fits = fits && rest % extent == 0;
    if (fits) rest /= extent;
  }
  if (!fits || rest != (is_empty && element_bytes != 0 ? 0 : 1))
    fail(fmt::format("tensor \"{}\" of shape [{}] cannot have {} bytes", name,
                     fmt::join(shape, ", "), end - begin));
  entries_.emplace(name, Entry{.dtype = dtype,
                               .shape = shape,
                               .offset_bytes = data_begin + begin,
                               .size_bytes = end - begin});
}

const SafetensorsFile::Entry* SafetensorsFile::find(const std::string& name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : &found->second;
}

bool SafetensorsFile::has(const std::string& name) const {
  const Entry* const found = find(name);
  return found != nullptr && found->dtype == "F32";
}

const SafetensorsFile::Entry& SafetensorsFile::fp32_entry(const std::string& name) const {
  const Entry* const found = find(name);
  if (found == nullptr || found->dtype != "F32")
    throw Error(
        ErrorCode::kInput,
        fmt::format("\"{}\" has no F32 tensor \"{}\"{}", path_, name,
                    found == nullptr
                        ? ""
                        : fmt::format("; it has one of type {}, so save the model in float32",
                                      found->dtype)));
  return *found;
}

const std::vector<std::uint64_t>& SafetensorsFile::shape(const std::string& name) const {
  return fp32_entry(name).shape;
}

void SafetensorsFile::read_bytes(const Entry& entry, std::uint64_t first_byte,
                                 std::span<std::byte> bytes) const {
  SLUICE_CHECK(first_byte + bytes.size() <= entry.size_bytes, "a read stays inside its tensor");
  read_at(entry.offset_bytes + first_byte, bytes);
}

void SafetensorsFile::read(const std::string& name, std::uint64_t first_element,
                           std::span<float> values) const {
  read_bytes(fp32_entry(name), first_element * sizeof(float), std::as_writable_bytes(values));
}

}  // namespace sluice
