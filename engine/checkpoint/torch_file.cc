#include "engine/checkpoint/torch_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include <sluice/dtype.h>
#include <sluice/error.h>
#include "base/file_flush.h"

namespace sluice {
namespace {

constexpr std::uint64_t kEndBytes = 22;  // of the archive's last record, without a comment
constexpr std::uint64_t kEndSearchBytes = kEndBytes + 65535;
constexpr std::uint64_t kEntryBytes = 46;
constexpr std::uint64_t kHeaderBytes = 30;
constexpr std::uint32_t kIs64 = 0xffffffff;
constexpr std::uint64_t kPickleBytesMax = 16 << 20;
constexpr std::uint64_t kBigBytes = 3;  // "big"; else "little"
constexpr std::uint64_t kTorchPieceBytes = 1 << 20;

template <class Number>
Number number_at(std::string_view bytes, std::uint64_t at) {
  Number value{};
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

std::uint32_t crc32_of(std::uint32_t crc, std::span<const std::byte> bytes) {
  static const std::array<std::uint32_t, 256> kTable = [] {
    std::array<std::uint32_t, 256> table{};
    for (std::uint32_t i = 0; i < table.size(); ++i) {
      std::uint32_t value = i;
      for (int bit = 0; bit < 8; ++bit)
        value = (value & 1) != 0 ? 0xedb88320u ^ (value >> 1) : value >> 1;
      table[i] = value;
    }
    return table;
  }();
  crc = ~crc;
  for (const std::byte byte : bytes)
    crc = kTable[(crc ^ std::to_integer<std::uint32_t>(byte)) & 0xff] ^ (crc >> 8);
  return ~crc;
}

constexpr std::pair<std::string_view, std::uint64_t> kTorchTypes[] = {
    {"torch.FloatStorage", 4},  {"torch.BFloat16Storage", 2}, {"torch.HalfStorage", 2},
    {"torch.DoubleStorage", 8}, {"torch.LongStorage", 8},     {"torch.IntStorage", 4}};

std::uint64_t element_bytes_of(const std::string& type) {
  for (const auto& [name, bytes] : kTorchTypes)
    if (name == type) return bytes;
  return 0;
}

}  // namespace

TorchFile::TorchFile(const std::string& path, const std::string& key)
    : path_(path), file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  struct stat status {};
  if (!file_ || ::fstat(file_.get(), &status) != 0) {
    const int error = errno;
    throw Error(
        file_error_code(error, ErrorCode::kInput),
        fmt::format("cannot open \"{}\": {}; {}", path, errno_text(error), file_remedy(error)));
  }
  if (!S_ISREG(status.st_mode)) fail("it is not a regular file");
  file_bytes_ = static_cast<std::uint64_t>(status.st_size);
  read_directory();
  const Entry& pickle = entry_ending_with("/data.pkl");
  if (std::ranges::any_of(entries_, [](const auto& each) {
        return each.first.ends_with("/byteorder") && each.second.size_bytes == kBigBytes;
      }))
    fail("it was written on a big-endian machine");
  if (pickle.size_bytes > kPickleBytesMax)
    fail(fmt::format("its pickle has {} B, expected at most {}", pickle.size_bytes,
                     kPickleBytesMax));
  std::string bytes(pickle.size_bytes, '\0');
  read_at(data_begin(pickle), std::as_writable_bytes(std::span(bytes)));
  if (crc32_of(0, std::as_bytes(std::span(bytes))) != pickle.crc32)
    fail("its pickle is damaged: the archive's checksum differs");
  object_ = read_pickle(bytes, path_);
  if (const auto* dictionary = std::get_if<PickleDictionary>(&object_->value)) {
    PickleValue* found = nullptr;
    for (const auto& [name, value] : dictionary->items) {
      const auto* text = std::get_if<std::string>(&name->value);
      if (text != nullptr && *text == key) found = value.get();
    }
    if (found == nullptr) fail(fmt::format("its dictionary has no \"{}\"", key));
    object_ = {object_, found};  // which has all of the pickle's values
  }
  tensor_ = std::get_if<PickleTensor>(&object_->value);
  if (tensor_ != nullptr) find_elements();
}

void TorchFile::fail(const std::string& why) const {
  throw Error(ErrorCode::kInput,
              fmt::format("\"{}\" is no usable file of torch.save(): {}; write it again, such as "
                          "with DeepSpeed's ds_to_universal",
                          path_, why));
}

void TorchFile::read_at(std::uint64_t offset_bytes, std::span<std::byte> bytes) const {
  if (offset_bytes > file_bytes_ || bytes.size() > file_bytes_ - offset_bytes)
    fail(fmt::format("it has {} B, but should reach to {}", file_bytes_,
                     offset_bytes + bytes.size()));
  while (!bytes.empty()) {
    const ssize_t got =
        ::pread(file_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset_bytes));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      const int error = errno;
      throw Error(ErrorCode::kIo, fmt::format("read of \"{}\" failed: {}; {}", path_,
                                              errno_text(error), file_remedy(error)));
    }
    if (got == 0) fail("it has been cut since it was opened");
    bytes = bytes.subspan(static_cast<std::size_t>(got));
    offset_bytes += static_cast<std::uint64_t>(got);
  }
}

