// Programs that compute on an NVIDIA GPU use these calls of Sluice's C interface. With these calls,
// the parameters and gradients of the units in use are in the GPU's memory. The parameters and
// gradients take at most as much memory as memory.device in the config allows. All other calls are
// in sluice.h. The rules of sluice.h for threads, processes and errors also hold here.
//
// The program computes on CUDA streams of its own. The engine and the optimizer synchronize their
// copies with the work on these streams. So the calling thread does not wait for the GPU. A stream
// that the program passes to a call has to stay valid until the engine or the optimizer is
// destroyed.
//
// After a call, the calling thread has the same current GPU as before, if the process has a context
// on that GPU. Otherwise, the GPU of the engine or the optimizer stays current.
#pragma once

#include "sluice.h"

#ifdef __cplusplus
extern "C" {
#endif

// Gives the reason why the GPU with the number `gpu` cannot be used. The text is empty if the GPU
// can be used. The text is valid until the thread's next call of this function.
sluice_status sluice_why_no_gpu(int32_t gpu, const char** why);

// The struct describes one of several GPUs that train one model together. Each GPU has a process or
// a thread of its own. Each GPU is a rank (see sluice.h). NCCL connects the GPUs.
typedef struct sluice_gpu_ranks {
  const char* id;  // from sluice_gpu_ranks_id(); the same for all ranks
  uint32_t rank;
  uint32_t rank_count;  // at least 2
} sluice_gpu_ranks;

// Makes a text with which the ranks can connect to each other. One rank calls this function, and
// the program sends the text to all ranks. The text is valid until the thread's next call of this
// function. The call opens the library of NCCL (libnccl.so.2).
sluice_status sluice_gpu_ranks_id(const char** id);

// Creates an engine for computation on the GPU with the number `gpu`, in the same way as
// sluice_engine_create(). The config has to contain memory.device, because the program also needs
// memory of the GPU for itself. With one GPU, `ranks` is null. With several GPUs, the call waits
// for the other ranks, and compares the configs and models of all ranks. If the environment of a
// launcher such as torchrun tells of several ranks on this host, the host memory and the threads of
// Sluice stay near the GPU from then on. The program's own threads are not restricted.
// Fails with:
// - SLUICE_CONFIG: the config has no memory.device.
// - SLUICE_UNSUPPORTED: the GPU cannot be used.
// - SLUICE_OUT_OF_MEMORY: memory.device cannot hold the engine's pools.
// - SLUICE_RANKS: another rank does not make this call within sharding.timeout.
sluice_status sluice_engine_create_on_gpu(const char* config_json, const sluice_model* model,
                                          int32_t gpu, const sluice_gpu_ranks* ranks,
                                          sluice_engine** engine);

// Acquires a unit for work that the program enqueues on `gpu_stream`, in the same way as
// sluice_acquire_within(). `gpu_stream` is a cudaStream_t, and a null pointer means the default
// stream. The call returns when the unit's transfers are under way. Later work on `gpu_stream`
// waits until the transfers have ended. The addresses of the lease are in the GPU's memory.
// On a GPU, sluice_acquire() and sluice_acquire_within() return only after the transfers have
// ended. Work on any stream may use the leases of sluice_acquire() and sluice_acquire_within(). All
// work that uses the lease has to end before sluice_release().
sluice_status sluice_acquire_on_gpu(sluice_engine* engine, uint32_t milliseconds, uint32_t unit,
                                    int32_t pass, void* gpu_stream, sluice_lease* lease);
// Does the same as sluice_release(). The lease ends when `gpu_stream` and the stream of
// sluice_acquire_on_gpu() have finished their present work. The calling thread does not wait for
// this work.
sluice_status sluice_release_on_gpu(sluice_engine* engine, uint64_t lease_id, void* gpu_stream);

// Plans an engine on a GPU, in the same way as sluice_plan(). No GPU is needed. If the config has
// no memory.device, the plan assumes a GPU with as much memory as the plan can use.
sluice_status sluice_plan_on_gpu(const char* config_json, const sluice_model* model,
                                 const char** plan_json);

// Does the same as sluice_optimizer_create(), but tensors may also be in the memory of the GPU with
// the number `gpu`. The gradients and parameters of tensors on the GPU are copied to host memory,
// and the updated parameters are copied back to the GPU.
// Fails with SLUICE_UNSUPPORTED if the GPU cannot be used.
sluice_status sluice_optimizer_create_on_gpu(const char* config_json,
                                             const sluice_optimizer_tensor* tensors,
                                             uint32_t tensor_count, int32_t gpu,
                                             sluice_optimizer** optimizer);
// Does the same as sluice_optimizer_begin(). Tensors on the GPU are read when `gpu_stream` has
// finished its present work. `gpu_stream` is a cudaStream_t, and a null pointer means the default
// stream. sluice_optimizer_wait() returns when the parameter on the GPU is written.
sluice_status sluice_optimizer_begin_on_gpu(sluice_optimizer* optimizer,
                                            const sluice_update* updates, uint32_t update_count,
                                            void* gpu_stream);

#ifdef __cplusplus
}
#endif
