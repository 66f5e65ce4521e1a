// Norm groups: engines that have a model between them, by tensor or by pipeline parallelism, take
// the steps of one engine with the whole model, bit for bit, and clip and skip alike.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <limits>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sluice/engine.h>
#include <sluice/host_device.h>
#include <sluice/units.h>
#include "cpu_optim/rank_sum.h"
#include "gpu/ranks/local_collectives.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace sluice::test {
namespace {

// Adds over `count` threads. Like MPI_Allreduce(), it returns when all have come.
class ThreadSum {
 public:
  explicit ThreadSum(std::size_t count) : count_(count) {}

  void add(std::span<std::uint64_t> sums) {
    std::unique_lock lock(mutex_);
    total_.resize(sums.size());
    for (std::size_t i = 0; i < sums.size(); ++i) total_[i] += sums[i];
    const std::size_t round = rounds_;
    if (++arrived_ == count_) {
      result_ = std::exchange(total_, {});
      arrived_ = 0;
      ++rounds_;
      all_here_.notify_all();
    }
    all_here_.wait(lock, [&] { return rounds_ != round; });
    std::ranges::copy(result_, sums.begin());
  }

 private:
  std::size_t count_;
  std::mutex mutex_;
  std::condition_variable all_here_;
  std::size_t arrived_ = 0, rounds_ = 0;
  std::vector<std::uint64_t> total_, result_;
};

// One member's part of the model. A tensor of another member has the same name in both.
struct Part {
  std::vector<UnitSpec> units;
  std::vector<std::string> elsewhere = {};

  ModelSpec model() const {
    ModelSpec model;
    model.units = units;
    return model;
  }
};

// A number between -1 and 1 for an element and a step.
float number_of(const std::string& tensor, std::uint64_t element, std::uint64_t step) {
  std::uint64_t x = std::hash<std::string>()(tensor) + element * 0x9e3779b97f4a7c15u + step;
  x = (x ^ (x >> 31)) * 0xbf58476d1ce4e5b9u;
  return static_cast<float>(static_cast<std::int64_t>(x) >> 40) * 0x1p-23f;
}

constexpr std::uint64_t kSteps = 6;
constexpr std::uint64_t kOverflowStep = 4;

// The gradient depends on the parameter, so that an error in one step shows in the next. In one
// step a tensor has a gradient that is not finite.
float gradient_of(const std::string& tensor, std::uint64_t element, std::uint64_t step,
                  float parameter) {
  if (step == kOverflowStep && tensor == "out" && element == 77)
    return std::numeric_limits<float>::infinity();
  return number_of(tensor, element, step) + 0.5f * parameter;
}

struct Outcome {
  std::vector<StepReport> reports;
  std::map<std::string, std::vector<float>> masters;
};

void walk(Step& step, HostDevice& device, const Stream& stream, const ModelSpec& model,
          std::uint64_t number) {
  const auto scale = static_cast<float>(step.loss_scale());
  for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
    for (std::uint32_t i = 0; i < model.units.size(); ++i) {
      const UnitId unit{
          pass == Pass::kForward ? i : static_cast<std::uint32_t>(model.units.size()) - 1 - i};
      const Lease lease = step.acquire(unit, pass, stream);
      if (pass == Pass::kForward) continue;
      const auto& tensors = model.units[index_of(unit)].tensors;
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        const auto* parameter = lease.parameter<float>(t);
        auto* gradient = lease.gradient<float>(t);
        const TensorSpec& tensor = tensors[t];
        device.launch(stream.id(), [=, &tensor] {
          for (std::uint64_t e = 0; e < tensor.element_count(); ++e)
            gradient[e] = scale * gradient_of(tensor.name, e, number, parameter[e]);
        });
      }
    }
  }
}

// One of several ranks of a member, which share its state.
struct RankOf {
  LocalWorld* world = nullptr;
  std::uint32_t rank = 0;
};

