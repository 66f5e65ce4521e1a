// A table of jobs that are listed in advance. Each job has a predicate that says when the job may
// start. Jobs run on lines, and each line serves one job at a time. The time moves from the end of
// one job to the end of the next job. This file is a part of schedule_oracle.cc.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include <sluice/error.h>
#include "tests/engine/bound/schedule_oracle.h"

namespace sluice::test {

enum Line { kNone, kRead, kWrite, kUp, kDown, kCpu, kDeviceUpdate, kComputation, kLineCount };
using Rank = std::array<long, 3>;

struct Job {
  Line line = kNone;
  long duration = 0;
  long latency = 0;
  std::function<bool()> may_start = {};
  Rank rank{};
  std::function<void()> on_start = {};
  std::function<void()> on_end = {};
  std::function<void()> set_rank = {};
  long start = -1;
  long end = -1;
  bool has_ended = false;
  OracleEvent event{};  // the event that this job stands for, if any
};

class JobTable {
 public:
  virtual ~JobTable() = default;

 protected:
  // When jobs end at the same time, the table calls settle() after the last of these jobs has
  // ended.
  virtual void settle() = 0;

  using Id = int;  // the number of a job
  Id add(Job job) {
    jobs_.push_back(std::move(job));
    return static_cast<Id>(jobs_.size()) - 1;
  }
  bool started(Id job) const { return jobs_[job].start >= 0; }
  bool done(Id job) const { return job < 0 || (started(job) && jobs_[job].end <= now_); }
  std::ptrdiff_t undone(const std::vector<Id>& ids) const {
    return std::ranges::count_if(ids, [this](Id id) { return !done(id); });
  }
  bool all_done(const std::vector<Id>& ids) const { return undone(ids) == 0; }
  void start(Job& job) {
    job.start = now_;
    if (job.event.work != OracleWork::kNone && job.duration > 0) events_.push_back(job.event);
    if (job.on_start) job.on_start();
    job.end = now_ + job.duration + (job.line == kRead || job.line == kWrite ? job.latency : 0);
  }
  void end_what_does() {
    for (Job& job : jobs_) {
      if (job.start < 0 || job.has_ended || job.end > now_) continue;
      job.has_ended = true;
      if (job.on_end) job.on_end();
    }
    settle();
  }
  void start_what_may() {
    for (bool changed = true; changed;) {
      changed = false;
      for (Job& job : jobs_) {  // jobs without duration come first, in list order
        if (job.start >= 0 || (job.line != kNone && job.duration + job.latency > 0)) continue;
        if (!job.may_start()) continue;
        start(job);
        end_what_does();
        changed = true;
        break;
      }
    }
    for (int line = kRead; line < kLineCount; ++line) {
      Job* best = nullptr;
      bool is_free = true;
      for (Job& job : jobs_) {
        if (job.line != line) continue;
        if (job.start >= 0 && now_ < job.start + job.duration) is_free = false;
        if (job.start >= 0 || !job.may_start()) continue;
        if (job.set_rank) job.set_rank();
        if (best == nullptr || job.rank < best->rank) best = &job;
      }
      if (is_free && best != nullptr) start(*best);
    }
  }

  // The function moves the time to the next moment at which a job ends or leaves its line.
  void advance() {
    long next = -1;
    for (const Job& job : jobs_) {
      for (const long time : {job.start + job.duration, job.end}) {
        if (job.start >= 0 && time > now_ && (next < 0 || time < next)) next = time;
      }
    }
    SLUICE_CHECK(next > 0, "the oracle's schedule goes on");
    now_ = next;
    end_what_does();
  }

  std::vector<Job> jobs_;
  std::vector<OracleEvent> events_;
  long now_ = 0;
};

}  // namespace sluice::test
