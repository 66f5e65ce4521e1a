#include "base/numa.h"

#include <hwloc.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <numeric>
#include <vector>

#include <sluice/error.h>
#include "base/openmp_places.h"

namespace sluice {
namespace {

// Never destroyed, because threads use it to the end of the process.
std::atomic<const NumaNodes*> part_of_process = nullptr;

bool openmp_binds_threads() {
  static const bool binds = !openmp_processors().empty();
  return binds;
}

}  // namespace

struct NumaNodes::Content {
  struct BitmapFree {
    void operator()(hwloc_bitmap_s* bitmap) const { hwloc_bitmap_free(bitmap); }
  };
  using Bitmap = std::unique_ptr<hwloc_bitmap_s, BitmapFree>;

  // Without a topology there is one node, and nothing to bind to.
  explicit Content(const char* synthetic) {
    hwloc_topology_t made = nullptr;
    if (hwloc_topology_init(&made) != 0) return;
    topology.reset(made, TopologyFree());
    if (synthetic != nullptr && hwloc_topology_set_synthetic(topology.get(), synthetic) != 0)
      throw Error(ErrorCode::kInvalidArgument, std::string("no topology: ") + synthetic);
    if (hwloc_topology_load(topology.get()) == 0) read();
  }

  // Takes over `whole`'s machine, but of its units only those in `wanted`.
  Content(const Content& whole, const hwloc_bitmap_s* wanted)
      : topology(whole.topology), is_part(true) {
    usable.reset(hwloc_bitmap_dup(whole.usable.get()));
    hwloc_bitmap_and(usable.get(), usable.get(), wanted);
    for (const Bitmap& of_node : whole.units_of) {
      Bitmap units(hwloc_bitmap_dup(of_node.get()));
      hwloc_bitmap_and(units.get(), units.get(), wanted);
      add(std::move(units));
    }
  }

  void add(Bitmap units) {
    const int unit_count = hwloc_bitmap_weight(units.get());
    if (unit_count <= 0) return;  // memory alone, or not ours
    unit_counts.push_back(static_cast<std::uint64_t>(unit_count));
    units_of.push_back(std::move(units));
  }

  void read() {
    usable.reset(hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(topology.get())));
    const Bitmap bound(hwloc_bitmap_alloc());
    if (hwloc_get_cpubind(topology.get(), bound.get(), HWLOC_CPUBIND_PROCESS) == 0) {
      for (const int processor : openmp_processors())
        hwloc_bitmap_set(bound.get(), static_cast<unsigned>(processor));
      hwloc_bitmap_and(usable.get(), usable.get(), bound.get());
    }
    const int all = hwloc_get_nbobjs_by_type(topology.get(), HWLOC_OBJ_NUMANODE);
    for (int i = 0; i < all; ++i) {
      const auto index = static_cast<unsigned>(i);
      Bitmap units(hwloc_bitmap_alloc());
      hwloc_bitmap_and(units.get(), usable.get(),
                       hwloc_get_obj_by_type(topology.get(), HWLOC_OBJ_NUMANODE, index)->cpuset);
      add(std::move(units));
    }
  }

  bool binds_threads() const noexcept {
    return units_of.size() > 1 || (!units_of.empty() && (is_part || openmp_binds_threads()));
  }

  void bind(const Bitmap& units) const noexcept {
    (void)hwloc_set_cpubind(topology.get(), units.get(), HWLOC_CPUBIND_THREAD);
  }

  struct TopologyFree {
    void operator()(hwloc_topology* made) const { hwloc_topology_destroy(made); }
  };
  std::shared_ptr<hwloc_topology> topology;
  bool is_part = false;
  Bitmap usable;
  std::vector<Bitmap> units_of;
  std::vector<std::uint64_t> unit_counts;
};

NumaNodes::NumaNodes() : content_(std::make_unique<Content>(nullptr)) {}

NumaNodes::NumaNodes(const std::string& synthetic)
    : content_(std::make_unique<Content>(synthetic.c_str())) {}

NumaNodes::NumaNodes(std::unique_ptr<Content> content) : content_(std::move(content)) {}

NumaNodes::~NumaNodes() = default;

const NumaNodes& NumaNodes::of_machine() {
  if (const NumaNodes* const part = part_of_process) return *part;
  static const NumaNodes nodes;
  return nodes;
}

bool NumaNodes::stay_near(const std::string& processors) {
  std::unique_ptr<NumaNodes> part = of_machine().near(processors);
  if (part == nullptr) return false;
  part_of_process = part.release();
  return true;
}

bool NumaNodes::binds_new_threads() noexcept {
  return part_of_process != nullptr || openmp_binds_threads();
}

void NumaNodes::bind_new_thread() noexcept {
  if (binds_new_threads()) of_machine().unbind_this_thread();
}

std::unique_ptr<NumaNodes> NumaNodes::near(const std::string& processors) const {
  const Content::Bitmap wanted(hwloc_bitmap_alloc());
  if (content_->usable == nullptr || processors.empty() ||
      hwloc_bitmap_list_sscanf(wanted.get(), processors.c_str()) != 0)
    return nullptr;
  auto part = std::make_unique<Content>(*content_, wanted.get());
  if (part->units_of.empty()) return nullptr;
  return std::unique_ptr<NumaNodes>(new NumaNodes(std::move(part)));
}

bool NumaNodes::is_part() const {
  return content_->is_part;
}

std::string NumaNodes::processors() const {
  char* text = nullptr;
  if (content_->usable == nullptr || hwloc_bitmap_list_asprintf(&text, content_->usable.get()) < 0)
    return "";
  std::string list = text;
  std::free(text);
  return list;
}

unsigned NumaNodes::count() const {
  return std::max(1u, static_cast<unsigned>(content_->units_of.size()));
}

unsigned NumaNodes::node_of(std::uint64_t index, std::uint64_t total) const {
  const std::vector<std::uint64_t>& counts = content_->unit_counts;
  const std::uint64_t all = std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
  // The middle of the share, in units: (index + 1/2) * all / total, doubled to stay an integer.
  const std::uint64_t middle = (2 * index + 1) * all;
  std::uint64_t below = 0;
  for (unsigned node = 0; node + 1 < counts.size(); ++node) {
    below += counts[node];
    if (middle < 2 * below * total) return node;
  }
  return count() - 1;
}

void NumaNodes::bind_this_thread(unsigned node) const noexcept {
  if (content_->binds_threads()) content_->bind(content_->units_of[node]);
}

void NumaNodes::unbind_this_thread() const noexcept {
  if (content_->binds_threads()) content_->bind(content_->usable);
}

}  // namespace sluice
