// The GPT for GPUs, its kernel bodies run on the host device.
#include "tools/gpt/model/device_gpt.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "tests/tools/gpt/model/device_gpt_cases.h"
#include "tools/gpt/model/slow_products.h"

namespace sluice::gpt {
namespace {

INSTANTIATE_TEST_SUITE_P(Host, DeviceGptTest, testing::ValuesIn(device_gpt_cases(host_machine())),
                         device_gpt_case_name);

// The products that were asked for, each with all that a library's choice depends on.
class RecordingOps final : public DeviceOpsOver<HostLauncher> {
 public:
  RecordingOps(HostDevice& device, DType type)
      : DeviceOpsOver(HostLauncher(device), type, DType::kFp32) {}

  void multiply(const Product& p, StreamId stream) override {
    const auto place = [](const void* data) {
      return reinterpret_cast<std::uintptr_t>(data) % 256;
    };
    products_.insert(fmt::format("{} {} {} {}, {} {} {}, {} {}, {} {} {} {}, {} {} {} {}",
                                 static_cast<int>(p.form), p.m, p.n, p.k, p.a_stride, p.b_stride,
                                 p.result_stride, name_of(p.result_type), p.batch, p.a_batch_stride,
                                 p.b_batch_stride, p.result_batch_stride, p.bias != nullptr,
                                 place(p.a), place(p.b), place(p.result), place(p.addend)));
    if (p.m == kVocabulary || p.n == kVocabulary || p.k == kVocabulary) ++of_vocabulary_;
    EXPECT_TRUE(p.n != kVocabulary || p.result_stride == 128);
    EXPECT_TRUE((p.m != kVocabulary && p.k != kVocabulary) || p.a_stride == 128);
    ++launches_;
    DeviceOpsOver::multiply(p, stream);
  }
  void softmax_forward(const SoftmaxArguments& a, StreamId stream) override {
    ++groups_;
    DeviceOpsOver::softmax_forward(a, stream);
  }
  std::uint64_t launches() const { return launches_; }
  // Groups of heads that were computed together.
  std::uint64_t groups() const { return groups_; }
  std::set<std::string> take_products() { return std::exchange(products_, {}); }
  int of_vocabulary() const { return of_vocabulary_; }

  static constexpr std::uint64_t kVocabulary = 17;

