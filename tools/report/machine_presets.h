// The functions return the figures of GPUs and drives by name. A plan uses these figures if the
// planned machine cannot be measured. The figures come from the makers' data sheets. Rates that
// `sluice bench io` has measured are more accurate than these figures. A drive for desktop
// computers writes at the rate of its data sheet only until the drive's cache is full. The
// functions are pure.
#pragma once

#include <cstdint>
#include <string>

namespace sluice {

// `flops` is the number of operations per second in dense matrix products of bf16 with fp32 sums.
// The figure of v100 is for fp16.
struct GpuPreset {
  const char* name;
  std::uint64_t memory_bytes;
  double flops;
};

// The figures of one drive. `written_bytes` is the number of bytes that the drive can write during
// its lifetime.
struct DrivePreset {
  const char* name;
  double read_bytes_per_second;
  double write_bytes_per_second;
  double size_bytes;
  double written_bytes;
};

// Several drives that a run uses together.
struct DriveSet {
  DrivePreset drive;
  std::uint32_t count = 1;
};

// Fails with kConfig if the name is unknown. The message lists the known names.
const GpuPreset& gpu_preset(const std::string& name);
// `text` is a name, or a name and a number of drives, such as "990pro:4".
// Fails with kConfig if the name is unknown, or the number is not between 1 and 1024.
DriveSet drive_set(const std::string& text);

// Each function returns the known names, as text for a help message.
std::string gpu_names();
std::string drive_names();

}  // namespace sluice
