// One element of an array of NCCL's types, for the stand-in (fake_nccl.cc). `type` is an
// ncclDataType_t. Pure.
#pragma once

#include <cstddef>

namespace sluice::test {

float load(int type, const void* data, std::size_t i);
void save(int type, void* data, std::size_t i, float value);
std::size_t size_of(int type);

}  // namespace sluice::test
