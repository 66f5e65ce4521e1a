// Ranks behind the C interface, as threads that each make a handle of their own.
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <string>
#include <thread>

#include "tests/capi/capi_support.h"
#include "tests/support/fork_quietly.h"
#include "tests/support/paused_child.h"

namespace sluice::test {
namespace {

class CApiRanks : public CApi {
 protected:
  static constexpr std::uint32_t kRanks = 2;

  ~CApiRanks() override {
    sluice_ranks_destroy(ranks_[0]);
    sluice_ranks_destroy(ranks_[1]);
  }

  void open_doors() {
    for (std::uint32_t rank = 0; rank < kRanks; ++rank) {
      ASSERT_EQ(sluice_ranks_create("127.0.0.1", rank, kRanks, &ranks_[rank]), SLUICE_OK)
          << sluice_last_error();
      ASSERT_EQ(sluice_ranks_endpoint(ranks_[rank], &endpoints_[rank]), SLUICE_OK);
    }
  }

  template <class Body>
  static void on_every_rank(const Body& body) {
    std::thread other([&] { body(1u); });
    body(0u);
    other.join();
  }

  void connect() {
    open_doors();
    on_every_rank([&](std::uint32_t rank) {
      EXPECT_EQ(sluice_ranks_connect(ranks_[rank], config().c_str(), endpoints_.data()), SLUICE_OK)
          << sluice_last_error();
    });
  }

