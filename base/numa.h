// The NUMA nodes that this process may compute on, and the binding of threads to nodes. Memory
// belongs to the node whose thread touched the memory first, and a drive is slow through another
// node's memory controller. So threads of all nodes touch large buffers in turn, and the threads of
// an arena are spread over the nodes. With only one node, memory and threads are not spread. Thread
// rule: constant after construction; binding concerns the calling thread alone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace sluice {

class NumaNodes {
 public:
  // The nodes of this machine, within the process's affinity; read at the first call.
  static const NumaNodes& of_machine();
  // Nodes in hwloc's notation ("node:2 core:4 pu:1"), for tests. Such an object binds no threads.
  explicit NumaNodes(const std::string& synthetic);
  ~NumaNodes();

  // The number of nodes with processing units that the process may use; at least 1.
  unsigned count() const;
  // The node for share `index` of `total` equal shares of work. Each node gets consecutive shares,
  // in proportion to its processing units.
  // Requires: index < total.
  unsigned node_of(std::uint64_t index, std::uint64_t total) const;

  // Binding is best effort: if the kernel refuses, the thread stays unbound and only speed suffers.
  void bind_this_thread(unsigned node) const noexcept;
  void unbind_this_thread() const noexcept;

 private:
  struct Content;
  NumaNodes();

  std::unique_ptr<Content> content_;
};

}  // namespace sluice
