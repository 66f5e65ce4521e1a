// Says which GPUs this build has code for. Nothing here calls the CUDA runtime.
// Thread rule: any thread may call every function.
#pragma once

#include <string_view>

namespace sluice {

// Returns the architectures that the kernels are compiled for, as CMake names them. An example is
// "80-real, 90-real, 120-virtual".
std::string_view compiled_cuda_architectures();

// Returns whether code for one of `architectures` runs on a GPU of compute capability
// `major`.`minor`. Machine code ("-real") runs on GPUs of the same major number, from its own minor
// number on. The driver compiles PTX ("-virtual") for every GPU from that capability on. A name
// without "-real" and "-virtual" stands for both. With the suffix "a", code runs on exactly that
// capability. With the suffix "f", code stays in the family, which has one major number. The result
// is true if the list has a name of another form, such as "native".
bool runs_on_capability(std::string_view architectures, int major, int minor);

}  // namespace sluice
