// An engine on a GPU through the C interface, over a stand-in for the CUDA runtime. The memory of
// the stand-in's GPU is the host's.
#include <cuda_runtime.h>
#include <fmt/format.h>

#include <cstring>
#include <deque>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "capi/sluice_gpu.h"
#include "tests/capi/capi_support.h"

namespace sluice::test {
namespace {

constexpr std::uint32_t kWaitMs = 10'000;

// The program's part of a training on one GPU: streams of its own, and gradients that are copies of
// the parameters.
class Program {
 public:
  Program() {
    for (cudaStream_t* stream : {&compute_, &late_})
      EXPECT_EQ(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, 0), cudaSuccess);
  }
  // The engine has to be destroyed before.
  ~Program() {
    for (const cudaStream_t stream : {compute_, late_})
      EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  }

  void step(sluice_engine* engine, const sluice_step_options& options) {
    ASSERT_EQ(sluice_begin_step(engine, &options), SLUICE_OK) << sluice_last_error();
    for (const std::uint32_t unit : {0u, 1u}) use(engine, unit, SLUICE_FORWARD);
    for (const std::uint32_t unit : {1u, 0u}) use(engine, unit, SLUICE_BACKWARD);
    ASSERT_EQ(sluice_finish_step(engine, nullptr, &report), SLUICE_OK) << sluice_last_error();
    values_.clear();
  }

  sluice_step_report report{};

 private:
  // Acquires on one stream. The gradient comes on the other one, behind slow copies, and the lease
  // has to end behind it.
  void use(sluice_engine* engine, std::uint32_t unit, sluice_pass pass) {
    sluice_lease lease{};
    ASSERT_EQ(sluice_acquire_on_gpu(engine, kWaitMs, unit, pass, compute_, &lease), SLUICE_OK)
        << sluice_last_error();
    sluice_unit_info info{};
    ASSERT_EQ(sluice_unit_describe(engine, unit, &info), SLUICE_OK);
    if (pass == SLUICE_BACKWARD) {
      ASSERT_EQ(cudaStreamSynchronize(compute_), cudaSuccess);
      std::vector<std::byte>& values = values_.emplace_back(info.gradient_bytes);
      std::memcpy(values.data(), lease.parameters, values.size());
      for (int i = 0; i < 20; ++i)
        ASSERT_EQ(cudaMemsetAsync(lease.gradients, 0, values.size(), late_), cudaSuccess);
      ASSERT_EQ(cudaMemcpyAsync(lease.gradients, values.data(), values.size(),
                                cudaMemcpyHostToDevice, late_),
                cudaSuccess);
    }
    ASSERT_EQ(sluice_release_on_gpu(engine, lease.id, pass == SLUICE_BACKWARD ? late_ : compute_),
              SLUICE_OK)
        << sluice_last_error();
  }

  cudaStream_t compute_ = nullptr;
  cudaStream_t late_ = nullptr;
  std::deque<std::vector<std::byte>> values_;
};

class CApiGpuEngine : public CApi {
 protected:
  ~CApiGpuEngine() override { destroy(); }

  void destroy() {
    sluice_engine_destroy(engine_);
    engine_ = nullptr;
  }

  sluice_status create(const std::string& text, int gpu = 0,
                       const sluice_gpu_ranks* ranks = nullptr) {
    const sluice_model made = model();
    return sluice_engine_create_on_gpu(text.c_str(), &made, gpu, ranks, &engine_);
  }

  std::vector<float> masters() {
    std::vector<float> all;
    for (const auto& [tensor, count] : {std::pair{0u, 5000u}, {1u, 50u}, {2u, 1u}}) {
      const std::vector<float> some = master(tensor, count);
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }

  std::string without_budget() const {
    std::string text = config();
    const std::string budget = R"("device": "1MiB", )";
    return text.replace(text.find(budget), budget.size(), "");
  }

  Program program_;
};

TEST_F(CApiGpuEngine, HasTheBitsOfAnEngineOnTheHost) {
  const std::string serial = R"("overlap": "serial")";  // whose bytes do not depend on time
  make(serial);
  sluice_step_report report{};
  for (int step = 0; step < 3; ++step) {
    ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK);
    walk();
    ASSERT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
  }
  const std::vector<float> on_host = masters();
  destroy();

