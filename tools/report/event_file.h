// The functions compute the content of event files, which TensorBoard reads. An event file consists
// of records. A record begins with its length, and contains masked CRC32C sums and an `Event`
// message in protobuf's encoding (tensorflow/core/lib/io/record_writer.h, util/event.proto,
// framework/summary.proto). The functions set only the fields that scalars and texts need.
//
// Thread rule: any thread. The functions are pure, except event_file_name().
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

// Returns the first record of an event file.
std::string event_file_header(double wall_time_s);
// Returns one record that contains all `scalars` of a step.
std::string event_of_scalars(double wall_time_s, std::uint64_t step,
                             std::span<const EventScalar> scalars);
// Returns one record that contains `text`, in UTF-8. TensorBoard shows the text as Markdown.
std::string event_of_text(double wall_time_s, std::uint64_t step, std::string_view tag,
                          std::string_view text);

// Returns a name such as "events.out.tfevents.SECONDS.HOST.PID". TensorBoard recognises an event
// file by its name. No other process uses the returned name.
std::string event_file_name(double wall_time_s);

}  // namespace sluice
