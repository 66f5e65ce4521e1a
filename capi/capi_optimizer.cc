// The detached optimizer behind the C interface.
#include <algorithm>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <sluice/config_document.h>
#include <sluice/cuda_device.h>
#include <sluice/detached_optimizer.h>
#include <sluice/units.h>

#include "capi/call_guard.h"
#include "capi/sluice_gpu.h"

using namespace sluice;

struct sluice_optimizer : Handle {
  static constexpr const char* kNoun = "optimizer";

  std::unique_ptr<CudaDevice> gpu;  // null without tensors on one
  std::map<void*, Stream> streams;  // those of the application, adopted
  std::unique_ptr<DetachedOptimizer> optimizer;
  std::deque<std::string> notes;
  std::string note;  // the last one returned
};

namespace {

// The optimizer takes no memory of the GPU.
constexpr std::uint64_t kGpuBytes = 1_MiB;

DType type_from_c(const char* call, std::int32_t type) {
  switch (type) {
    case SLUICE_FP32: return DType::kFp32;
    case SLUICE_BF16: return DType::kBf16;
    case SLUICE_FP16: return DType::kFp16;
    default: refuse(fmt::format("{}: type {} is not a sluice_type", call, type));
  }
}

DetachedUpdate update_from_c(const char* call, const sluice_update& update) {
  return {.tensor = update.tensor,
          .parameter = update.parameter,
          .gradient = update.gradient,
          .gradient_dtype = type_from_c(call, update.gradient_type),
          .step = update.step,
          .learning_rate = update.learning_rate,
          .adam = {.beta1 = update.beta1,
                   .beta2 = update.beta2,
                   .epsilon = update.epsilon,
                   .weight_decay = update.weight_decay},
          .momentum = update.momentum,
          .gradient_scale = update.gradient_scale};
}

std::vector<DetachedUpdate> updates_from_c(const char* call, const sluice_update* updates,
                                           std::uint32_t count) {
  if (count != 0) require(updates, call, "updates");
  std::vector<DetachedUpdate> begun;
  for (const sluice_update& update : std::span(updates, count))
    begun.push_back(update_from_c(call, update));
  return begun;
}

// `make` makes the optimizer inside of the handle.
template <typename Make>
void create(const char* call, const char* config_json, const sluice_optimizer_tensor* tensors,
            std::uint32_t tensor_count, sluice_optimizer** optimizer, const Make& make) {
  require(optimizer, call, "the place for the optimizer");
  *optimizer = nullptr;
  require(config_json, call, "config_json");
  if (tensor_count != 0) require(tensors, call, "tensors");
  std::vector<DetachedTensor> described;
  for (const sluice_optimizer_tensor& tensor : std::span(tensors, tensor_count)) {
    require(tensor.name, call, "the name of a tensor");
    described.push_back({.name = tensor.name,
                         .element_count = tensor.element_count,
                         .parameter = type_from_c(call, tensor.parameter_type),
                         .is_on_device = tensor.is_on_gpu != 0});
  }
  const Config config = engine_config(ConfigDocument(config_json, "config"));
  auto made = std::make_unique<sluice_optimizer>();
  make(*made, config, std::move(described));
  *optimizer = made.release();
}

StateKind kind_from_c(const char* call, std::int32_t kind) {
  if (kind < SLUICE_PARAMETER || kind > SLUICE_EXP_AVG_SQ)
    refuse(fmt::format("{}: kind is {}; it must be a sluice_state", call, kind));
  return static_cast<StateKind>(kind);
}

}  // namespace