// The archive's directory stands at its end; of more than 4 GiB, a record before says where.
void TorchFile::read_directory() {
  const std::uint64_t tail_bytes = std::min(file_bytes_, kEndSearchBytes);
  std::string tail(tail_bytes, '\0');
  read_at(file_bytes_ - tail_bytes, std::as_writable_bytes(std::span(tail)));
  const std::size_t end = tail.rfind("PK\x05\x06");
  if (end == std::string::npos || tail.size() - end < kEndBytes)
    fail("it is no zip archive (files of torch before 1.6 are not read)");
  std::uint64_t count = number_at<std::uint16_t>(tail, end + 10);
  std::uint64_t size_bytes = number_at<std::uint32_t>(tail, end + 12);
  std::uint64_t offset_bytes = number_at<std::uint32_t>(tail, end + 16);
  const std::size_t locator = end >= 20 ? end - 20 : 0;
  if (end >= 20 && std::string_view(tail).substr(locator, 4) == "PK\x06\x07") {
    std::string record(56, '\0');
    read_at(number_at<std::uint64_t>(tail, locator + 8), std::as_writable_bytes(std::span(record)));
    if (!record.starts_with("PK\x06\x06")) fail("its archive's directory is damaged");
    count = number_at<std::uint64_t>(record, 32);
    size_bytes = number_at<std::uint64_t>(record, 40);
    offset_bytes = number_at<std::uint64_t>(record, 48);
  }
  if (size_bytes > kPickleBytesMax) fail("its archive's directory is damaged");
  std::string directory(size_bytes, '\0');
  read_at(offset_bytes, std::as_writable_bytes(std::span(directory)));
  std::string_view rest = directory;
  for (std::uint64_t i = 0; i < count; ++i) {
    if (rest.size() < kEntryBytes || !rest.starts_with("PK\x01\x02"))
      fail("its archive's directory is damaged");
    const std::uint64_t name_bytes = number_at<std::uint16_t>(rest, 28);
    const std::uint64_t extra_bytes = number_at<std::uint16_t>(rest, 30);
    const std::uint64_t all =
        kEntryBytes + name_bytes + extra_bytes + number_at<std::uint16_t>(rest, 32);
    if (rest.size() < all) fail("its archive's directory is damaged");
    add_entry(rest.substr(0, kEntryBytes), rest.substr(kEntryBytes + name_bytes, extra_bytes),
              std::string(rest.substr(kEntryBytes, name_bytes)));
    rest.remove_prefix(all);
  }
}

void TorchFile::add_entry(std::string_view header, std::string_view extra,
                          const std::string& name) {
  std::uint64_t size_bytes = number_at<std::uint32_t>(header, 24);
  std::uint64_t stored_bytes = number_at<std::uint32_t>(header, 20);
  std::uint64_t begin_bytes = number_at<std::uint32_t>(header, 42);
  while (extra.size() >= 4) {
    const std::uint64_t length = number_at<std::uint16_t>(extra, 2);
    if (length > extra.size() - 4) break;
    if (number_at<std::uint16_t>(extra, 0) == 1) {  // numbers of 64 bits, those that need them
      std::string_view numbers = extra.substr(4, length);
      for (std::uint64_t* const value : {&size_bytes, &stored_bytes, &begin_bytes}) {
        if (*value != kIs64 || numbers.size() < 8) continue;
        *value = number_at<std::uint64_t>(numbers, 0);
        numbers.remove_prefix(8);
      }
    }
    extra.remove_prefix(4 + length);
  }
  if (number_at<std::uint16_t>(header, 10) != 0 || size_bytes != stored_bytes)
    fail(fmt::format("its entry \"{}\" is compressed", name));
  entries_[name] = {.header_bytes = begin_bytes,
                    .size_bytes = size_bytes,
                    .crc32 = number_at<std::uint32_t>(header, 16)};
}

std::uint64_t TorchFile::data_begin(const Entry& entry) const {
  std::string header(kHeaderBytes, '\0');
  read_at(entry.header_bytes, std::as_writable_bytes(std::span(header)));
  if (!header.starts_with("PK\x03\x04")) fail("an entry of its archive is damaged");
  return entry.header_bytes + kHeaderBytes + number_at<std::uint16_t>(header, 26) +
         number_at<std::uint16_t>(header, 28);
}

const TorchFile::Entry& TorchFile::entry_ending_with(const std::string& name) const {
  for (const auto& [own, entry] : entries_)
    if (own.ends_with(name)) return entry;
  fail(fmt::format("its archive has no entry \"...{}\"", name));
}

