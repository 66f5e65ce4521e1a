// Random commit records of any size, for tests.
#pragma once

#include <random>
#include <string>
#include <vector>

#include "engine/store/commit_record.h"

namespace sluice::test {

inline CommitRecord sample_commit(std::uint64_t seed, std::uint64_t generation = 1,
                                  std::uint64_t step = 0) {
  std::mt19937_64 random(seed);
  CommitRecord record{.rank = 1,
                      .rank_count = 3,
                      .generation = generation,
                      .step = step,
                      .model_hash = random(),
                      .layout_hash = random(),
                      .config_hash = random(),
                      .scale = {.scale = 65536.5, .good_steps = 17, .hysteresis_left = 2},
                      .file_count = 2,
                      .settings = std::string(random() % 300, 's')};
  record.store_id = {1, 2, 0xab};
  record.application.assign(random() % 9000, static_cast<std::byte>(random()));
  std::uint64_t next[2] = {0, 0};
  for (std::uint64_t planes = random() % 40; planes > 0; --planes) {
    CommitPlane plane{.length_bytes = 4096 * (1 + random() % 9),
                      .version = step,
                      .checksum = random(),
                      .copy_count = static_cast<std::uint32_t>(1 + random() % kCopiesMax)};
    plane.named_copy = static_cast<std::uint32_t>(random() % plane.copy_count);
    for (CommitExtent& copy : std::span(plane.copies).first(plane.copy_count)) {
      copy.file = static_cast<std::uint32_t>(random() % 2);
      copy.offset_bytes = next[copy.file];
      next[copy.file] += plane.length_bytes;
    }
    record.planes.push_back(plane);
  }
  return record;
}

inline std::vector<std::byte> encoded(const CommitRecord& record) {
  std::vector<std::byte> bytes((commit_bytes(record) + 4095) / 4096 * 4096);
  encode_commit(record, bytes);
  return bytes;
}

}  // namespace sluice::test