extern "C" {

sluice_status sluice_optimizer_create(const char* config_json,
                                      const sluice_optimizer_tensor* tensors, uint32_t tensor_count,
                                      sluice_optimizer** optimizer) {
  const char* const name = __func__;
  return guarded([&] {
    create(name, config_json, tensors, tensor_count, optimizer,
           [](sluice_optimizer& made, const Config& config, std::vector<DetachedTensor> described) {
             made.optimizer = std::make_unique<DetachedOptimizer>(config, std::move(described));
           });
  });
}

sluice_status sluice_optimizer_create_on_gpu(const char* config_json,
                                             const sluice_optimizer_tensor* tensors,
                                             uint32_t tensor_count, int32_t gpu,
                                             sluice_optimizer** optimizer) {
  const char* const name = __func__;
  return guarded([&] {
    create(
        name, config_json, tensors, tensor_count, optimizer,
        [&](sluice_optimizer& made, const Config& config, std::vector<DetachedTensor> described) {
          made.gpu = make_cuda_device({.ordinal = gpu, .memory_bytes = kGpuBytes});
          made.optimizer =
              std::make_unique<DetachedOptimizer>(config, std::move(described), *made.gpu);
        });
  });
}

void sluice_optimizer_destroy(sluice_optimizer* optimizer) {
  destroy(optimizer);
}

sluice_status sluice_optimizer_begin(sluice_optimizer* optimizer, const sluice_update* updates,
                                     uint32_t update_count) {
  return guarded(optimizer, __func__, [&](const char* name) {
    optimizer->optimizer->begin(updates_from_c(name, updates, update_count));
  });
}

sluice_status sluice_optimizer_begin_on_gpu(sluice_optimizer* optimizer,
                                            const sluice_update* updates, uint32_t update_count,
                                            void* gpu_stream) {
  return guarded(optimizer, __func__, [&](const char* name) {
    if (optimizer->gpu == nullptr)
      refuse(fmt::format("{}: the optimizer was made without a GPU", name));
    const std::vector<DetachedUpdate> begun = updates_from_c(name, updates, update_count);
    auto stream = optimizer->streams.find(gpu_stream);
    if (stream == optimizer->streams.end())
      stream =
          optimizer->streams.emplace(gpu_stream, optimizer->gpu->adopt_stream(gpu_stream)).first;
    optimizer->optimizer->begin(begun, stream->second.id());
  });
}

sluice_status sluice_optimizer_wait(sluice_optimizer* optimizer, uint32_t tensor) {
  return guarded(optimizer, __func__, [&](const char*) {
    if (tensor == SLUICE_ALL_TENSORS) {
      optimizer->optimizer->wait_parameters();
    } else {
      optimizer->optimizer->wait(tensor);
    }
  });
}

sluice_status sluice_optimizer_wait_all(sluice_optimizer* optimizer) {
  return guarded(optimizer, __func__, [&](const char*) { optimizer->optimizer->wait_all(); });
}

sluice_status sluice_optimizer_read(sluice_optimizer* optimizer, uint32_t tensor, int32_t kind,
                                    uint64_t first, uint64_t element_count, float* target) {
  return guarded(optimizer, __func__, [&](const char* name) {
    if (element_count != 0) require(target, name, "the target");
    optimizer->optimizer->read(tensor, kind_from_c(name, kind), first, {target, element_count});
  });
}

sluice_status sluice_optimizer_write(sluice_optimizer* optimizer, uint32_t tensor, int32_t kind,
                                     uint64_t first, uint64_t element_count, const float* source) {
  return guarded(optimizer, __func__, [&](const char* name) {
    if (element_count != 0) require(source, name, "the source");
    optimizer->optimizer->write(tensor, kind_from_c(name, kind), first, {source, element_count});
  });
}

sluice_status sluice_optimizer_describe(sluice_optimizer* optimizer,
                                        sluice_optimizer_report* report) {
  return guarded(optimizer, __func__, [&](const char* name) {
    require(report, name, "the report");
    const DetachedReport made = optimizer->optimizer->report();
    *report = {.nvme_read_bytes = made.read_bytes,
               .nvme_write_bytes = made.write_bytes,
               .updated_elements = made.updated_elements,
               .adopted_elements = made.adopted_elements,
               .non_finite_blocks = made.non_finite_blocks,
               .host_bytes = made.host_bytes,
               .nvme_bytes = made.storage_bytes,
               .pass_bytes = made.pass_read_bytes,
               .pending_tensors = optimizer->optimizer->pending_tensors(),
               .reserved = 0};
  });
}

sluice_status sluice_optimizer_note(sluice_optimizer* optimizer, const char** note) {
  return guarded(optimizer, __func__, [&](const char* name) {
    require(note, name, "the place for the note");
    *note = nullptr;
    std::ranges::move(optimizer->optimizer->take_notes(), std::back_inserter(optimizer->notes));
    if (optimizer->notes.empty()) return;
    optimizer->note = std::move(optimizer->notes.front());
    optimizer->notes.pop_front();
    *note = optimizer->note.c_str();
  });
}

}  // extern "C"
