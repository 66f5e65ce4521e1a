// Units of other kinds through the C interface. Opaque ones have tensors of any number of bytes,
// and every byte is as it was. Pinned ones are leased through a step. Tensors may be empty.
#include <cstring>

#include "tests/capi/capi_support.h"

namespace sluice::test {
namespace {

std::uint8_t byte_at(std::uint32_t tensor, std::uint64_t i) {
  return static_cast<std::uint8_t>((i * 2654435761u + tensor * 977u) >> 7);
}

// The function for values of the model below: tensors 1 and 2 are bytes.
int mixed_values(void* context, std::uint32_t tensor, std::uint64_t first, float* values,
                 std::uint64_t count) {
  if (tensor == 0) return sine_values(context, tensor, first, values, count);
  auto* bytes = reinterpret_cast<std::uint8_t*>(values);
  for (std::uint64_t i = 0; i < count; ++i) bytes[i] = byte_at(tensor, first + i);
  return 0;
}

class CApiOpaque : public CApi {
 protected:
  // A trained unit of fp32, bf16 or fp16, and an opaque one of 70001 and 3 bytes.
  void make_mixed(const std::string& type) {
    std::string text = config();
    for (std::size_t at = text.find("fp32"); at != std::string::npos;
         at = text.find("fp32", at + 4))
      text.replace(at, 4, type);
    sluice_model made = model();
    made.units = mixed_;
    ASSERT_EQ(sluice_engine_create(text.c_str(), &made, &engine_), SLUICE_OK)
        << sluice_last_error();
    ASSERT_EQ(sluice_initialize(engine_, mixed_values, nullptr), SLUICE_OK) << sluice_last_error();
  }

  const std::uint64_t odd_[2] = {10000, 7};
  const std::uint64_t three_[1] = {3};
  const sluice_tensor weight_[1] = {{"weight", matrix_, 2, 1}};
  const sluice_tensor bytes_[2] = {{"codes", odd_, 2, 0}, {"zeros", three_, 1, 0}};
  const sluice_unit mixed_[2] = {{"trained", weight_, 1, SLUICE_TRAINED},
                                 {"opaque", bytes_, 2, SLUICE_OPAQUE}};
};

TEST_F(CApiOpaque, BytesAreAsTheyWere) {
  for (const std::string type : {"fp32", "bf16", "fp16"}) {
    SCOPED_TRACE(type);
    make_mixed(type);
    for (const std::uint32_t tensor : {1u, 2u}) {
      sluice_tensor_info info{};
      ASSERT_EQ(sluice_tensor_describe(engine_, tensor, &info), SLUICE_OK);
      const std::uint64_t count = tensor == 1 ? 70000 : 3;
      ASSERT_EQ(info.element_count, count);
      std::vector<std::uint8_t> expected(count), found(count);
      for (std::uint64_t i = 0; i < count; ++i) expected[i] = byte_at(tensor, i);
      ASSERT_EQ(sluice_read_state(engine_, tensor, SLUICE_PARAMETER, 0, count, found.data()),
                SLUICE_OK)
          << sluice_last_error();
      EXPECT_EQ(found, expected);
      ASSERT_EQ(sluice_read_state(engine_, tensor, SLUICE_PARAMETER, 1, 2, found.data()), SLUICE_OK)
          << sluice_last_error();
      EXPECT_EQ(found[0], expected[1]);
      EXPECT_EQ(found[1], expected[2]);

      ASSERT_EQ(sluice_begin_inference(engine_), SLUICE_OK);
      sluice_lease lease{};
      ASSERT_EQ(sluice_acquire(engine_, 1, SLUICE_INFERENCE, &lease), SLUICE_OK);
      const std::uint64_t element_bytes = type == "fp32" ? 4 : 2;
      std::memcpy(
          found.data(),
          static_cast<const std::uint8_t*>(lease.parameters) + info.offset_elements * element_bytes,
          count);
      EXPECT_EQ(found, expected);
      ASSERT_EQ(sluice_release(engine_, lease.id), SLUICE_OK);
      ASSERT_EQ(sluice_end_inference(engine_), SLUICE_OK);
    }
    sluice_unit_info unit{};
    ASSERT_EQ(sluice_unit_describe(engine_, 1, &unit), SLUICE_OK);
    EXPECT_EQ(unit.gradient_bytes, 0u);
    EXPECT_LE(unit.parameter_bytes, 70003u + 2 * 1024);  // no more than padding beside the bytes
    sluice_engine_destroy(engine_);
    engine_ = nullptr;
  }
}

TEST_F(CApiOpaque, WhatBytesDoNotHaveIsRefused) {
  make_mixed("bf16");
  std::uint8_t room[16];
  EXPECT_EQ(sluice_read_state(engine_, 1, SLUICE_MASTER, 0, 4, room), SLUICE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sluice_last_error()).find("\"codes\" is opaque"), std::string::npos);
  EXPECT_EQ(sluice_read_state(engine_, 2, SLUICE_PARAMETER, 2, 2, room), SLUICE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sluice_last_error()).find("2 bytes from 2 on reach beyond the end"),
            std::string::npos);
  EXPECT_EQ(sluice_read_state(engine_, 2, SLUICE_PARAMETER, 0, 4, room), SLUICE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sluice_last_error()).find("4 bytes of tensor \"zeros\", which has 3"),
            std::string::npos);

  const sluice_unit wrong[1] = {{"unit", weight_, 1, 3}};
  sluice_model made = model();
  made.units = wrong;
  made.unit_count = 1;
  sluice_engine* other = nullptr;
  EXPECT_EQ(sluice_engine_create(config().c_str(), &made, &other), SLUICE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sluice_last_error()).find("units[0].is_frozen is 3"), std::string::npos);
}