Outcome train(const Config& config, const Part& part, ThreadSum* group, const RankOf& own = {}) {
  const auto device = make_host_device({.memory_bytes = 8_MiB});
  const ModelSpec model = part.model();
  const auto ranks = own.world == nullptr ? nullptr : own.world->join(own.rank, *device);
  Engine engine(config, model, *device, ranks.get());
  engine.initialize([](const TensorPlace& tensor, std::uint64_t element, std::span<float> values) {
    for (float& value : values) value = number_of(tensor.name, element++, 0);
  });
  if (group != nullptr) {
    NormGroup norm{.add = [group](std::span<std::uint64_t> sums) { group->add(sums); }};
    for (const std::string& name : part.elsewhere)
      norm.counted_elsewhere.push_back(engine.tensor(name));
    engine.set_norm_group(norm);
  }
  const Stream stream(*device, "compute");
  Outcome outcome;
  for (std::uint64_t number = 1; number <= kSteps; ++number) {
    Step step = engine.begin_step({.learning_rate = 1e-2});
    walk(step, *device, stream, model, number);
    // Asked for before finish(), the norm is the group's, too.
    const double asked = number % 2 == 0 ? step.gradient_norm() : 0;
    outcome.reports.push_back(step.finish());
    const StepReport& report = outcome.reports.back();
    if (number % 2 == 0 && !report.skipped) {
      EXPECT_EQ(asked, report.gradient_norm) << number;
    }
    EXPECT_EQ(std::isnan(asked), report.skipped) << number;
  }
  engine.drain();
  for (const TensorPlace& tensor : engine.tensors()) {
    std::vector<float>& values = outcome.masters[tensor.name];
    values.resize(tensor.element_count);
    engine.read_state(tensor.id, StateKind::kMaster, 0, std::as_writable_bytes(std::span(values)));
  }
  engine.close();
  return outcome;
}

TensorSpec tensor(const char* name, std::uint64_t count) {
  return {.name = name, .shape = {count}};
}

// "norm" and "bias" are on both members, as layer norms are under tensor parallelism.
const Part kWhole{.units = {{"in",
                             {tensor("norm", 300), tensor("in.0", 5000), tensor("in.1", 4100),
                              tensor("bias", 256)}},
                            {"out", {tensor("out", 6000)}}}};
const std::vector<Part> kTensorParallel{
    {.units = {{"in", {tensor("norm", 300), tensor("in.0", 5000), tensor("bias", 256)}}}},
    {.units = {{"in", {tensor("norm", 300), tensor("in.1", 4100), tensor("bias", 256)}},
               {"out", {tensor("out", 6000)}}},
     .elsewhere = {"norm", "bias"}}};
const std::vector<Part> kPipeline{{.units = {{"in", {tensor("norm", 300), tensor("in.0", 5000)}}}},
                                  {.units = {{"in", {tensor("in.1", 4100), tensor("bias", 256)}},
                                             {"out", {tensor("out", 6000)}}}}};

Config config_in(const std::string& folder) {
  Config config = config_of_environment();
  config.precision = {.parameters = DType::kFp32, .gradients = DType::kFp32};
  config.memory.device_bytes = 4_MiB;
  config.memory.host_bytes = 4_MiB;
  config.storage.paths = {folder};
  config.storage.block_elements = 4096;
  config.optimizer.non_finite = NonFinitePolicy::kSkip;
  return config;
}

// Each part on as many ranks. The ranks of equal number form a group.
std::vector<Outcome> train_together(const Config& config, const std::vector<Part>& parts,
                                    std::uint32_t ranks) {
  std::deque<ThreadSum> groups;
  for (std::uint32_t rank = 0; rank < ranks; ++rank) groups.emplace_back(parts.size());
  std::deque<LocalWorld> worlds;
  std::vector<Outcome> outcomes(parts.size() * ranks);
  std::vector<std::thread> threads;
  for (std::size_t part = 0; part < parts.size(); ++part) {
    LocalWorld* const world =
        ranks == 1 ? nullptr
                   : &worlds.emplace_back(
                         ranks, HostCollectivesOptions{.timeout_s = 60, .sum = sum_in_order});
    for (std::uint32_t rank = 0; rank < ranks; ++rank)
      threads.emplace_back([&, world, part, rank] {
        outcomes[part * ranks + rank] = train(config, parts[part], &groups[rank], {world, rank});
      });
  }
  for (std::thread& thread : threads) thread.join();
  return outcomes;
}

