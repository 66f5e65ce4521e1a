// An engine that computes on an NVIDIA GPU, behind the C interface.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include <sluice/cuda_device.h>
#include <sluice/error.h>

#include "capi/call_guard.h"
#include "capi/engine_handle.h"
#include "capi/sluice_gpu.h"
#include "capi/thread_text.h"
#include "engine/ranks/ranks.h"
#include "gpu/cuda/cuda_locality.h"
#include "gpu/cuda/kernel_list.h"
#include "gpu/ranks/launcher_environment.h"
#include "gpu/ranks/nccl_collectives.h"

using namespace sluice;

namespace {

constexpr std::string_view kDigits = "0123456789abcdef";

std::string text_of(const NcclId& id) {
  std::string text;
  for (const std::byte value : id) {
    text += kDigits[std::to_integer<unsigned>(value) >> 4];
    text += kDigits[std::to_integer<unsigned>(value) & 15];
  }
  return text;
}

NcclId id_of(std::string_view text, const char* call) {
  NcclId id{};
  if (text.size() != 2 * id.size() || text.find_first_not_of(kDigits) != std::string_view::npos)
    refuse(
        fmt::format("{}: ranks->id is no text of sluice_gpu_ranks_id(), which has {} digits "
                    "from 0 to f",
                    call, 2 * id.size()));
  for (std::size_t i = 0; i < id.size(); ++i)
    id[i] = static_cast<std::byte>(kDigits.find(text[2 * i]) << 4 | kDigits.find(text[2 * i + 1]));
  return id;
}

void check_ranks(const sluice_gpu_ranks& ranks, const char* call) {
  require(ranks.id, call, "ranks->id");
  if (ranks.rank_count < 2 || ranks.rank >= ranks.rank_count)
    refuse(
        fmt::format("{}: rank {} of {}; ranks count from 0, and there are at least 2 of them; "
                    "one rank has null ranks",
                    call, ranks.rank, ranks.rank_count));
}

// The program needs memory of the GPU for activations and more. How much, only the program knows.
void require_budget(const Config& config, int gpu) {
  if (config.memory.device_bytes) return;
  throw Error(ErrorCode::kConfig,
              fmt::format("memory.device is not set, and the program needs memory of {} beside the "
                          "engine; give the engine's part, for example \"memory\": {{\"device\": "
                          "\"4GiB\"}}",
                          describe_cuda_device(gpu)));
}

// The processes of this host among the ranks, as far as a launcher such as torchrun tells. With
// fewer processes than ranks, some ranks are threads of one process, which needs all of its
// processors.
unsigned rank_processes_of_host(const sluice_gpu_ranks& ranks) {
  try {
    const auto launch = find_launch([](const char* name) { return std::getenv(name); });
    return launch && launch->rank_count >= ranks.rank_count ? launch->local_rank_count : 1;
  } catch (const Error&) {
    return 1;  // the program has numbered the ranks itself, so variables may contradict each other
  }
}

MakeDevice on_gpu(int ordinal, const sluice_gpu_ranks* ranks, const NcclId& id) {
  return [=](const Config& config) {
    if (const std::string why = why_no_cuda_device(ordinal); !why.empty())
      throw Error(ErrorCode::kUnsupported, why);
    require_budget(config, ordinal);
    if (ranks != nullptr) {
      require_levels(config.sharding, ranks->rank_count);
      // Before the engine makes its pools and starts its threads.
      (void)stay_near_gpu(ordinal, rank_processes_of_host(*ranks));
    }
    std::unique_ptr<CudaDevice> gpu = make_cuda_device(
        {.ordinal = ordinal,
         .memory_source = ranks == nullptr ? CudaMemorySource{} : nccl_memory_source()});
    EngineDevice made;
    made.gpu = gpu.get();
    if (ranks != nullptr) {
      load_kernels(*gpu);  // before work that waits for another rank holds up the loading
      made.collectives = make_nccl_collectives(
          *gpu,
          {.timeout_s = config.sharding.timeout_s,
           .reduction = config.sharding.reduction == RankReduction::kNccl ? NcclReduction::kPlain
                                                                          : NcclReduction::kExact},
          id, ranks->rank, ranks->rank_count);
    }
    made.device = std::move(gpu);
    return made;
  };
}

void require_gpu(const sluice_engine& engine, const char* call) {
  if (engine.gpu == nullptr)
    refuse(
        fmt::format("{}: the engine computes on the host; sluice_engine_create_on_gpu() makes "
                    "one on a GPU",
                    call));
}

const Stream& adopted(sluice_engine& engine, void* native) {
  auto stream = engine.streams.find(native);
  if (stream == engine.streams.end())
    stream = engine.streams.emplace(native, engine.gpu->adopt_stream(native)).first;
  return stream->second;
}

}  // namespace

extern "C" {

sluice_status sluice_why_no_gpu(int32_t gpu, const char** why) {
  const char* const name = __func__;
  return guarded([&] {
    require(why, name, "the place for the text");
    *why = keep_text(ThreadText::kWhyNoGpu, why_no_cuda_device(gpu));
  });
}

sluice_status sluice_gpu_ranks_id(const char** id) {
  const char* const name = __func__;
  return guarded([&] {
    require(id, name, "the place for the text");
    *id = nullptr;
    *id = keep_text(ThreadText::kGpuRanksId, text_of(make_nccl_id()));
  });
}

sluice_status sluice_engine_create_on_gpu(const char* config_json, const sluice_model* model,
                                          int32_t gpu, const sluice_gpu_ranks* ranks,
                                          sluice_engine** engine) {
  const char* const name = __func__;
  return guarded([&] {
    require(engine, name, "the place for the engine");
    *engine = nullptr;
    require(config_json, name, "config_json");
    require(model, name, "the model");
    NcclId id{};
    if (ranks != nullptr) {
      check_ranks(*ranks, name);
      id = id_of(ranks->id, name);
    }
    *engine = make_engine(config_json, *model, on_gpu(gpu, ranks, id)).release();
  });
}

sluice_status sluice_acquire_on_gpu(sluice_engine* engine, uint32_t milliseconds, uint32_t unit,
                                    int32_t pass, void* gpu_stream, sluice_lease* lease) {
  return within(engine, __func__, milliseconds, [&](const char* name) {
    require(lease, name, "the place for the lease");
    require_gpu(*engine, name);
    *lease = acquire_for(name, *engine, unit, pass, adopted(*engine, gpu_stream));
  });
}

sluice_status sluice_release_on_gpu(sluice_engine* engine, uint64_t lease_id, void* gpu_stream) {
  return guarded(engine, __func__, [&](const char* name) {
    require_gpu(*engine, name);
    const auto held = engine->leases.find(lease_id);
    if (held == engine->leases.end())
      refuse(fmt::format("{}: lease {} does not exist or has ended", name, lease_id));
    // The lease ends behind the work on its own stream, which waits for the other one here.
    if (const StreamId other = adopted(*engine, gpu_stream).id(); other != held->second.stream) {
      if (!engine->handover) engine->handover.emplace(*engine->gpu);
      engine->gpu->record(engine->handover->id(), other);
      engine->gpu->wait(held->second.stream, engine->handover->id());
    }
    engine->leases.erase(held);
  });
}

}  // extern "C"
