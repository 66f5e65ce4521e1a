#include "engine/detached/detached_flow.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "base/trace/trace_ranges.h"
#include "engine/plan/striping.h"
#include "engine/store/storage_files.h"
#include "engine/store/storage_queue.h"
#include "engine/store/transfer_error.h"
#include "io/checksum.h"

namespace sluice {
namespace {

// Records in host memory that are with the worker at once, so that it never waits for the next one.
constexpr std::uint32_t kHostFlights = 4;

}  // namespace

DetachedFlow::DetachedFlow(const Config::Storage& storage, const Parts& parts,
                           const QueueDecorator& decorate)
    : plan_(parts.plan),
      tensors_(parts.tensors),
      scheduler_(parts.scheduler),
      worker_(parts.worker),
      staging_(parts.staging),
      flights_(plan_.lanes + std::max(kHostFlights, plan_.staging_slots)),
      homes_(plan_.blocks.size()),
      integrity_(storage.verify, 2 * plan_.blocks.size()),
      watch_(storage.timeout_s,
             {.describe = [this](const Transfer& transfer) { return describe(transfer); },
              .on_stuck =
                  [this](const Error& error) {
                    scheduler_.fail(error);
                    scheduler_.post([] {});  // makes the waiters check again
                  }}) {
  for (Flight& flight : flights_) flight.flow = this;
  place_homes(storage);
  open_queue(storage, decorate);
}

DetachedFlow::~DetachedFlow() {
  scheduler_.await_settled([this] {
    is_closing_ = true;
    jobs_.clear();
    return watch_.is_stuck() || is_at_rest();
  });
  // If a drive does not answer, this waits for it.
  if (queue_) queue_->wait_idle();
  scheduler_.await_settled([this] { return is_at_rest(); });
}

bool DetachedFlow::is_at_rest() const {
  return !is_staging() &&
         std::ranges::none_of(flights_, [](const Flight& flight) { return flight.is_moving; });
}

void DetachedFlow::place_homes(const Config::Storage& storage) {
  if (plan_.storage_bytes != 0) {
    const std::vector<double> weights = storage_weights(storage);
    DriveDealer dealer(weights);
    for (std::size_t i = 0; i < plan_.blocks.size(); ++i) {
      if (!plan_.blocks[i].is_on_storage) continue;
      Extent& extent = homes_[i].extent;
      extent.length_bytes = plan_.blocks[i].format.size_bytes();
      const std::vector<std::uint64_t> before = dealer.drive_bytes();
      extent.file = dealer.deal(extent.length_bytes);
      extent.offset_bytes = before[extent.file];
    }
    for (std::size_t file = 0; file < storage.paths.size(); ++file)
      files_.push_back(DirectFile::create_scratch(storage.paths[file], dealer.drive_bytes()[file]));
    check_alignment(files_);
    if (std::string note = note_of_cached(files_); !note.empty()) watch_.note(std::move(note));
  }
  memory_ = AlignedBuffer(plan_.state_bytes(), "the optimizer's state in host memory");
  std::byte* next = memory_.data();
  for (std::uint32_t lane = 0; lane < plan_.lanes; ++lane, next += plan_.lane_bytes)
    flights_[lane].lane = next;
  for (std::size_t i = 0; i < plan_.blocks.size(); ++i) {
    if (plan_.blocks[i].is_on_storage) continue;
    homes_[i].record = next;
    next += plan_.blocks[i].format.size_bytes();
  }
}

void DetachedFlow::open_queue(const Config::Storage& storage, const QueueDecorator& decorate) {
  if (files_.empty()) return;
  std::vector<int> descriptors;
  for (const DirectFile& file : files_) descriptors.push_back(file.descriptor());
  std::string note;
  queue_ = open_io_queue(storage,
                         {.transfers_max = plan_.lanes,
                          .memory = memory_.span().first(plan_.lanes * plan_.lane_bytes),
                          .files = descriptors},
                         note);
  if (!note.empty()) watch_.note(std::move(note));
  if (decorate) queue_ = decorate(std::move(queue_));
}

bool DetachedFlow::settle() {
  if (is_closing_ || scheduler_.failed()) return false;
  bool has_moved = false;
  while (!jobs_.empty() && start_next()) has_moved = true;
  return (jobs_.empty() && read_ahead()) || has_moved;
}

bool DetachedFlow::start_next() {
  DetachedJob& job = jobs_.front();
  Home& home = homes_[job.block];
  if (home.flight != nullptr && home.flight->job) return false;  // one job per block at a time
  if (job.remote && (home.is_leaving || !staging_->has_place())) return false;
  const bool needs_lane = home.record == nullptr;
  Flight* const flight = home.flight != nullptr ? home.flight : free_flight(needs_lane);
  if (flight == nullptr) return false;
  if (job.kind == DetachedJob::Kind::kUpdate) {
    if (last_updated_) homes_[*last_updated_].next = job.block;
    last_updated_ = job.block;
  }
  const bool was_read_ahead = home.flight != nullptr;
  flight->job = std::move(job);
  jobs_.pop_front();
  ++flights_with_job_;
  if (!was_read_ahead) board(*flight, flight->job->block);
  if (flight->job->remote) bring(*flight);
  if (!was_read_ahead && needs_lane) {
    if (home.version != 0) {
      move(*flight, IoKind::kRead);
      return true;
    }
    std::fill_n(flight->lane, home.extent.length_bytes, std::byte{0});
  }
  work_if_ready(*flight);
  return true;
}

void DetachedFlow::bring(Flight& flight) {
  flight.place = staging_->take();
  flight.job->remote->update = homes_[*flight.block].version + 1;
  flight.is_coming = true;
  staging_->bring(*flight.place, *flight.block, *flight.job->remote, [this, &flight] {
    flight.is_coming = false;
    work_if_ready(flight);
  });
}

// Reads the blocks that are expected next into lanes that nothing else needs.
bool DetachedFlow::read_ahead() {
  if (!last_updated_ || plan_.lanes == 0) return false;
  bool has_moved = false;
  std::uint32_t expected = 0;
  std::optional<std::uint32_t> block = homes_[*last_updated_].next;
  for (std::size_t i = 0; i < homes_.size() && block && expected < plan_.lanes; ++i) {
    const Home& home = homes_[*block];
    if (home.record == nullptr && home.version != 0) {
      ++expected;
      if (home.flight == nullptr) {
        const auto flight = std::ranges::find_if(
            flights_, [](const Flight& one) { return one.lane != nullptr && !one.block; });
        if (flight == flights_.end()) break;
        board(*flight, *block);
        move(*flight, IoKind::kRead);
        has_moved = true;
      }
    }
    block = home.next;
  }
  return has_moved;
}

// A flight that is free, or was read ahead and not requested; null while there is none.
DetachedFlow::Flight* DetachedFlow::free_flight(bool needs_lane) {
  Flight* unused = nullptr;
  for (Flight& flight : flights_) {
    if ((flight.lane != nullptr) != needs_lane || flight.job || flight.is_moving) continue;
    if (!flight.block) return &flight;
    unused = &flight;  // the last one read ahead would be needed last
  }
  if (unused != nullptr) forget(*unused);
  return unused;
}

void DetachedFlow::forget(Flight& flight) {
  homes_[*flight.block].flight = nullptr;
  flight.block.reset();
}

void DetachedFlow::board(Flight& flight, std::uint32_t block) {
  flight.block = block;
  homes_[block].flight = &flight;
}

void DetachedFlow::move(Flight& flight, IoKind kind) {
  const Home& home = homes_[*flight.block];
  Transfer& transfer = flight.transfer;
  transfer.block = BlockId{*flight.block};
  transfer.plane = Plane::kRecord;
  transfer.version = home.version + (kind == IoKind::kWrite ? 1 : 0);
  transfer.is_reread = false;
  transfer.begin_ns = trace_now_ns();
  transfer.request = {.kind = kind,
                      .priority = kind == IoKind::kRead ? IoPriority::kNormal : IoPriority::kLow,
                      .drive = home.extent.file,
                      .descriptor = files_[home.extent.file].descriptor(),
                      .offset_bytes = home.extent.offset_bytes,
                      .data = flight.lane,
                      .length_bytes = home.extent.length_bytes};
  flight.is_moving = true;
  submit(flight);
}

void DetachedFlow::submit(Flight& flight) {
  IoRequest& request = flight.transfer.request;
  request.context = &flight;
  request.on_complete = [](IoRequest& completed) {
    auto* const ended = static_cast<Flight*>(completed.context);
    DetachedFlow* const flow = ended->flow;
    flow->take_sum(ended->transfer);
    flow->watch_.remove(ended->transfer);
    flow->scheduler_.post([flow, ended] { flow->complete(*ended); });
  };
  watch_.add(flight.transfer, request);
  IoRequest* const submitted = &request;
  queue_->submit({&submitted, 1});
}

// Runs on the queue's thread.
void DetachedFlow::take_sum(Transfer& transfer) const {
  const IoRequest& request = transfer.request;
  transfer.sum.reset();
  if (request.error == 0 && integrity_.wants(plane_of(transfer), transfer.version))
    transfer.sum = checksum({request.data, request.length_bytes});
}

void DetachedFlow::complete(Flight& flight) {
  Transfer& transfer = flight.transfer;
  if (const std::optional<Error> fault = fault_of(transfer)) {
    if (repeats_read(transfer)) {
      watch_.note(fmt::format("storage: a record is read again, because {}", fault->what()));
      return submit(flight);
    }
    scheduler_.fail(*fault);
    flight.is_moving = false;
    return;
  }
  flight.is_moving = false;
  trace(transfer);
  if (transfer.request.kind == IoKind::kRead) return work_if_ready(flight);
  integrity_.stored(plane_of(transfer), transfer.version, transfer.sum);
  homes_[*flight.block].version = transfer.version;
  land(flight);
}

// As in BlockStore; a tensor counts as a unit.
void DetachedFlow::trace(const Transfer& transfer) const {
  const IoRequest& request = transfer.request;
  const bool is_read = request.kind == IoKind::kRead;
  const std::uint64_t started_ns = std::max(request.started_ns, transfer.begin_ns);
  const std::uint64_t moved_ns = std::max(request.moved_ns, started_ns);
  trace_span({.begin_ns = transfer.begin_ns,
              .end_ns = std::max(trace_now_ns(), moved_ns),
              .started_ns = started_ns,
              .moved_ns = moved_ns,
              .size_bytes = request.length_bytes,
              .step = transfer.version + (is_read ? 1 : 0),
              .unit = plan_.blocks[block_of(transfer)].tensor,
              .block = block_of(transfer),
              .kind = is_read ? TraceKind::kRead : TraceKind::kWrite,
              .lane = static_cast<std::uint8_t>(request.drive),
              .detail = kTraceOptimizerState});
}

std::optional<Error> DetachedFlow::fault_of(const Transfer& transfer) const {
  const IoRequest& request = transfer.request;
  if (request.error != 0) return transfer_error(transfer, describe(transfer));
  if (request.kind == IoKind::kWrite || !transfer.sum) return std::nullopt;
  const std::optional<Damage> damage = integrity_.find_damage(
      plane_of(transfer), {request.data, request.length_bytes}, *transfer.sum);
  if (!damage) return std::nullopt;
  return Error(ErrorCode::kDamaged,
               fmt::format("{}: the bytes are not those that were written: checksum {:016x}, "
                           "expected {:016x} of change {}{}; check the drive (smartctl, dmesg)",
                           describe(transfer), damage->found, damage->expected, transfer.version,
                           transfer.is_reread ? ", twice" : ""));
}

void DetachedFlow::work_if_ready(Flight& flight) {
  if (!flight.job || flight.is_moving || flight.is_coming) return;
  if (!is_closing_ && !scheduler_.failed()) work(flight);
}

void DetachedFlow::work(Flight& flight) {
  flight.is_moving = true;
  ++working_;
  worker_.post(
      [this, &flight] {
        const Home& home = homes_[*flight.block];
        const DetachedBlock& block = plan_.blocks[*flight.block];
        std::optional<TraceScope> scope;
        if (flight.job->kind == DetachedJob::Kind::kUpdate)
          scope.emplace(TraceRecord{.size_bytes = block.format.size_bytes(),
                                    .step = home.version + 1,
                                    .unit = block.tensor,
                                    .block = *flight.block,
                                    .kind = TraceKind::kAdam});
        flight.job->work({.record = home.record != nullptr ? home.record : flight.lane,
                          .is_fresh = home.version == 0,
                          .place = flight.place.value_or(0)});
      },
      [this, &flight] { worked(flight); });
}

void DetachedFlow::worked(Flight& flight) {
  flight.is_moving = false;
  --working_;
  if (scheduler_.failed()) return;
  Home& home = homes_[*flight.block];
  if (flight.place) {
    home.is_leaving = true;
    staging_->send(*std::exchange(flight.place, std::nullopt), *flight.block, *flight.job->remote,
                   [&home, worked = std::move(flight.job->worked)] {
                     home.is_leaving = false;
                     worked();
                   });
  } else {
    flight.job->worked();
  }
  if (flight.job->kind == DetachedJob::Kind::kWrite && staging_ != nullptr)
    staging_->forget(*flight.block);
  const bool is_changed = flight.job->kind != DetachedJob::Kind::kRead;
  if (is_changed && home.record == nullptr && !is_closing_) return move(flight, IoKind::kWrite);
  if (is_changed && home.record != nullptr) ++home.version;
  land(flight);
}

void DetachedFlow::land(Flight& flight) {
  flight.job.reset();
  --flights_with_job_;
  forget(flight);
}

std::string DetachedFlow::describe(const Transfer& transfer) const {
  const DetachedBlock& block = plan_.blocks[block_of(transfer)];
  const Extent& extent = homes_[block_of(transfer)].extent;
  return fmt::format("{} of the state of \"{}\" [{}, +{}) in {} [{}, +{})",
                     transfer.request.kind == IoKind::kRead ? "read" : "write",
                     tensors_[block.tensor].name, block.first_element, block.element_count,
                     files_[extent.file].name(), extent.offset_bytes, extent.length_bytes);
}

}  // namespace sluice