class NormGroupTest : public testing::TestWithParam<const std::vector<Part>*> {
 protected:
  void expect_the_whole_model(const Config& config, std::uint32_t ranks = 1) {
    const Outcome whole = train(config, kWhole, nullptr);
    const std::vector<Outcome> members = train_together(config, *GetParam(), ranks);
    std::size_t clipped = 0;
    for (const Outcome& member : members) {
      for (std::size_t i = 0; i < kSteps; ++i) {
        const StepReport& own = member.reports[i];
        const StepReport& wanted = whole.reports[i];
        EXPECT_EQ(own.skipped, i + 1 == kOverflowStep);
        if (!wanted.skipped) {
          EXPECT_EQ(own.gradient_norm, wanted.gradient_norm) << i;
        }
        EXPECT_EQ(own.clip_factor, wanted.clip_factor) << i;
        EXPECT_EQ(own.loss_scale, wanted.loss_scale) << i;
        if (own.clip_factor < 1) ++clipped;
      }
      for (const auto& [name, values] : member.masters) EXPECT_EQ(values, whole.masters.at(name));
    }
    EXPECT_GE(clipped, members.size() * (kSteps - 2)) << "clipping is what needs the group";
  }

  TempDirectory directory_;
  Config config_ = config_in(directory_.path());
};

TEST_P(NormGroupTest, MembersTakeTheStepsOfOneEngine) {
  using enum TierChoice;
  for (const TierChoice gradients : {kHost, kNvme, kDevice}) {
    config_.placement = {.parameters = kNvme, .optimizer = kNvme, .gradients = gradients};
    expect_the_whole_model(config_);
  }
}

TEST_P(NormGroupTest, UnderEveryPolicyAndLossScale) {
  for (const OverlapPolicy policy :
       {OverlapPolicy::kSerial, OverlapPolicy::kDeferred, OverlapPolicy::kSpeculative}) {
    config_.optimizer.overlap = policy;
    config_.precision.loss_scale.static_scale = 0;
    config_.precision.loss_scale.hysteresis = 1;
    expect_the_whole_model(config_);
  }
}

// All ranks have the same gradients, so that their mean is the gradient of one.
TEST_P(NormGroupTest, MembersOfTwoRanksEach) {
  for (const std::uint32_t stage : {1u, 3u}) {
    config_.sharding.stage = stage;
    expect_the_whole_model(config_, 2);
  }
}

INSTANTIATE_TEST_SUITE_P(Kinds, NormGroupTest, testing::Values(&kTensorParallel, &kPipeline),
                         [](const auto& kind) {
                           return kind.param == &kPipeline ? "Pipeline" : "TensorParallel";
                         });

// Without the group, each member would clip by its own norm.
TEST(NormGroup, MembersWithoutAGroupDiffer) {
  const TempDirectory directory;
  const Config config = config_in(directory.path());
  const Outcome whole = train(config, kWhole, nullptr);
  const Outcome member = train(config, kTensorParallel[0], nullptr);
  EXPECT_NE(member.masters.at("in.0"), whole.masters.at("in.0"));
}

// Copies that a member names count once; a value that is not finite in a copy is seen anyway.
TEST(NormGroup, ACopyThatIsNotFiniteIsSeen) {
  const TempDirectory directory;
  const Config config = config_in(directory.path());
  const Part alone{.units = {{"a", {tensor("w", 300), tensor("out", 400)}}}, .elsewhere = {"out"}};
  ThreadSum group(1);
  const Outcome outcome = train(config, alone, &group);
  EXPECT_TRUE(outcome.reports[kOverflowStep - 1].skipped);
  const Part small{.units = {{"a", {tensor("w", 300)}}}};
  EXPECT_EQ(outcome.reports[0].gradient_norm,
            train(config, small, nullptr).reports[0].gradient_norm);
}

class NormGroupErrors : public testing::Test {
 protected:
  void finish_step() {
    Step step = engine_.begin_step({.learning_rate = 1e-2});
    walk(step, *device_, stream_, model_, 1);
    (void)step.finish();
  }
  void SetUp() override {
    engine_.initialize([](const TensorPlace&, std::uint64_t, std::span<float> values) {
      std::ranges::fill(values, 0.25f);
    });
  }

