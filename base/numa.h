// The NUMA nodes that this process may compute on, and the binding of threads to nodes. Memory
// belongs to the node whose thread touched the memory first, and a drive is slow through another
// node's memory controller. So threads of all nodes touch large buffers in turn, and the threads of
// an arena are spread over the nodes. With only one node, memory and threads are not spread. A
// process that shares its machine with others may keep to the nodes near its GPU. Thread rule:
// constant after construction; binding concerns the calling thread alone.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace sluice {

class NumaNodes {
 public:
  // The nodes of this machine, within the process's affinity; read at the first call. After
  // stay_near(), the part that the call has chosen.
  static const NumaNodes& of_machine();
  // Keeps this process to `processors`, in the kernel's notation ("0-15,32-47"): buffers and arenas
  // that are made from now on lie there, and threads of start_thread() run there. Threads that run
  // already stay where they are, and so does memory. Returns whether there is such a part: the
  // process may use some of the processors.
  static bool stay_near(const std::string& processors);
  // Binds the calling thread to the part that stay_near() has chosen, if it was called.
  static void bind_new_thread() noexcept;

  // Nodes in hwloc's notation ("node:2 core:4 pu:1"), for tests. Such an object binds no threads.
  explicit NumaNodes(const std::string& synthetic);
  ~NumaNodes();

  // The part of the nodes that has `processors`, as under stay_near(). Null: there is none.
  std::unique_ptr<NumaNodes> near(const std::string& processors) const;
  // Whether the object comes from near().
  bool is_part() const;
  // The processing units, in the kernel's notation.
  std::string processors() const;

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
  explicit NumaNodes(std::unique_ptr<Content> content);

  std::unique_ptr<Content> content_;
};

}  // namespace sluice
