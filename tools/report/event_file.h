// Event files as TensorBoard reads them. Such files consist of records, each with its length and
// masked CRC32C sums. A record is an `Event` message in protobuf's encoding
// (tensorflow/core/lib/io/record_writer.h, util/event.proto, framework/summary.proto). Only the
// fields that scalars and texts need are written.
//
// Thread rule: any thread. Pure, except event_file_name().
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace sluice {

struct EventScalar {
  std::string_view tag;  // "train/loss"
  float value = 0;
};

// The first record of every event file.
std::string event_file_header(double wall_time_s);
// One record with all `scalars` of a step.
std::string event_of_scalars(double wall_time_s, std::uint64_t step,
                             std::span<const EventScalar> scalars);
// One record with a text in UTF-8, which TensorBoard reads as Markdown.
std::string event_of_text(double wall_time_s, std::uint64_t step, std::string_view tag,
                          std::string_view text);

// A name such as "events.out.tfevents.SECONDS.HOST.PID". TensorBoard takes a file of this name for
// an event file, and no other process uses the name.
std::string event_file_name(double wall_time_s);

}  // namespace sluice
