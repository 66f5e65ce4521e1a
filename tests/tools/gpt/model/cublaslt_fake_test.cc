// The GPT's operations on a GPU, over stand-ins for the CUDA runtime and for cuBLASLt.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "tests/tools/gpt/model/device_gpt_cases.h"
#include "tests/tools/gpt/model/fake_cublaslt.h"
#include "tests/tools/gpt/model/fake_gpu_machine.h"

namespace sluice::gpt {
namespace {

// The library's description of every product of a pass, against what the CPU computes.
INSTANTIATE_TEST_SUITE_P(FakeCublasLt, DeviceGptTest,
                         testing::ValuesIn(device_gpt_cases(fake_gpu_machine())),
                         device_gpt_case_name);

class CublasLtFake : public testing::Test {
 protected:
  void SetUp() override { (void)fake_cublaslt_take_counts(); }

  // The result of `product`, whose factors have bf16 elements from `a(i)` and `b(i)`.
  std::vector<float> multiply(Product product, const std::function<float(std::uint64_t)>& a,
                              const std::function<float(std::uint64_t)>& b) {
    const Stream stream(*machine_.device, "test");
    Transfers transfers(*machine_.device, stream.id());
    const DeviceBuffer first = factor(transfers, a);
    const DeviceBuffer second = factor(transfers, b);
    const DeviceBuffer result(*machine_.device, kElements * sizeof(float), "result");
    product.a = first.data();
    product.b = second.data();
    product.result = result.data();
    machine_.ops->multiply(product, stream.id());
    const auto bytes = transfers.to_host(result.data(), result.size_bytes());
    std::vector<float> values;
    for (std::uint64_t row = 0; row < product.m; ++row)
      for (std::uint64_t column = 0; column < product.n; ++column) {
        const std::uint64_t at = row * product.result_stride + column;
        values.push_back(
            product.result_type == DType::kFp32
                ? reinterpret_cast<const float*>(bytes.data())[at]
                : float_from_bf16(reinterpret_cast<const std::uint16_t*>(bytes.data())[at]));
      }
    return values;
  }

  DeviceMachine machine_ = fake_gpu_machine().make(DType::kBf16, DType::kFp32);

 private:
  static constexpr std::uint64_t kElements = 1 << 12;