 private:
  std::set<std::string> products_;
  std::uint64_t launches_ = 0;
  std::uint64_t groups_ = 0;
  int of_vocabulary_ = 0;
};

// Training needs no plan, and no kernel, that the warm-up has not had; rows of logits begin where
// a library reads whole vectors, whatever the vocabulary; and no bit of a pass is another.
TEST(DeviceGpt, WarmUpMakesEveryProductOfAPassAndChangesNoBit) {
  for (const bool tied : {true, false}) {
    for (const DType type : {DType::kFp32, DType::kBf16}) {
      const GptConfig config{.layers = 2,
                             .heads = 2,
                             .embedding = 16,
                             .context = 8,
                             .vocabulary = RecordingOps::kVocabulary,
                             .tied_head = tied};
      const BatchShape shape{.batch = 2, .sequence = 8};
      const ModelSpec spec = gpt_model_spec(config);
      TensorMemory parameters(spec, type);
      for_each_tensor(spec, [&](std::size_t unit, std::size_t tensor, const TensorSpec& t) {
        for (std::uint64_t i = 0; i < t.element_count(); ++i) {
          const float value = 0.05f * static_cast<float>((i * 7 + tensor + unit) % 11) - 0.2f;
          if (type == DType::kFp32) {
            parameters.floats(unit, tensor)[i] = value;
          } else {
            parameters.halves(unit, tensor)[i] = bf16_from_float(value);
          }
        }
      });
      const auto tokens = random_tokens("tokens", shape.rows(), config.vocabulary);
      const auto targets = random_tokens("targets", shape.rows(), config.vocabulary);
      PassResult results[2];
      for (const bool warms_up : {false, true}) {
        const auto device = make_host_device({.memory_bytes = 64_MiB, .has_own_memory = true});
        RecordingOps ops(*device, type);
        DeviceGpt gpt(config, shape, *device, ops);
        const std::uint64_t taken = device->allocated_bytes();
        if (warms_up) gpt.warm_up();
        EXPECT_EQ(device->allocated_bytes(), taken);
        const std::set<std::string> warm = ops.take_products();
        results[warms_up ? 1 : 0] =
            run_device_pass(gpt, *device, ops, spec, parameters, tokens, targets);
        EXPECT_TRUE(!warms_up || ops.take_products() == warm);
        EXPECT_EQ(ops.of_vocabulary(), warms_up ? 6 : 3);
      }
      EXPECT_EQ(results[0].loss, results[1].loss);
      EXPECT_TRUE(results[0].gradients == results[1].gradients);
    }
  }
}

// Heads of several sequences are computed together where the scratch memory has room. A launch of
// products has one stride, so it takes all heads of a sequence, or one head of all sequences.
TEST(DeviceGpt, HeadsOfSeveralSequencesAtATimeTakeFewerLaunchesAndChangeNoBit) {
  constexpr std::uint32_t kLength = 6;
  constexpr std::uint64_t kProducts = 7;  // of attention, forward and backward
  for (const auto& [batch, heads] : {std::pair{5u, 2u}, {2u, 4u}, {3u, 3u}}) {
    const GptConfig config{.layers = 1,
                           .heads = heads,
                           .embedding = 8 * heads,
                           .context = kLength,
                           .vocabulary = RecordingOps::kVocabulary,
                           .tied_head = true};
    const BatchShape shape{.batch = batch, .sequence = kLength};
    const ModelSpec spec = gpt_model_spec(config);
    const TensorMemory parameters(spec, DType::kFp32);
    fill_random(spec, parameters);
    const auto tokens = random_tokens("tokens", shape.rows(), config.vocabulary);
    const auto targets = random_tokens("targets", shape.rows(), config.vocabulary);
    std::optional<PassResult> expected;
    std::uint64_t others = 0;  // launches of products outside of attention
    const std::uint64_t head_bytes = std::uint64_t{kLength} * kLength * 2 * (4 + 4);
    // (sequences, heads) of a group
    for (const auto& [sequences, of_each] :
         {std::pair{1u, 1u}, {1u, heads}, {2u, heads}, {batch, heads}}) {
      SCOPED_TRACE(fmt::format("{} heads of {} sequences, {} of {} at a time", heads, batch,
                               of_each, sequences));
      const auto device = make_host_device({.memory_bytes = 64_MiB, .has_own_memory = true});
      RecordingOps ops(*device, DType::kFp32);
      const DeviceGptOptions options{.attention_scratch_bytes = sequences * of_each * head_bytes};
      DeviceGpt gpt(config, shape, *device, ops, options);
      EXPECT_LE(gpt.activation_bytes(),
                DeviceGpt::activation_bytes_of(config, shape, DType::kFp32,
                                               {.attention_scratch_bytes = 1}) +
                    (sequences * of_each - 1) * head_bytes + 4 * 256);
      const PassResult result =
          run_device_pass(gpt, *device, ops, spec, parameters, tokens, targets);
      if (!expected) {
        expected = result;
        others = ops.launches() - kProducts * batch * heads;
      }
      EXPECT_EQ(result.loss, expected->loss);
      EXPECT_TRUE(result.gradients == expected->gradients);
      std::uint64_t launches = 0;
      const std::uint64_t groups = div_ceil(batch, sequences);
      const std::uint64_t equal = div_ceil(batch, groups);
      EXPECT_EQ(ops.groups(), of_each == 1 ? batch * heads : groups);
      for (std::uint64_t first = 0; first < batch; first += equal)
        launches +=
            of_each == 1 ? heads : std::min<std::uint64_t>(heads, std::min(equal, batch - first));
      EXPECT_EQ(ops.launches() - others, kProducts * launches);
    }
  }
}

TEST(SlowProducts, AreNotedOnceForEachShape) {
  SlowProducts slow;
  const Product product{.form = Form::kAtB, .m = 50257, .n = 768, .k = 1024, .a_stride = 50257};
  slow.note(product, DType::kBf16);
  slow.note(product, DType::kBf16);
  const std::vector<std::string> notes = slow.take();
  ASSERT_EQ(notes.size(), 1u);
  for (const char* part : {"A^T B", "[50257, 768]", "1024", "bf16", "no algorithm"})
    EXPECT_NE(notes[0].find(part), std::string::npos) << part << " is missing in: " << notes[0];
  slow.note(product, DType::kBf16);
  EXPECT_TRUE(slow.take().empty());
  slow.note(product, DType::kFp32);
  EXPECT_EQ(slow.take().size(), 1u);
}

TEST(DeviceGpt, RefusesForeignTokensAndTypes) {
  const auto device = make_host_device({.memory_bytes = 64_MiB});
  DeviceOpsOver<HostLauncher> ops(HostLauncher(*device), DType::kFp32, DType::kFp32);
  const GptConfig config{
      .layers = 1, .heads = 1, .embedding = 8, .context = 4, .vocabulary = 5, .tied_head = true};
  DeviceGpt gpt(config, {.batch = 1, .sequence = 4}, *device, ops);
  const Stream stream(*device, "test");
  const std::vector<std::uint32_t> good{0, 1, 2, 4};
  const std::vector<std::uint32_t> bad{0, 1, 5, 4};
  EXPECT_THROW(gpt.start_training(bad, good, stream.id()), Error);
  EXPECT_THROW(gpt.start_training(good, bad, stream.id()), Error);
  EXPECT_THROW(DeviceGpt(config, {.batch = 1, .sequence = 5}, *device, ops), Error);
  EXPECT_THROW(check_device_types(DType::kFp16, DType::kFp16), Error);
  EXPECT_THROW(check_device_types(DType::kFp32, DType::kBf16), Error);
  EXPECT_THROW(check_device_types(DType::kBf16, DType::kFp16), Error);
}

}  // namespace
}  // namespace sluice::gpt