void TorchFile::find_elements() {
  element_bytes_ = element_bytes_of(tensor_->storage.type);
  if (element_bytes_ == 0) fail(fmt::format("its tensor is of {}", tensor_->storage.type));
  std::uint64_t expected = 1;
  if (tensor_->strides.size() != tensor_->shape.size()) fail("its tensor has too few strides");
  for (std::size_t i = tensor_->shape.size(); i-- > 0;) {
    const std::uint64_t extent = tensor_->shape[i];
    if (extent > 1 && tensor_->strides[i] != expected)
      fail("its tensor does not lie in one piece; save tensor.contiguous()");
    if (extent != 0 && expected > (std::uint64_t{1} << 60) / extent) fail("its shape is damaged");
    expected *= extent;
  }
  elements_ = entry_ending_with("/data/" + tensor_->storage.key);
  const std::uint64_t entry_count = elements_.size_bytes / element_bytes_;
  if (tensor_->first_element > entry_count || expected > entry_count - tensor_->first_element)
    fail(fmt::format("its tensor has {} elements from {} on, and the archive {}", expected,
                     tensor_->first_element, entry_count));
  begin_bytes_ = data_begin(elements_) + tensor_->first_element * element_bytes_;
}

bool TorchFile::has_tensor() const {
  return tensor_ != nullptr;
}

const std::vector<std::uint64_t>& TorchFile::shape() const {
  return tensor_->shape;
}

std::uint64_t TorchFile::element_count() const {
  std::uint64_t count = 1;
  for (const std::uint64_t extent : tensor_->shape) count *= extent;
  return count;
}

void TorchFile::check_elements() {
  if (is_checked_) return;
  const std::uint64_t begin = data_begin(elements_);
  std::vector<std::byte> piece;
  std::uint32_t crc = 0;
  for (std::uint64_t at = 0; at < elements_.size_bytes; at += kTorchPieceBytes) {
    piece.resize(std::min(kTorchPieceBytes, elements_.size_bytes - at));
    read_at(begin + at, piece);
    crc = crc32_of(crc, piece);
  }
  if (crc != elements_.crc32)
    throw Error(ErrorCode::kDamaged,
                fmt::format("\"{}\": the checksum of its elements is {:08x}, expected {:08x}; the "
                            "file is damaged, use another checkpoint",
                            path_, crc, elements_.crc32));
  is_checked_ = true;
}

void TorchFile::read_elements(std::uint64_t first_byte, std::span<std::byte> bytes) {
  check_elements();
  read_at(begin_bytes_ + first_byte, bytes);
}

std::uint64_t TorchFile::count() {
  double value = -1;
  if (tensor_ != nullptr && element_count() == 1) {
    std::array<std::byte, 8> bytes{};
    read_elements(0, std::span(bytes).first(element_bytes_));
    const std::string& type = tensor_->storage.type;
    const auto as = [&]<class Number>(Number number) {
      std::memcpy(&number, bytes.data(), sizeof number);
      return static_cast<double>(number);
    };
    if (type == "torch.FloatStorage") value = as(float{});
    if (type == "torch.DoubleStorage") value = as(double{});
    if (type == "torch.LongStorage") value = as(std::int64_t{});
    if (type == "torch.IntStorage") value = as(std::int32_t{});
  } else if (const auto* const whole = std::get_if<std::int64_t>(&object_->value)) {
    value = static_cast<double>(*whole);
  } else if (const auto* const number = std::get_if<double>(&object_->value)) {
    value = *number;
  }
  if (!(value >= 0) || value > 1e15 || value != std::floor(value)) fail("it holds no count");
  return static_cast<std::uint64_t>(value);
}

void TorchFile::read(std::uint64_t first_element, std::span<float> values) {
  if (tensor_ == nullptr) fail("it holds no tensor");
  const std::string& type = tensor_->storage.type;
  if (element_bytes_ > 4 || type == "torch.IntStorage")
    fail(fmt::format("its tensor is of {}, expected float, half or bfloat16", type));
  if (first_element > element_count() || values.size() > element_count() - first_element)
    fail(fmt::format("{} elements from {} on reach beyond its {}", values.size(), first_element,
                     element_count()));
  if (type == "torch.FloatStorage")
    return read_elements(first_element * sizeof(float), std::as_writable_bytes(values));
  std::vector<std::uint16_t> halves(values.size());
  read_elements(first_element * sizeof(std::uint16_t), std::as_writable_bytes(std::span(halves)));
  const bool is_bf16 = type == "torch.BFloat16Storage";
  for (std::size_t i = 0; i < values.size(); ++i)
    values[i] = is_bf16 ? float_from_bf16(halves[i]) : float_from_fp16(halves[i]);
}

}  // namespace sluice
