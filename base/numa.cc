#include "base/numa.h"

#include <hwloc.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include <sluice/error.h>

namespace sluice {

struct NumaNodes::Content {
  struct BitmapFree {
    void operator()(hwloc_bitmap_s* bitmap) const { hwloc_bitmap_free(bitmap); }
  };
  using Bitmap = std::unique_ptr<hwloc_bitmap_s, BitmapFree>;

  // Without a topology there is one node, and nothing to bind to.
  explicit Content(const char* synthetic) {
    hwloc_topology_t made = nullptr;
    if (hwloc_topology_init(&made) != 0) return;
    topology.reset(made);
    if (synthetic != nullptr && hwloc_topology_set_synthetic(topology.get(), synthetic) != 0)
      throw Error(ErrorCode::kInvalidArgument, std::string("no topology: ") + synthetic);
    if (hwloc_topology_load(topology.get()) == 0) read();
  }

  void read() {
    usable.reset(hwloc_bitmap_dup(hwloc_topology_get_allowed_cpuset(topology.get())));
    const Bitmap bound(hwloc_bitmap_alloc());
    if (hwloc_get_cpubind(topology.get(), bound.get(), HWLOC_CPUBIND_PROCESS) == 0)
      hwloc_bitmap_and(usable.get(), usable.get(), bound.get());
    const int all = hwloc_get_nbobjs_by_type(topology.get(), HWLOC_OBJ_NUMANODE);
    for (int i = 0; i < all; ++i) {
      const auto index = static_cast<unsigned>(i);
      Bitmap units(hwloc_bitmap_alloc());
      hwloc_bitmap_and(units.get(), usable.get(),
                       hwloc_get_obj_by_type(topology.get(), HWLOC_OBJ_NUMANODE, index)->cpuset);
      const int unit_count = hwloc_bitmap_weight(units.get());
      if (unit_count <= 0) continue;  // memory alone, or not ours
      unit_counts.push_back(static_cast<std::uint64_t>(unit_count));
      units_of.push_back(std::move(units));
    }
  }

  void bind(const Bitmap& units) const noexcept {
    (void)hwloc_set_cpubind(topology.get(), units.get(), HWLOC_CPUBIND_THREAD);
  }

  struct TopologyFree {
    void operator()(hwloc_topology* made) const { hwloc_topology_destroy(made); }
  };
  std::unique_ptr<hwloc_topology, TopologyFree> topology;
  Bitmap usable;
  std::vector<Bitmap> units_of;
  std::vector<std::uint64_t> unit_counts;
};

NumaNodes::NumaNodes() : content_(std::make_unique<Content>(nullptr)) {}

NumaNodes::NumaNodes(const std::string& synthetic)
    : content_(std::make_unique<Content>(synthetic.c_str())) {}

NumaNodes::~NumaNodes() = default;

const NumaNodes& NumaNodes::of_machine() {
  static const NumaNodes nodes;
  return nodes;
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
  if (count() > 1) content_->bind(content_->units_of[node]);
}

void NumaNodes::unbind_this_thread() const noexcept {
  if (count() > 1) content_->bind(content_->usable);
}

}  // namespace sluice