  const TempDirectory directory_;
  const ModelSpec model_ = Part{.units = {{"a", {tensor("w", 300)}}}}.model();
  const std::unique_ptr<HostDevice> device_ = make_host_device({.memory_bytes = 8_MiB});
  Engine engine_{config_in(directory_.path()), model_, *device_};
  const Stream stream_{*device_, "compute"};
};

TEST_F(NormGroupErrors, WrongCallsAreRefusedAndChangeNothing) {
  std::string words = expect_error(ErrorCode::kInvalidArgument, [&] {
    engine_.set_norm_group({.add = [](auto) {}, .counted_elsewhere = {TensorId{1}}});
  });
  EXPECT_NE(words.find("tensor 1 does not exist"), std::string::npos) << words;
  words = expect_error(ErrorCode::kInvalidArgument,
                       [&] { engine_.set_norm_group({.counted_elsewhere = {TensorId{0}}}); });
  EXPECT_NE(words.find("no function"), std::string::npos) << words;
  {
    Step step = engine_.begin_step({.learning_rate = 1e-2});
    words = expect_error(ErrorCode::kInvalidArgument,
                         [&] { engine_.set_norm_group({.add = [](auto) {}}); });
    EXPECT_NE(words.find("a step"), std::string::npos) << words;
  }
  finish_step();
}

TEST_F(NormGroupErrors, MembersInDifferentStepsAreNamed) {
  engine_.set_norm_group({.add = [](std::span<std::uint64_t> sums) {
    sums[sums.size() - 5] = 3;   // two other members,
    sums[sums.size() - 4] += 4;  // in steps 0 and 2, so that the mean is the own step
    sums[sums.size() - 3] *= 3;
    sums[sums.size() - 2] += 16;  // their squares
    sums[sums.size() - 1] *= 3;
  }});
  const std::string words = expect_error(ErrorCode::kRanks, [&] { finish_step(); });
  EXPECT_NE(words.find("3 members"), std::string::npos) << words;
  EXPECT_NE(words.find("step 1"), std::string::npos) << words;
}

TEST_F(NormGroupErrors, AMemberThatAsksBeforeFinishIsNamed) {
  engine_.set_norm_group({.add = [](std::span<std::uint64_t> sums) {
    sums[sums.size() - 5] = 2;
    sums[sums.size() - 4] += sums[sums.size() - 4] - 1;  // as far, but before finish()
    sums[sums.size() - 3] *= 2;
    sums[sums.size() - 2] += 1;
    sums[sums.size() - 1] *= 2;
  }});
  const std::string words = expect_error(ErrorCode::kRanks, [&] { finish_step(); });
  EXPECT_NE(words.find("ask for the norm before finish() at the same points"), std::string::npos)
      << words;
}

TEST(NormGroup, RanksThatNameOtherTensorsAreRefused) {
  const TempDirectory directory;
  const Config config = config_in(directory.path());
  LocalWorld world(2, HostCollectivesOptions{.timeout_s = 60, .sum = sum_in_order});
  const auto run = [&](std::uint32_t rank) {
    const Part part{.units = {{"a", {tensor("w", 300), tensor("out", 400)}}},
                    .elsewhere = {rank == 0 ? "w" : "out"}};
    ThreadSum group(1);
    const std::string words = expect_error(ErrorCode::kRanks, [&] {
      (void)train(config, part, &group, {&world, rank});
    });
    EXPECT_NE(words.find("count elsewhere"), std::string::npos) << words;
  };
  std::thread other(run, 1);
  run(0);
  other.join();
}

TEST_F(NormGroupErrors, AFailureOfTheFunctionStopsTheEngine) {
  engine_.set_norm_group(
      {.add = [](std::span<std::uint64_t>) { throw std::runtime_error("the network is gone"); }});
  EXPECT_THROW(finish_step(), std::runtime_error);
  const std::string words = expect_error(ErrorCode::kRanks, [&] { engine_.drain(); });
  EXPECT_NE(words.find("the network is gone"), std::string::npos) << words;
}

TEST_F(NormGroupErrors, AGroupEnds) {
  int calls = 0;
  engine_.set_norm_group({.add = [&](std::span<std::uint64_t>) { ++calls; }});
  finish_step();
  engine_.set_norm_group({});
  finish_step();
  EXPECT_EQ(calls, 1);
}

}  // namespace
}  // namespace sluice::test
