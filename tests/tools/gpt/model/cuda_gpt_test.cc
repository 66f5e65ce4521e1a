// The GPT on a GPU: as on the host, and products by the library against plain ones.
#include <gtest/gtest.h>

#include <cmath>

#include "tests/tools/gpt/model/device_gpt_cases.h"
#include "tools/gpt/model/cublaslt.h"

namespace sluice::gpt {
namespace {

INSTANTIATE_TEST_SUITE_P(Cuda, DeviceGptTest,
                         testing::ValuesIn(device_gpt_cases(cuda_machine(ProductKernels::kFast))),
                         device_gpt_case_name);
INSTANTIATE_TEST_SUITE_P(CudaPlain, DeviceGptTest,
                         testing::ValuesIn(device_gpt_cases(cuda_machine(ProductKernels::kPlain))),
                         device_gpt_case_name);

class CudaProduct : public testing::TestWithParam<DType> {
 protected:
  static constexpr std::uint64_t kElements = 1 << 16;

  void SetUp() override {
    if (const std::string why = why_no_cuda_code(); !why.empty()) GTEST_SKIP() << why;
    if (const std::string why = CublasLt::why_not(); !why.empty()) GTEST_SKIP() << why;
    const CounterRandom random(11, "products");
    for (std::uint64_t i = 0; i < kElements; ++i) {
      values_.push_back(static_cast<float>(random.normal(i)));
      halves_.push_back(bf16_from_float(values_.back()));
    }
  }

  // The first elements of the result, from inputs at addresses that are `offset` elements odd.
  // Where `product` has a bias or an addend, it gets one; the addend is the result's memory.
  std::vector<float> run(const DeviceMachine& machine, Product product, std::uint64_t offset) {
    Device& device = *machine.device;
    const Stream stream(device, "test");
    Transfers transfers(device, stream.id());
    const DeviceBuffer inputs(device, kElements * size_of(GetParam()), "inputs");
    const DeviceBuffer result(device, kElements * sizeof(float), "result");
    transfers.to_device(inputs.data(), data(), inputs.size_bytes());
    // Numbers also where nothing is written, between rows and batches.
    if (product.result_type == DType::kFp32) {
      transfers.to_device(result.data(), values_.data(), kElements * sizeof(float));
    } else {
      transfers.to_device(result.data(), halves_.data(), kElements * sizeof(std::uint16_t));
    }
    const auto at = [&](std::uint64_t element) {
      return inputs.data() + (element + offset) * size_of(GetParam());
    };
    product.a = at(0);
    product.b = at(20000);
    if (product.bias != nullptr) product.bias = at(40000);
    product.result = result.data();
    if (product.addend != nullptr) product.addend = result.data();
    machine.ops->multiply(product, stream.id());
    const auto bytes = transfers.to_host(result.data(), result.size_bytes());
    std::vector<float> list;
    for (std::uint64_t i = 0; i < product.batch * product.result_batch_stride; ++i) {
      list.push_back(
          product.result_type == DType::kFp32
              ? reinterpret_cast<const float*>(bytes.data())[i]
              : float_from_bf16(reinterpret_cast<const std::uint16_t*>(bytes.data())[i]));
    }
    return list;
  }

  const void* data() const {
    return GetParam() == DType::kFp32 ? static_cast<const void*>(values_.data()) : halves_.data();
  }

  std::vector<float> values_;
  std::vector<std::uint16_t> halves_;
};

INSTANTIATE_TEST_SUITE_P(Types, CudaProduct, testing::Values(DType::kFp32, DType::kBf16),
                         [](const auto& type) { return std::string(name_of(type.param)); });

// Every form, with and without bias and addend, batches, strides beyond the extents, addresses that
// are aligned to an element alone, and results of both types.
TEST_P(CudaProduct, OfTheLibraryEqualsThePlainOne) {
  const DType type = GetParam();
  const DeviceMachine fast = cuda_machine(ProductKernels::kFast).make(type, DType::kFp32);
  const DeviceMachine plain = cuda_machine(ProductKernels::kPlain).make(type, DType::kFp32);
  EXPECT_NE(fast.ops->description().find("cuBLASLt"), std::string::npos);
  std::vector<Product> products;
  for (const Form form : {Form::kAB, Form::kABt, Form::kAtB})
    for (const DType result_type : {type, DType::kFp32})
      for (const void* addend : {static_cast<const void*>(nullptr), data()})
        for (const std::uint64_t batch : {1u, 3u})
          products.push_back({.form = form,
                              .m = 33,
                              .n = 48,
                              .k = 40,
                              .a_stride = 56,
                              .b_stride = 64,
                              .result_stride = 72,
                              .result_type = result_type,
                              .bias = batch == 1 && result_type == type ? addend : nullptr,
                              .addend = addend,
                              .batch = batch,
                              .a_batch_stride = 4000,
                              .b_batch_stride = 4096,
                              .result_batch_stride = 5000});
  for (const Product& product : products) {
    for (const std::uint64_t offset : {0u, 1u}) {
      const std::vector<float> actual = run(fast, product, offset);
      EXPECT_LT(relative_difference(actual, run(plain, product, offset)),
                product.result_type == DType::kFp32 ? 1e-5 : 1e-2)
          << static_cast<int>(product.form) << " " << name_of(product.result_type) << " "
          << (product.addend != nullptr) << " " << product.batch << " " << offset;
      EXPECT_EQ(actual, run(fast, product, offset)) << "the same product, other bits";
    }
  }
}

}  // namespace
}  // namespace sluice::gpt