  std::array<sluice_ranks*, kRanks> ranks_{};
  std::array<const char*, kRanks> endpoints_{};
};

// A rank of the training, with calls of its own.
struct RankOfEngine : CApiEngine {
  RankOfEngine(const std::string& config, const sluice_model& model, sluice_ranks* ranks) {
    EXPECT_EQ(sluice_engine_create_ranked(config.c_str(), &model, ranks, &engine_), SLUICE_OK)
        << sluice_last_error();
    EXPECT_EQ(sluice_initialize(engine_, sine_values, nullptr), SLUICE_OK) << sluice_last_error();
  }
  std::vector<float> train(float factor) {
    for (int step = 0; step < 3; ++step) {
      const sluice_step_options options{.learning_rate = 1e-2,
                                        .gradient_divisor = 0,
                                        .group_learning_rates = nullptr,
                                        .group_count = 0,
                                        .micro_batches = 1};
      EXPECT_EQ(sluice_begin_step(engine_, &options), SLUICE_OK) << sluice_last_error();
      walk(factor);
      sluice_step_report report{};
      EXPECT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
    }
    std::vector<float> values = master(0, 5000);
    EXPECT_EQ(sluice_close(engine_), SLUICE_OK) << sluice_last_error();
    return values;
  }
  // A step that uses unit 2 as well, or not.
  void step_with(bool uses_expert) {
    const sluice_step_options options{.learning_rate = 1e-2,
                                      .gradient_divisor = 0,
                                      .group_learning_rates = nullptr,
                                      .group_count = 0,
                                      .micro_batches = 1};
    EXPECT_EQ(sluice_begin_step(engine_, &options), SLUICE_OK) << sluice_last_error();
    const std::uint32_t expert = 2;
    std::uint32_t uses[3], count = 0;
    for (const sluice_pass pass : {SLUICE_FORWARD, SLUICE_BACKWARD}) {
      use(pass == SLUICE_FORWARD ? 0 : 1, pass, 1);
      if (uses_expert) {
        EXPECT_EQ(sluice_announce(engine_, &expert, 1, pass, uses, &count), SLUICE_OK)
            << sluice_last_error();
        use(expert, pass, 2);
      }
      use(pass == SLUICE_FORWARD ? 1 : 0, pass, 1);
    }
    sluice_step_report report{};
    EXPECT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK) << sluice_last_error();
    EXPECT_EQ(report.schedule_changes, 0u);
  }
  sluice_status save(const char* root) { return sluice_save(engine_, root, 0, nullptr); }
  using CApiEngine::master;
};

// Gradients of 1 and 3 times the parameters have the mean of one rank with 2 times.
TEST_F(CApiRanks, TrainTogether) {
  connect();
  std::array<std::vector<float>, kRanks> trained;
  on_every_rank([&](std::uint32_t rank) {
    RankOfEngine engine(config(), model(), ranks_[rank]);
    trained[rank] = engine.train(rank == 0 ? 1.0f : 3.0f);
  });
  make();
  std::vector<float> expected;
  for (int step = 0; step < 3; ++step) {
    const sluice_step_options options{.learning_rate = 1e-2,
                                      .gradient_divisor = 0,
                                      .group_learning_rates = nullptr,
                                      .group_count = 0,
                                      .micro_batches = 1};
    ASSERT_EQ(sluice_begin_step(engine_, &options), SLUICE_OK);
    walk(2);
    sluice_step_report report{};
    ASSERT_EQ(sluice_finish_step(engine_, nullptr, &report), SLUICE_OK);
  }
  expected = master(0, 5000);
  for (const std::vector<float>& values : trained)
    for (std::size_t i = 0; i < values.size(); ++i) ASSERT_NEAR(values[i], expected[i], 2e-6) << i;
  EXPECT_EQ(trained[0], trained[1]);
}

// Two ranks, each with an expert that the other has not: rank 1 announces its own in no step.
TEST_F(CApiRanks, EachHasAnExpertOfItsOwn) {
  connect();
  const sluice_tensor tensors[kRanks] = {{"expert.0", matrix_, 2, 1}, {"expert.1", matrix_, 2, 1}};
  on_every_rank([&](std::uint32_t rank) {
    const sluice_unit units[3] = {
        units_[0],
        units_[1],
        {tensors[rank].name, &tensors[rank], 1, SLUICE_TRAINED | SLUICE_ANNOUNCED | SLUICE_LOCAL}};
    sluice_model made = model();
    made.units = units;
    made.unit_count = 3;
    RankOfEngine engine(
        config(R"("type": "sgd", "momentum": 0, "weight_decay": 0, "clip_norm": 0)"), made,
        ranks_[rank]);
    std::vector<float> expected = engine.master(3, 5000);
    for (int step = 0; step < 2; ++step) {
      engine.step_with(rank == 0);
      for (float& value : expected) value -= rank == 0 ? 1e-2f * value : 0;  // 2 / 2 ranks
    }
    EXPECT_EQ(engine.master(3, 5000), expected);
    EXPECT_EQ(engine.save((directory_.path() + "/saved").c_str()), SLUICE_OK)
        << sluice_last_error();
  });
  // The checkpoint has the experts of both.
  const sluice_unit all[4] = {units_[0],
                              units_[1],
                              {"expert.0", &tensors[0], 1, SLUICE_TRAINED | SLUICE_ANNOUNCED},
                              {"expert.1", &tensors[1], 1, SLUICE_TRAINED | SLUICE_ANNOUNCED}};
  sluice_model made = model();
  made.units = all;
  made.unit_count = 4;
  const std::string own = config(R"("type": "sgd", "momentum": 0, "weight_decay": 0)");
  ASSERT_EQ(sluice_engine_create(own.c_str(), &made, &engine_), SLUICE_OK) << sluice_last_error();
  ASSERT_EQ(sluice_restore(engine_, (directory_.path() + "/saved/latest").c_str(), 0), SLUICE_OK)
      << sluice_last_error();
  EXPECT_NE(master(3, 5000), master(4, 5000));
}

TEST_F(CApiRanks, EachHandleHasOneConnectionAndOneEngine) {
  open_doors();
  const sluice_model made = model();
  EXPECT_EQ(sluice_engine_create_ranked(config().c_str(), &made, ranks_[0], &engine_),
            SLUICE_INVALID_ARGUMENT);
  EXPECT_STREQ(sluice_last_error(),
               "sluice_engine_create_ranked: the ranks are not connected; call "
               "sluice_ranks_connect()");
  on_every_rank([&](std::uint32_t rank) {
    ASSERT_EQ(sluice_ranks_connect(ranks_[rank], config().c_str(), endpoints_.data()), SLUICE_OK);
    EXPECT_EQ(sluice_ranks_connect(ranks_[rank], config().c_str(), endpoints_.data()),
              SLUICE_INVALID_ARGUMENT);
    EXPECT_STREQ(sluice_last_error(), "sluice_ranks_connect: the ranks are connected already");
    { const RankOfEngine engine(config(), made, ranks_[rank]); }
    sluice_engine* second = nullptr;
    EXPECT_EQ(sluice_engine_create_ranked(config().c_str(), &made, ranks_[rank], &second),
              SLUICE_INVALID_ARGUMENT);
    EXPECT_STREQ(sluice_last_error(),
                 "sluice_engine_create_ranked: these ranks have had an engine; each engine needs "
                 "its own");
  });
}

TEST_F(CApiRanks, RanksThatDifferSaySo) {
  connect();
  const sluice_model made = model();
  on_every_rank([&](std::uint32_t rank) {
    const std::string own = config(rank == 0 ? "" : R"("beta2": 0.9)");
    sluice_engine* engine = nullptr;
    EXPECT_EQ(sluice_engine_create_ranked(own.c_str(), &made, ranks_[rank], &engine), SLUICE_RANKS);
    EXPECT_NE(std::string(sluice_last_error()).find("differs between rank 0 and rank 1"),
              std::string::npos)
        << sluice_last_error();
  });
}

// The values of tensor 0 fail on rank 1 as long as `context` says so.
int failing_values(void* context, std::uint32_t tensor, std::uint64_t first, float* values,
                   std::uint64_t count) {
  return *static_cast<bool*>(context) ? 7 : sine_values(nullptr, tensor, first, values, count);
}

// Rank 0 hears of it at once, and both ranks may try again.
TEST_F(CApiRanks, ValuesThatFailOnOneRankFailOnAll) {
  connect();
  const sluice_model made = model();
  on_every_rank([&](std::uint32_t rank) {
    sluice_engine* engine = nullptr;
    ASSERT_EQ(sluice_engine_create_ranked(config().c_str(), &made, ranks_[rank], &engine),
              SLUICE_OK)
        << sluice_last_error();
    bool fails = rank == 1;
    const sluice_status expected = fails ? SLUICE_CALLBACK : SLUICE_INTERNAL;
    const std::string said =
        fails ? "the function for values has failed" : "another rank has failed";
    EXPECT_EQ(sluice_initialize(engine, failing_values, &fails), expected) << sluice_last_error();
    EXPECT_NE(std::string(sluice_last_error()).find(said), std::string::npos)
        << sluice_last_error();
    bool never = false;
    ASSERT_EQ(sluice_initialize(engine, failing_values, &never), SLUICE_OK) << sluice_last_error();
    const std::uint32_t tensor = 0;
    EXPECT_EQ(sluice_replace_values(engine, &tensor, 1, failing_values, &fails), expected)
        << sluice_last_error();
    EXPECT_NE(std::string(sluice_last_error()).find(said), std::string::npos)
        << sluice_last_error();
    EXPECT_EQ(sluice_begin_step(engine, &step_), SLUICE_POISONED) << "the engine goes on";
    sluice_engine_destroy(engine);
  });
}

// A config or model that is refused leaves the ranks as they were, so a better one can follow.
TEST_F(CApiRanks, ARefusedConfigOrModelDoesNotUseTheRanksUp) {
  connect();
  const sluice_model made = model();
  const sluice_unit same[2] = {units_[0], units_[0]};
  sluice_model twice = made;
  twice.units = same;
  on_every_rank([&](std::uint32_t rank) {
    sluice_engine* engine = nullptr;
    const auto refusal = [&](const std::string& entry) {
      EXPECT_EQ(sluice_engine_create_ranked(config().insert(1, entry).c_str(), &made, ranks_[rank],
                                            &engine),
                SLUICE_CONFIG)
          << entry << ": " << sluice_last_error();
      return std::string(sluice_last_error());
    };
    EXPECT_NE(refusal(R"("shardingg": {}, )").find("shardingg"), std::string::npos);
    EXPECT_EQ(refusal(R"("sharding": {"group": "node"}, )"),
              "sharding.group is \"node\", and how many ranks a node will have is not known here; "
              "give their number");
    EXPECT_EQ(refusal(R"("sharding": {"reduction": "nccl"}, )"),
              "sharding.reduction \"nccl\" is for ranks on GPUs; set run.device to \"cuda\" "
              "(RankDevice::kGpu), or sharding.reduction to \"exact\"");
    EXPECT_NE(refusal(R"("sharding": {"group": 3}, )").find("sharding.group is 3"),
              std::string::npos);
    EXPECT_EQ(sluice_engine_create_ranked(config().c_str(), &twice, ranks_[rank], &engine),
              SLUICE_INVALID_ARGUMENT);
    EXPECT_EQ(engine, nullptr);
    EXPECT_EQ(sluice_engine_create_ranked(config().c_str(), &made, ranks_[rank], &engine),
              SLUICE_OK)
        << sluice_last_error();
    sluice_engine_destroy(engine);
  });
}

// Messages call each handle what it is.
TEST_F(CApiRanks, MessagesNameTheKindOfHandle) {
  const char* endpoint = nullptr;
  EXPECT_EQ(sluice_ranks_endpoint(nullptr, &endpoint), SLUICE_INVALID_ARGUMENT);
  EXPECT_STREQ(sluice_last_error(), "sluice_ranks_endpoint: the group of ranks is null");
  EXPECT_EQ(sluice_optimizer_wait_all(nullptr), SLUICE_INVALID_ARGUMENT);
  EXPECT_STREQ(sluice_last_error(), "sluice_optimizer_wait_all: the optimizer is null");
  open_doors();
  const pid_t child = fork_quietly();
  ASSERT_NE(child, -1);
  if (child == 0) {
    const bool is_refused =
        sluice_ranks_endpoint(ranks_[0], &endpoint) == SLUICE_FORKED &&
        std::string(sluice_last_error()) ==
            "this group of ranks belongs to the process that forked this one; "
            "make a new group of ranks here, or use this one only in the parent";
    _exit(is_refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
}

// With a connection that a child of a killed rank kept, the other ranks would wait for that rank.
TEST_F(CApiRanks, AForkedChildKeepsNeitherConnectionsNorSharedMemory) {
  const auto before = descriptors_of(::getpid());
  connect();
  const sluice_model made = model();
  std::array<sluice_engine*, kRanks> engines{};
  on_every_rank([&](std::uint32_t rank) {
    EXPECT_EQ(sluice_engine_create_ranked(config().c_str(), &made, ranks_[rank], &engines[rank]),
              SLUICE_OK)
        << sluice_last_error();
  });
  const std::string own = maps_of(::getpid());
  EXPECT_NE(own.find("memfd:sluice ranks"), std::string::npos) << own;
  {
    const PausedChild child;
    EXPECT_EQ(descriptors_of(child.pid()), before);
    EXPECT_EQ(maps_of(child.pid()).find("memfd:sluice"), std::string::npos);
  }
  on_every_rank([&](std::uint32_t rank) { sluice_engine_destroy(engines[rank]); });
}

// Ranks whose groups differ open other sequences of collectives; they say so at once.
TEST_F(CApiRanks, RanksInDifferentGroupsSaySo) {
  connect();
  const sluice_model made = model();
  on_every_rank([&](std::uint32_t rank) {
    const std::string own =
        config().insert(1, rank == 0 ? R"("sharding": {"group": 1}, )" : R"("run": {}, )");
    sluice_engine* engine = nullptr;
    EXPECT_EQ(sluice_engine_create_ranked(own.c_str(), &made, ranks_[rank], &engine), SLUICE_RANKS);
    EXPECT_NE(std::string(sluice_last_error())
                  .find("sharding.group is 1 on one rank and 2 on another; start every rank with "
                        "the same config and model"),
              std::string::npos)
        << sluice_last_error();
  });
}

TEST_F(CApiRanks, RankThatDoesNotCome) {
  open_doors();
  const std::string impatient = R"({"sharding": {"timeout": 0.3}})";
  EXPECT_EQ(sluice_ranks_connect(ranks_[0], impatient.c_str(), endpoints_.data()), SLUICE_RANKS);
  EXPECT_NE(std::string(sluice_last_error()).find("has waited 0.3 s for a connection with rank 1"),
            std::string::npos)
      << sluice_last_error();
  on_every_rank([&](std::uint32_t rank) {
    const std::string own = config().insert(1, R"("sharding": {"timeout": 0.5}, )");
    EXPECT_EQ(sluice_ranks_connect(ranks_[rank], own.c_str(), endpoints_.data()), SLUICE_OK)
        << sluice_last_error();
    const sluice_model made = model();
    sluice_engine* engine = nullptr;
    if (rank == 1) return;  // never makes an engine
    EXPECT_EQ(sluice_engine_create_ranked(own.c_str(), &made, ranks_[0], &engine), SLUICE_RANKS);
    EXPECT_NE(std::string(sluice_last_error()).find("rank 1 has not answered rank 0"),
              std::string::npos)
        << sluice_last_error();
  });
}

TEST_F(CApiRanks, WrongArgumentsAreRefused) {
  sluice_ranks* ranks = nullptr;
  EXPECT_EQ(sluice_ranks_create("127.0.0.1", 2, 2, &ranks), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_ranks_create("here", 0, 2, &ranks), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_ranks_create(nullptr, 0, 2, &ranks), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_ranks_create("127.0.0.1", 0, 2, nullptr), SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(ranks, nullptr);
  EXPECT_EQ(sluice_ranks_endpoint(nullptr, endpoints_.data()), SLUICE_INVALID_ARGUMENT);
  sluice_ranks_destroy(nullptr);
  open_doors();
  const std::array<const char*, 2> exchanged = {endpoints_[1], endpoints_[0]};
  EXPECT_EQ(sluice_ranks_connect(ranks_[0], config().c_str(), exchanged.data()),
            SLUICE_INVALID_ARGUMENT);
  EXPECT_EQ(sluice_ranks_connect(ranks_[0], config().c_str(), nullptr), SLUICE_INVALID_ARGUMENT);
  const std::array<const char*, 2> missing = {endpoints_[0], nullptr};
  EXPECT_EQ(sluice_ranks_connect(ranks_[0], config().c_str(), missing.data()),
            SLUICE_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace sluice::test