  ASSERT_EQ(create(config(serial)), SLUICE_OK) << sluice_last_error();
  ASSERT_EQ(sluice_initialize(engine_, sine_values, nullptr), SLUICE_OK) << sluice_last_error();
  for (int step = 0; step < 3; ++step) program_.step(engine_, step_);
  EXPECT_EQ(program_.report.gradient_norm, report.gradient_norm);
  EXPECT_EQ(program_.report.nvme_read_bytes, report.nvme_read_bytes);
  EXPECT_EQ(masters(), on_host);
  destroy();
}

TEST_F(CApiGpuEngine, AnAcquireThatWaitsServesEveryStream) {
  ASSERT_EQ(create(config()), SLUICE_OK) << sluice_last_error();
  ASSERT_EQ(sluice_initialize(engine_, sine_values, nullptr), SLUICE_OK) << sluice_last_error();
  ASSERT_EQ(sluice_begin_step(engine_, &step_), SLUICE_OK);
  walk();  // sluice_acquire() and sluice_release(), over the stand-in's memory
  sluice_step_report report{};
  ASSERT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
  EXPECT_GT(report.gradient_norm, 0);
  destroy();
}

TEST_F(CApiGpuEngine, MisuseIsRefused) {
  EXPECT_EQ(create(without_budget()), SLUICE_CONFIG);
  EXPECT_NE(std::string(sluice_last_error()).find("memory.device is not set"), std::string::npos);
  EXPECT_EQ(create(config(), 77), SLUICE_UNSUPPORTED);
  std::string small = config();
  small.replace(small.find("1MiB"), 4, "4KiB");
  EXPECT_EQ(create(small), SLUICE_OUT_OF_MEMORY);
  const std::string id(256, '0');
  for (const auto& [rank, count] : {std::pair(0u, 0u), {0u, 1u}, {2u, 2u}}) {
    const sluice_gpu_ranks wrong{id.c_str(), rank, count};
    EXPECT_EQ(create(config(), 0, &wrong), SLUICE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(sluice_last_error())
                  .find(fmt::format("rank {} of {}; ranks count from 0", rank, count)),
              std::string::npos)
        << sluice_last_error();
  }
  const sluice_gpu_ranks unknown{"0g", 0, 2};
  EXPECT_EQ(create(config(), 0, &unknown), SLUICE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sluice_last_error()).find("256 digits"), std::string::npos);
  EXPECT_EQ(engine_, nullptr);
  const char* plan = nullptr;
  const sluice_model made = model();
  EXPECT_EQ(sluice_plan_on_gpu(without_budget().c_str(), &made, &plan), SLUICE_OK)
      << sluice_last_error();
  EXPECT_NE(std::string(plan).find("device_bytes"), std::string::npos);

  make();
  sluice_lease lease{};
  EXPECT_EQ(sluice_acquire_on_gpu(engine_, 1, 0, SLUICE_FORWARD, nullptr, &lease),
            SLUICE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sluice_last_error()).find("computes on the host"), std::string::npos);
  EXPECT_EQ(sluice_release_on_gpu(engine_, 1, nullptr), SLUICE_INVALID_ARGUMENT);
  destroy();
  ASSERT_EQ(create(config()), SLUICE_OK) << sluice_last_error();
  EXPECT_EQ(sluice_release_on_gpu(engine_, 1, nullptr), SLUICE_INVALID_ARGUMENT);
  EXPECT_NE(std::string(sluice_last_error()).find("does not exist"), std::string::npos);
}

#ifdef SLUICE_TEST_HAS_FAKE_NCCL
TEST_F(CApiGpuEngine, ARankThatDoesNotComeIsMissed) {
  const char* id = nullptr;
  ASSERT_EQ(sluice_gpu_ranks_id(&id), SLUICE_OK) << sluice_last_error();
  std::string text = config();
  text.insert(1, R"("sharding": {"timeout": 0.3}, )");
  const sluice_gpu_ranks ranks{id, 0, 2};
  EXPECT_EQ(create(text, 0, &ranks), SLUICE_RANKS) << sluice_last_error();
}

TEST_F(CApiGpuEngine, TwoRanksHaveTheBitsOfOne) {
  ASSERT_EQ(create(config()), SLUICE_OK) << sluice_last_error();
  ASSERT_EQ(sluice_initialize(engine_, sine_values, nullptr), SLUICE_OK) << sluice_last_error();
  for (int step = 0; step < 2; ++step) program_.step(engine_, step_);
  const double norm_of_one = program_.report.gradient_norm;
  destroy();

  const char* made_id = nullptr;
  ASSERT_EQ(sluice_gpu_ranks_id(&made_id), SLUICE_OK) << sluice_last_error();
  const std::string id = made_id;
  double norms[2]{};
  const auto train = [&](std::uint32_t rank) {
    const TempDirectory directory;
    std::string text = config();
    const std::size_t path = text.find(directory_.path());
    text.replace(path, directory_.path().size(), directory.path());
    const sluice_gpu_ranks ranks{id.c_str(), rank, 2};
    const sluice_model described = model();
    Program program;
    sluice_engine* engine = nullptr;
    ASSERT_EQ(sluice_engine_create_on_gpu(text.c_str(), &described, 0, &ranks, &engine), SLUICE_OK)
        << sluice_last_error();
    ASSERT_EQ(sluice_initialize(engine, sine_values, nullptr), SLUICE_OK) << sluice_last_error();
    for (int step = 0; step < 2; ++step) program.step(engine, step_);
    EXPECT_EQ(sluice_close(engine), SLUICE_OK) << sluice_last_error();
    norms[rank] = program.report.gradient_norm;
    sluice_engine_destroy(engine);
  };
  std::thread other(train, 1u);
  train(0);
  other.join();
  EXPECT_EQ(norms[0], norm_of_one);
  EXPECT_EQ(norms[1], norm_of_one);
}
#endif

}  // namespace
}  // namespace sluice::test
