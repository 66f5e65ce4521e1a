#include "tools/report/event_file.h"

#include <unistd.h>

#include <array>
#include <bit>

#include <fmt/format.h>

namespace sluice {
namespace {

// Castagnoli's polynomial, reflected.
constexpr std::uint32_t kCrc32cPolynomial = 0x82F63B78;
constexpr std::uint32_t kCrcMaskDelta = 0xA282EAD8;

// Fields of the messages, by their numbers in event.proto, summary.proto and tensor.proto.
enum class EventField : std::uint32_t { kWallTime = 1, kStep = 2, kFileVersion = 3, kSummary = 5 };
constexpr std::uint32_t kSummaryValue = 1;
enum class ValueField : std::uint32_t { kTag = 1, kSimple = 2, kTensor = 8, kMetadata = 9 };
constexpr std::uint32_t kMetadataPlugin = 1, kPluginName = 1;
constexpr std::uint32_t kTensorType = 1, kTensorString = 8;
constexpr std::uint64_t kTypeString = 7;  // DT_STRING

// The ways in which protobuf writes a field.
enum class WireType : std::uint32_t { kVarint = 0, kFixed64 = 1, kBytes = 2, kFixed32 = 5 };

std::uint32_t crc32c(std::string_view bytes) {
  static const std::array<std::uint32_t, 256> table = [] {
    std::array<std::uint32_t, 256> sums{};
    for (std::uint32_t byte = 0; byte < sums.size(); ++byte) {
      std::uint32_t sum = byte;
      for (int bit = 0; bit < 8; ++bit) sum = (sum >> 1) ^ ((sum & 1) != 0 ? kCrc32cPolynomial : 0);
      sums[byte] = sum;
    }
    return sums;
  }();
  std::uint32_t sum = ~0u;
  for (const char byte : bytes)
    sum = (sum >> 8) ^ table[(sum ^ static_cast<unsigned char>(byte)) & 0xFF];
  return ~sum;
}

void append_little_endian(std::string& text, std::uint64_t value, unsigned bytes) {
  for (unsigned byte = 0; byte < bytes; ++byte) text += static_cast<char>(value >> (8 * byte));
}

void append_varint(std::string& text, std::uint64_t value) {
  for (; value >= 0x80; value >>= 7) text += static_cast<char>(value | 0x80);
  text += static_cast<char>(value);
}

template <class Field>
void append_key(std::string& text, Field field, WireType type) {
  append_varint(text, static_cast<std::uint64_t>(field) << 3 | static_cast<std::uint32_t>(type));
}

template <class Field>
void append_bytes(std::string& text, Field field, std::string_view bytes) {
  append_key(text, field, WireType::kBytes);
  append_varint(text, bytes.size());
  text += bytes;
}

// The fields that all events have.
std::string event_at(double wall_time_s, std::uint64_t step) {
  std::string event;
  append_key(event, EventField::kWallTime, WireType::kFixed64);
  append_little_endian(event, std::bit_cast<std::uint64_t>(wall_time_s), 8);
  append_key(event, EventField::kStep, WireType::kVarint);
  append_varint(event, step);
  return event;
}

std::string record_of(std::string_view event) {
  const auto masked = [](std::string_view bytes) {
    return std::rotr(crc32c(bytes), 15) + kCrcMaskDelta;
  };
  std::string record;
  append_little_endian(record, event.size(), 8);
  append_little_endian(record, masked(record), 4);
  record += event;
  append_little_endian(record, masked(event), 4);
  return record;
}

}  // namespace

std::string event_file_header(double wall_time_s) {
  std::string event = event_at(wall_time_s, 0);
  append_bytes(event, EventField::kFileVersion, "brain.Event:2");
  return record_of(event);
}

std::string event_of_scalars(double wall_time_s, std::uint64_t step,
                             std::span<const EventScalar> scalars) {
  std::string summary;
  for (const EventScalar& scalar : scalars) {
    std::string value;
    append_bytes(value, ValueField::kTag, scalar.tag);
    append_key(value, ValueField::kSimple, WireType::kFixed32);
    append_little_endian(value, std::bit_cast<std::uint32_t>(scalar.value), 4);
    append_bytes(summary, kSummaryValue, value);
  }
  std::string event = event_at(wall_time_s, step);
  append_bytes(event, EventField::kSummary, summary);
  return record_of(event);
}

std::string event_of_text(double wall_time_s, std::uint64_t step, std::string_view tag,
                          std::string_view text) {
  std::string plugin, metadata, tensor, value, summary;
  append_bytes(plugin, kPluginName, "text");
  append_bytes(metadata, kMetadataPlugin, plugin);
  append_key(tensor, kTensorType, WireType::kVarint);
  append_varint(tensor, kTypeString);
  append_bytes(tensor, kTensorString, text);
  append_bytes(value, ValueField::kTag, tag);
  append_bytes(value, ValueField::kTensor, tensor);
  append_bytes(value, ValueField::kMetadata, metadata);
  append_bytes(summary, kSummaryValue, value);
  std::string event = event_at(wall_time_s, step);
  append_bytes(event, EventField::kSummary, summary);
  return record_of(event);
}

std::string event_file_name(double wall_time_s) {
  std::array<char, 256> host{};
  (void)::gethostname(host.data(), host.size() - 1);
  return fmt::format("events.out.tfevents.{:.0f}.{}.{}", wall_time_s, host.data(), ::getpid());
}

}  // namespace sluice
