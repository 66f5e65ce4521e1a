// An optimizer for applications that keep parameters and gradients themselves, such as a program in
// PyTorch. Moments and exact fp32 masters live in host memory or on storage, and each update
// streams them through the CPU. Only the tensors have to be declared beforehand. An update names
// the tensors that have a gradient, in any order, each with its own step and hyperparameters.
//
//   DetachedOptimizer optimizer(config, {{.name = "weight", .element_count = 1 << 20}});
//   optimizer.begin(updates);  // the state is read, updated and written in the background
//   optimizer.wait(0);         // "weight" has its new value
//   optimizer.wait_all();      // everything has, and every moment is home
//
// Thread rule: one thread at a time.
// Invariants: no bit of a result depends on the place of the state or on its division into blocks.
// An fp32 parameter is its own master. For a 16-bit parameter, the optimizer keeps a master and the
// 16 bits that were last made from the master. If the application has changed the parameter since
// then, the new value becomes the master.
// Failure: a failed transfer stops the optimizer permanently, and every later call throws the same
// error.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <sluice/config.h>
#include <sluice/dtype.h>
#include <sluice/export.h>
#include <sluice/optimizer.h>
#include <sluice/state.h>

namespace sluice {

struct DetachedOverQueue;

struct DetachedTensor {
  std::string name;
  std::uint64_t element_count = 0;  // may be 0, as for a rank's share of a small tensor
  DType parameter = DType::kFp32;
};

// One step of one tensor. Parameter and gradient are contiguous. From begin() to wait() of the
// tensor, parameter and gradient belong to the optimizer, which writes the parameter and reads the
// gradient.
struct DetachedUpdate {
  std::uint32_t tensor = 0;
  void* parameter = nullptr;
  const void* gradient = nullptr;
  DType gradient_dtype = DType::kFp32;
  std::uint64_t step = 1;  // of this tensor, from 1 on; corrects the bias
  double learning_rate = 0;
  AdamOptions adam;  // sluice/optimizer.h says which optimizer reads which
  double momentum = 0;
  double gradient_scale = 1;  // multiplies the gradient
};

struct DetachedReport {
  // Since the optimizer was made.
  std::uint64_t read_bytes = 0;         // from storage
  std::uint64_t write_bytes = 0;        // to storage
  std::uint64_t updated_elements = 0;   // whose update is complete
  std::uint64_t adopted_elements = 0;   // 16-bit values that the application had changed
  std::uint64_t non_finite_blocks = 0;  // blocks that an update left with an infinity or a NaN
  std::string non_finite_tensor;        // the tensor of the first of them
  // As planned.
  std::uint64_t host_bytes = 0;       // in host memory: state, and lanes for state on storage
  std::uint64_t storage_bytes = 0;    // on storage
  std::uint64_t pass_read_bytes = 0;  // read by one update of every tensor; as many are written
};

class SLUICE_EXPORT DetachedOptimizer {
 public:
  // Uses optimizer.type, placement.optimizer, memory.host, storage and run.threads of `config`.
  // Small tensors stay in host memory under placement "nvme", too. The state begins with zero
  // moments.
  // Fails with: kConfig (placement "device"), kOutOfMemory (memory.host, naming the smallest that
  // works), kInvalidArgument (tensors), kInput, kNoSpace, kUnsupported.
  DetachedOptimizer(const Config& config, std::vector<DetachedTensor> tensors);
  // Stops the updates under way. Parameters that no wait() has covered may then be partly updated.
  ~DetachedOptimizer();
  DetachedOptimizer(const DetachedOptimizer&) = delete;
  DetachedOptimizer& operator=(const DetachedOptimizer&) = delete;

  // Starts `updates` in their order, after the updates that are already under way.
  // Fails with: kInvalidArgument naming tensor and value, before anything is changed; the first
  // failure, if there was one.
  void begin(std::span<const DetachedUpdate> updates);
  // Returns when every update of `tensor` that has begun has written the parameter. Parameter and
  // gradient belong to the application again.
  // Fails with: kInvalidArgument; the first failure.
  void wait(std::uint32_t tensor);
  // The same for all tensors.
  void wait_parameters();
  // The same as wait_parameters(), but also waits until all state is at home.
  void wait_all();
  // How many tensors have an update that has not written the parameter yet.
  std::uint32_t pending_tensors();

  // Copies elements [first_element, ...) of a tensor's state, as fp32. `kParameter` and `kMaster`
  // exist only for 16-bit parameters, and are zero before the first update. `kParameter` gives the
  // 16 bits that were last made from the master. Moments that the optimizer does not keep are zero.
  // The call waits for updates of the tensor that have begun.
  // Fails with: kInvalidArgument for a tensor, a kind or a range that does not exist; kIo and
  // others.
  void read(std::uint32_t tensor, StateKind kind, std::uint64_t first_element,
            std::span<float> target);
  // Sets elements of a tensor's state. Setting a master also sets the parameter's 16 bits. At the
  // next update, the application's parameter has to hold the same 16 bits. Otherwise the value of
  // the application's parameter becomes the master.
  // Fails with: as read(); kInvalidArgument for a moment that the optimizer does not keep, and for
  // kParameter.
  void write(std::uint32_t tensor, StateKind kind, std::uint64_t first_element,
             std::span<const float> source);

  DetachedReport report();
  // Lines for the user about choices that this machine forced.
  const std::vector<std::string>& notes() const;

 private:
  friend struct DetachedOverQueue;  // engine/detached/detached_over_queue.h, for tests
  struct Parts;
  explicit DetachedOptimizer(std::unique_ptr<Parts> parts);

  std::unique_ptr<Parts> parts_;
};

}  // namespace sluice
