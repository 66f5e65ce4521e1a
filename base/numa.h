// The NUMA nodes that this process may compute on, and the binding of threads to nodes. A page of
// memory belongs to the node whose thread touched the page first. A drive is slow when its data
// crosses another node's memory controller. So the pages of large buffers and the threads of an
// arena are spread over all nodes. With only one node, memory and threads are not spread. A process
// that shares its machine with others may restrict itself to the nodes near its GPU. Thread rule:
// an object is constant after construction. A call that binds a thread affects only the calling
// thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace sluice {

class NumaNodes {
 public:
  // The nodes of this machine within the process's affinity mask. The first call asks the system
  // for the nodes. After stay_near(), the result has only the nodes and the processors that
  // stay_near() selected.
  static const NumaNodes& of_machine();
  // Restricts this process to `processors`, in the kernel's notation ("0-15,32-47"). The buffers
  // and arenas that are made later lie on the nodes of these processors. The threads that
  // start_thread() starts later run on these processors. Threads and memory that already exist stay
  // where they are. If the process may use none of the processors, the call changes nothing and
  // returns false.
  static bool stay_near(const std::string& processors);
  // Whether new threads have to be bound, because those of their creator are not the processors
  // that the process computes on: after stay_near(), and where OpenMP binds threads
  // (base/openmp_places.h).
  static bool binds_new_threads() noexcept;
  // Binds the calling thread to all processors of of_machine() if binds_new_threads() is true.
  static void bind_new_thread() noexcept;

  // Makes nodes from a description in hwloc's notation ("node:2 core:4 pu:1"), for tests. Such an
  // object binds no threads.
  explicit NumaNodes(const std::string& synthetic);
  ~NumaNodes();

  // Returns the nodes that have some of `processors`. In the result, each node has only processors
  // from `processors`. stay_near() selects the same nodes. The result is null if no node has any of
  // the processors.
  std::unique_ptr<NumaNodes> near(const std::string& processors) const;
  // Returns whether near() made this object.
  bool is_part() const;
  // The processors of these nodes, in the kernel's notation.
  std::string processors() const;

  // The number of nodes that have processors for this process; at least 1.
  unsigned count() const;
  // The work is divided into `total` equal shares. Returns the node that computes the share with
  // number `index`. Each node gets consecutive shares. The number of a node's shares is in
  // proportion to the number of the node's processors. Requires: index < total.
  unsigned node_of(std::uint64_t index, std::uint64_t total) const;

  // Binding is best effort. If the kernel refuses to bind the thread, the thread stays unbound and
  // may be slower.
  void bind_this_thread(unsigned node) const noexcept;
  void unbind_this_thread() const noexcept;

 private:
  struct Content;
  NumaNodes();
  explicit NumaNodes(std::unique_ptr<Content> content);

  std::unique_ptr<Content> content_;
};

}  // namespace sluice
