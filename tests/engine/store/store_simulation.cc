#include "tests/engine/store/store_simulation.h"

#include <algorithm>
#include <random>
#include <vector>

#include <fmt/format.h>

#include <sluice/error.h>
#include "tests/engine/store/simulated_rank.h"

namespace sluice::test {
namespace {

class Simulation {
 public:
  explicit Simulation(const SimulationOptions& options) : options_(options), random_(options.seed) {
    for (std::uint32_t rank = 0; rank < options.ranks; ++rank)
      ranks_.push_back(std::make_unique<SimulatedRank>(options, rank));
  }

  SimulationResult run() {
    for (const auto& rank : ranks_) rank->create();
    while (result_.failure.empty() && result_.cuts < options_.cuts) {
      live();
      if (result_.failure.empty()) recover();
    }
    return result_;
  }

 private:
  // A cut at any time; every other one soon after a commit has begun.
  void live() {
    const std::uint64_t events = random_() % (options_.ranks * options_.planes * 60);
    for (std::uint64_t event = 0; event < events; ++event) move_on();
    if (random_() % 2 == 0) {
      const SimulatedRank& rank = *ranks_[random_() % ranks_.size()];
      while (!rank.is_writing_record() && result_.failure.empty()) move_on();
      for (std::uint64_t event = random_() % (20 * ranks_.size()); event > 0; --event) move_on();
    }
    note_progress();
    end_all();
  }

  void move_on() {
    const std::uint64_t before = ranks_[0]->step();
    ranks_[random_() % ranks_.size()]->advance(random_());
    if (std::ranges::all_of(ranks_, &SimulatedRank::may_vote))
      for (const auto& rank : ranks_) rank->begin_step();
    result_.steps += ranks_[0]->step() - before;
    idle_events_ = ranks_[0]->step() == before ? idle_events_ + 1 : 0;
    if (idle_events_ > 100'000) result_.failure = "no step ends any more";
  }

  void note_progress() {
    least_step_ = UINT64_MAX;
    whole_step_ = UINT64_MAX;
    most_step_ = 0;
    for (const auto& rank : ranks_) {
      least_step_ = std::min(least_step_, rank->durable_step());
      most_step_ = std::max(most_step_, rank->begun_step());
      whole_step_ = std::min(whole_step_, rank->step());
    }
  }

  void end_all() {
    const bool is_power_cut = random_() % 4 != 0;
    for (const auto& rank : ranks_) rank->end(is_power_cut);
    ++result_.cuts;
  }

  // Opens until nothing cuts it short.
  void recover() {
    for (std::uint32_t attempt = 0; result_.failure.empty(); ++attempt) {
      try {
        return recover_once(attempt < 3 ? random_() % 6 : UINT64_MAX / 2);
      } catch (const PowerCut&) {
        for (const auto& rank : ranks_) rank->end(random_() % 4 != 0);
        ++result_.cuts_in_recovery;
      } catch (const Error& error) {
        result_.failure = error.what();
      }
    }
  }

  void recover_once(std::uint64_t requests) {
    std::vector<CommitOffer> offers;
    const std::uint64_t cut_rank = random_() % ranks_.size();
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank)
      offers.push_back(ranks_[rank]->open(UINT64_MAX / 2));
    const auto step = common_step(offers);
    if (!step) return fail("no step is common to all ranks");
    if (*step < least_step_)
      return fail(fmt::format("step {} counted, and {} is what is left", least_step_, *step));
    if (*step > most_step_)
      return fail(fmt::format("step {} was opened before its commit began", *step));
    if (whole_step_ > *step + options_.commit_every)
      return fail(fmt::format("steps {} to {} are lost", *step + 1, whole_step_));
    for (std::size_t rank = 0; rank < ranks_.size(); ++rank)
      ranks_[rank]->settle(*step, rank == cut_rank ? requests : UINT64_MAX / 2);
    for (const auto& rank : ranks_) {
      const std::string loss = rank->find_loss();
      if (!loss.empty()) return fail(loss);
      result_.went_back += rank->went_back() ? 1 : 0;
    }
    if (random_() % 4 == 0) flip(*step);
    least_step_ = most_step_ = whole_step_ = *step;
  }

  // One damaged bit in a record's twin changes nothing.
  void flip(std::uint64_t step) {
    SimulatedRank& rank = *ranks_[random_() % ranks_.size()];
    rank.flip_record_bit(random_());
    const CommitOffer offer = rank.open(UINT64_MAX / 2);
    if (offer.newest != step)
      return fail(fmt::format("one bit of a record has flipped, and step {} is gone", step));
    rank.settle(step, UINT64_MAX / 2);
    const std::string loss = rank.find_loss();
    if (!loss.empty()) fail(loss);
  }

  void fail(std::string failure) { result_.failure = std::move(failure); }

  const SimulationOptions options_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<SimulatedRank>> ranks_;
  SimulationResult result_;
  std::uint64_t idle_events_ = 0;
  std::uint64_t least_step_ = 0;  // that counted on all ranks
  std::uint64_t most_step_ = 0;   // whose commit any rank had begun
  std::uint64_t whole_step_ = 0;  // that was whole on all ranks
};

}  // namespace

SimulationResult simulate_store(const SimulationOptions& options) {
  return Simulation(options).run();
}

}  // namespace sluice::test