TEST_F(CApiOpaque, APinnedUnitIsHeldThroughTheStep) {
  const sluice_unit pinned[2] = {{"first", first_, 2, SLUICE_TRAINED | SLUICE_PINNED}, units_[1]};
  sluice_model made = model();
  made.units = pinned;
  ASSERT_EQ(sluice_engine_create(config().c_str(), &made, &engine_), SLUICE_OK)
      << sluice_last_error();
  ASSERT_EQ(sluice_initialize(engine_, sine_values, nullptr), SLUICE_OK) << sluice_last_error();
  for (std::uint64_t number = 1; number <= 2; ++number) {
    ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK);
    sluice_lease held{};
    ASSERT_EQ(sluice_acquire(engine_, 0, SLUICE_FORWARD, &held), SLUICE_OK) << sluice_last_error();
    const float before = static_cast<const float*>(held.parameters)[1];
    use(1, SLUICE_FORWARD, 1);
    use(1, SLUICE_BACKWARD, 1);
    use(0, SLUICE_BACKWARD, 1);
    EXPECT_EQ(static_cast<const float*>(held.parameters)[1], before);
    sluice_step_report report{};
    EXPECT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_INVALID_ARGUMENT);
    ASSERT_EQ(sluice_release(engine_, held.id), SLUICE_OK);
    ASSERT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
    EXPECT_EQ(report.step, number);
  }
  EXPECT_NE(master(0, 5000)[1], std::sin(1.0f));
  sluice_unit wrong[2] = {units_[0], units_[1]};
  wrong[1].is_frozen = SLUICE_ANNOUNCED | SLUICE_PINNED;
  made.units = wrong;
  sluice_engine* other = nullptr;
  EXPECT_EQ(sluice_engine_create(config().c_str(), &made, &other), SLUICE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sluice_last_error()).find("pinned and announced"), std::string::npos);
}

TEST_F(CApiOpaque, EmptyTensorsAreTensors) {
  const std::uint64_t none[2] = {0, 4};
  const sluice_tensor some[3] = {{"none", none, 2, 1}, first_[0], {"end", none, 1, 0}};
  const sluice_tensor nothing[1] = {{"nothing", none, 2, 0}};
  const sluice_tensor bytes[2] = {{"no.bytes", none, 2, 0}, {"zeros", three_, 1, 0}};
  const sluice_unit all[3] = {{"some", some, 3, SLUICE_TRAINED},
                              {"nothing", nothing, 1, SLUICE_TRAINED},
                              {"opaque", bytes, 2, SLUICE_OPAQUE}};
  sluice_model made = model();
  made.units = all;
  made.unit_count = 3;
  ASSERT_EQ(sluice_engine_create(config().c_str(), &made, &engine_), SLUICE_OK)
      << sluice_last_error();
  const auto values = [](void*, std::uint32_t tensor, std::uint64_t, float* target,
                         std::uint64_t count) {
    EXPECT_TRUE(tensor == 1 || tensor == 5) << tensor << " is empty";
    std::memset(target, 0, tensor == 5 ? count : count * sizeof(float));
    return 0;
  };
  ASSERT_EQ(sluice_initialize(engine_, values, nullptr), SLUICE_OK) << sluice_last_error();
  for (const std::uint32_t tensor : {0u, 2u, 3u, 4u}) {
    sluice_tensor_info info{};
    ASSERT_EQ(sluice_tensor_describe(engine_, tensor, &info), SLUICE_OK);
    EXPECT_EQ(info.element_count, 0u) << tensor;
    std::uint8_t byte = 7;
    EXPECT_EQ(sluice_read_state(engine_, tensor, SLUICE_PARAMETER, 0, 0, &byte), SLUICE_OK)
        << sluice_last_error();
    EXPECT_EQ(byte, 7);
  }
  ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK);
  for (const std::uint32_t unit : {0u, 1u, 2u}) use(unit, SLUICE_FORWARD, 1);
  for (const std::uint32_t unit : {2u, 1u, 0u}) use(unit, SLUICE_BACKWARD, 1);
  sluice_step_report report{};
  ASSERT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
  EXPECT_EQ(report.schedule_changes, 0u);
}

// A product that does not fit into 64 bits is not taken for a small one.
TEST_F(CApiOpaque, SizesThatWrapAreRefused) {
  constexpr std::uint64_t kHalf = std::uint64_t{1} << 32;
  const std::uint64_t wrapping[] = {kHalf, kHalf};
  const std::uint64_t large[] = {std::uint64_t{1} << 60};
  for (const auto& [shape, dimensions] : {std::pair{wrapping, 2u}, std::pair{large, 1u}}) {
    const sluice_tensor codes{"codes", shape, dimensions, 0};
    const sluice_unit units[] = {mixed_[0], {"opaque", &codes, 1, SLUICE_OPAQUE}};
    sluice_model made = model();
    made.units = units;
    EXPECT_EQ(sluice_engine_create(config().c_str(), &made, &engine_), SLUICE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(sluice_last_error()).find("\"codes\""), std::string::npos)
        << sluice_last_error();
  }
  const std::uint64_t empty[] = {kHalf, kHalf, 0};
  const sluice_tensor codes{"codes", empty, 3, 0};
  const sluice_unit units[] = {mixed_[0], {"opaque", &codes, 1, SLUICE_OPAQUE}};
  sluice_model made = model();
  made.units = units;
  EXPECT_EQ(sluice_engine_create(config().c_str(), &made, &engine_), SLUICE_OK)
      << sluice_last_error();
}

}  // namespace
}  // namespace sluice::test