  DeviceBuffer factor(Transfers& transfers, const std::function<float(std::uint64_t)>& value) {
    std::vector<std::uint16_t> elements;
    for (std::uint64_t i = 0; i < kElements; ++i) elements.push_back(bf16_from_float(value(i)));
    DeviceBuffer made(*machine_.device, kElements * sizeof(std::uint16_t), "factor");
    transfers.to_device(made.data(), elements.data(), made.size_bytes());
    return made;
  }
};

// Each sum is 256 + 1 - 256: its first half is 257, which bf16 has no number for.
TEST_F(CublasLtFake, PartsOfASumAreNotRoundedToBf16) {
  constexpr std::uint64_t kLength = 8;
  const auto summand = [](std::uint64_t i) {
    switch (i % kLength) {
      case 0: return 256.0f;
      case 1: return 1.0f;
      case kLength - 1: return -256.0f;
      default: return 0.0f;
    }
  };
  const auto one = [](std::uint64_t) { return 1.0f; };
  for (const DType result_type : {DType::kBf16, DType::kFp32}) {
    const std::vector<float> sums = multiply({.form = Form::kABt,
                                              .m = 16,
                                              .n = 8,
                                              .k = kLength,
                                              .a_stride = kLength,
                                              .b_stride = kLength,
                                              .result_stride = 8,
                                              .result_type = result_type},
                                             summand, one);
    for (const float sum : sums) EXPECT_EQ(sum, 1.0f) << name_of(result_type);
  }
  const fake_cublaslt_counts counts = fake_cublaslt_take_counts();
  EXPECT_EQ(counts.products, 2);
  EXPECT_EQ(counts.rounded_sums, 0);
}

// Rows that are 17 elements apart begin at odd addresses.
TEST_F(CublasLtFake, AProductWithoutAnAlgorithmIsComputedAndNotedOnce) {
  Product product{.form = Form::kABt,
                  .m = 4,
                  .n = 17,
                  .k = 8,
                  .a_stride = 8,
                  .b_stride = 8,
                  .result_stride = 17,
                  .result_type = DType::kBf16};
  const auto two = [](std::uint64_t) { return 2.0f; };
  for (int time = 0; time < 2; ++time)
    for (const float sum : multiply(product, two, two)) EXPECT_EQ(sum, 32.0f);
  const std::vector<std::string> notes = machine_.ops->take_notes();
  ASSERT_EQ(notes.size(), 1u);
  EXPECT_NE(notes[0].find("[4, 17]"), std::string::npos) << notes[0];
  EXPECT_EQ(fake_cublaslt_take_counts().products, 0);
  product.result_stride = 128;
  for (const float sum : multiply(product, two, two)) EXPECT_EQ(sum, 32.0f);
  EXPECT_TRUE(machine_.ops->take_notes().empty());
  EXPECT_EQ(fake_cublaslt_take_counts().products, 1);
}

// The addend of one product and the bias of the other begin at an odd vector.
TEST_F(CublasLtFake, APlanIsNotUsedForAnAddendThatIsLessAligned) {
  constexpr std::uint64_t kWidth = 8;
  const Stream stream(*machine_.device, "test");
  Transfers transfers(*machine_.device, stream.id());
  const DeviceBuffer memory(*machine_.device, 4096, "zeros");
  const std::vector<std::byte> zeros(memory.size_bytes());
  transfers.to_device(memory.data(), zeros.data(), zeros.size());
  const auto product = [&](std::uint64_t bias, std::uint64_t addend) {
    return Product{.form = Form::kAB,
                   .m = kWidth,
                   .n = kWidth,
                   .k = kWidth,
                   .a = memory.data(),
                   .a_stride = kWidth,
                   .b = memory.data() + 256,
                   .b_stride = kWidth,
                   .result = memory.data() + 512,
                   .result_stride = kWidth,
                   .result_type = DType::kBf16,
                   .bias = memory.data() + bias,
                   .addend = memory.data() + addend};
  };
  machine_.ops->multiply(product(1024 + 16, 2048), stream.id());
  EXPECT_NO_THROW(machine_.ops->multiply(product(1024, 2048 + 16), stream.id()));
  machine_.device->synchronize(stream.id());
}

// From the opening to the product. The next product finds no half of a plan.
TEST_F(CublasLtFake, ACallThatFailsOnceIsAnErrorAndLeavesNothing) {
  const Product product{.form = Form::kABt,
                        .m = 8,
                        .n = 16,
                        .k = 8,
                        .a_stride = 8,
                        .b_stride = 8,
                        .result_stride = 16,
                        .result_type = DType::kBf16,
                        .batch = 2,
                        .a_batch_stride = 64,
                        .b_batch_stride = 128,
                        .result_batch_stride = 128};
  const auto two = [](std::uint64_t) { return 2.0f; };
  const auto remake = [this] {
    machine_.ops.reset();
    machine_ = fake_gpu_machine().make(DType::kBf16, DType::kFp32);
  };
  int failures = 0;
  for (int at = 1;; ++at) {
    (void)fake_cublaslt_fail_at(at);
    bool is_error = false;
    try {
      remake();
      (void)multiply(product, two, two);
    } catch (const Error& error) {
      is_error = true;
      EXPECT_NE(std::string(error.what()).find(": cuBLASLt status 14;"), std::string::npos)
          << error.what();
    }
    const bool has_failed = fake_cublaslt_fail_at(0);
    EXPECT_EQ(is_error, has_failed) << "call " << at;
    if (!has_failed) break;
    ++failures;
    if (machine_.ops == nullptr) remake();
    for (const float sum : multiply(product, two, two)) EXPECT_EQ(sum, 32.0f) << "call " << at;
  }
  EXPECT_GE(failures, 20);
  machine_.ops.reset();
  EXPECT_EQ(fake_cublaslt_take_counts().objects, 0);
}

// The vocabulary is odd, and the embedding table has its rows alone. run_device_pass() looks at the
// bytes behind every tensor.
TEST_F(CublasLtFake, NoProductOfAnOddVocabularyIsLeftToThePlainKernel) {
  constexpr std::uint32_t kVocabulary = 17;
  for (const bool tied : {true, false}) {
    const GptConfig config{.layers = 1,
                           .heads = 2,
                           .embedding = 16,
                           .context = 8,
                           .vocabulary = kVocabulary,
                           .tied_head = tied};
    const BatchShape shape{.batch = 2, .sequence = 8};
    const ModelSpec spec = gpt_model_spec(config);
    const TensorMemory values(spec, DType::kFp32);
    fill_random(spec, values);
    const TensorMemory parameters(spec, DType::kBf16);
    for_each_tensor(spec, [&](std::size_t unit, std::size_t tensor, const TensorSpec& t) {
      EXPECT_NE(t.shape[0], 128u) << t.name;
      for (std::uint64_t i = 0; i < t.element_count(); ++i)
        parameters.halves(unit, tensor)[i] = bf16_from_float(values.floats(unit, tensor)[i]);
    });
    DeviceGpt gpt(config, shape, *machine_.device, *machine_.ops);
    const auto tokens = random_tokens("tokens", shape.rows(), kVocabulary);
    const PassResult result =
        run_device_pass(gpt, *machine_.device, *machine_.ops, spec, parameters, tokens, tokens);
    EXPECT_EQ(result.gradients.at("wte.weight").size(), kVocabulary * config.embedding);
    for (const std::string& note : machine_.ops->take_notes()) ADD_FAILURE() << note;
    const fake_cublaslt_counts counts = fake_cublaslt_take_counts();
    EXPECT_EQ(counts.refused, 0);
    EXPECT_GT(counts.products, 10);
  }
}

}  // namespace
}  // namespace sluice::gpt
