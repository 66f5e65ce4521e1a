#include "tests/tools/gpt/model/fake_cublaslt.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include <sluice/dtype.h>

extern "C" void sluice_fake_cuda_launch(cudaStream_t stream, void (*work)(void*), void* data);

namespace {

struct Layout {
  cudaDataType_t type;
  std::uint64_t rows;
  std::uint64_t columns;
  std::int64_t stride;  // elements from column to column
  std::int32_t batch = 1;
  std::int64_t batch_stride = 0;

  std::uint64_t element_bytes() const { return type == CUDA_R_32F ? 4 : 2; }
};
struct Operation {
  std::int32_t transposed[2] = {CUBLAS_OP_N, CUBLAS_OP_N};
  std::uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void* bias = nullptr;
};
struct Preference {
  std::uint64_t workspace_bytes = 0;
  std::uint32_t reductions = CUBLASLT_REDUCTION_SCHEME_MASK;
  std::map<int, std::uint32_t> alignments;  // by attribute
};

std::mutex mutex;
// Guarded by mutex.
fake_cublaslt_counts counts;
int calls_to_failure = 0;  // 0: none fails, or it has failed

void count(int fake_cublaslt_counts::*which, int by = 1) {
  const std::scoped_lock lock(mutex);
  counts.*which += by;
}

bool call_fails() {
  const std::scoped_lock lock(mutex);
  return calls_to_failure != 0 && --calls_to_failure == 0;
}
// Every call that may fail begins so.
#define FAKE_CUBLASLT_ENTER \
  if (call_fails()) return CUBLAS_STATUS_INTERNAL_ERROR

template <class Thing, class Opaque>
Thing& fake(Opaque* opaque) {
  return *reinterpret_cast<Thing*>(opaque);
}
template <class Thing, class Opaque>
const Thing& fake(const Opaque* opaque) {
  return *reinterpret_cast<const Thing*>(opaque);
}

template <class Value>
cublasStatus_t assign(Value& value, const void* source, std::size_t size_bytes) {
  if (size_bytes != sizeof(value)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&value, source, sizeof(value));
  return CUBLAS_STATUS_SUCCESS;
}

// The places in an algorithm's data. The alignments are four, of A, B, C and D.
enum Chosen : std::uint8_t { kReduction, kSplit, kAlignments };

constexpr cublasLtMatmulPreferenceAttributes_t kMinAlignments[] = {
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
    CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};

std::uint32_t promised_alignment(const Preference& preference,
                                 cublasLtMatmulPreferenceAttributes_t attribute) {
  const auto found = preference.alignments.find(attribute);
  return found == preference.alignments.end() ? 256 : found->second;
}

// A number that is another one for almost every other description of a product.
class Mix {
 public:
  void add(std::uint64_t value) { mixed_ = (mixed_ ^ value) * 0x9e3779b97f4a7c15 ^ mixed_ >> 29; }
  void add(const Layout& layout) {
    add(layout.type);
    for (const std::uint64_t extent : {layout.rows, layout.columns}) add(extent);
    for (const std::int64_t extent :
         {layout.stride, std::int64_t{layout.batch}, layout.batch_stride})
      add(static_cast<std::uint64_t>(extent));
  }
  std::uint64_t mixed() const { return mixed_ >> 32; }

 private:
  std::uint64_t mixed_ = 1;
};

float element(const void* memory, cudaDataType_t type, std::int64_t at) {
  if (type == CUDA_R_32F) return static_cast<const float*>(memory)[at];
  return sluice::float_from_bf16(static_cast<const std::uint16_t*>(memory)[at]);
}
float rounded(float value, cudaDataType_t type) {
  return type == CUDA_R_32F ? value : sluice::float_from_bf16(sluice::bf16_from_float(value));
}

// One product. All members are values of the call, because the work runs after it has returned.
struct Work {
  Operation operation;
  Layout a, b, d;
  const void* a_memory;
  const void* b_memory;
  const void* c_memory;
  void* d_memory;
  float beta;
  std::uint32_t reduction;
  std::uint64_t split;

  float part(std::int64_t row, std::int64_t column, std::int64_t batch, std::int64_t begin,
             std::int64_t end) const {
    float sum = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t at_a =
          operation.transposed[0] == CUBLAS_OP_T ? row * a.stride + i : i * a.stride + row;
      const std::int64_t at_b =
          operation.transposed[1] == CUBLAS_OP_T ? i * b.stride + column : column * b.stride + i;
      sum += element(a_memory, a.type, at_a + batch * a.batch_stride) *
             element(b_memory, b.type, at_b + batch * b.batch_stride);
    }
    return sum;
  }

  void run() const {
    const bool rounds = reduction != CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const auto length =
        static_cast<std::int64_t>(operation.transposed[0] == CUBLAS_OP_T ? a.rows : a.columns);
    // Somewhere in the second half.
    const std::uint64_t places = std::max<std::uint64_t>(1, (length + 1) / 2);
    const std::int64_t middle = length / 2 + static_cast<std::int64_t>(split % places);
    for (std::int64_t batch = 0; batch < d.batch; ++batch)
      for (std::int64_t column = 0; column < static_cast<std::int64_t>(d.columns); ++column)
        for (std::int64_t row = 0; row < static_cast<std::int64_t>(d.rows); ++row) {
          float first = part(row, column, batch, 0, middle);
          float second = part(row, column, batch, middle, length);
          if (rounds) {
            first = rounded(first, d.type);
            second = rounded(second, d.type);
          }
          float sum = first + second;
          const std::int64_t at = column * d.stride + row + batch * d.batch_stride;
          if (beta != 0) sum += beta * element(c_memory, d.type, at);
          if (operation.bias != nullptr) sum += element(operation.bias, d.type, row);
          if (d.type == CUDA_R_32F) {
            static_cast<float*>(d_memory)[at] = sum;
          } else {
            static_cast<std::uint16_t*>(d_memory)[at] = sluice::bf16_from_float(sum);
          }
        }
  }
};

// Whether rows are where wide loads can read them. fp32 has kernels for any place.
bool is_tiled(const Layout& layout, std::uint32_t alignment) {
  if (layout.type == CUDA_R_32F) return true;
  const auto is_even = [&](std::int64_t elements) {
    return elements * static_cast<std::int64_t>(layout.element_bytes()) % 16 == 0;
  };
  return alignment >= 16 && is_even(layout.stride) && is_even(layout.batch_stride);
}

}  // namespace

extern "C" {

fake_cublaslt_counts fake_cublaslt_take_counts() {
  const std::scoped_lock lock(mutex);
  return std::exchange(counts, {});
}

bool fake_cublaslt_fail_at(int call) {
  const std::scoped_lock lock(mutex);
  return std::exchange(calls_to_failure, call) == 0;
}

// A handle is the GPU that was current, and one.
cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  FAKE_CUBLASLT_ENTER;
  int gpu = 0;
  (void)cudaGetDevice(&gpu);
  *handle = reinterpret_cast<cublasLtHandle_t>(static_cast<std::uintptr_t>(gpu) + 1);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t) {
  return CUBLAS_STATUS_SUCCESS;
}
std::size_t cublasLtGetVersion() {
  return CUBLAS_VERSION;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* desc, cublasComputeType_t compute,
                                        cudaDataType_t scale) {
  FAKE_CUBLASLT_ENTER;
  // Sums are fp32, without TF32.
  if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_INVALID_VALUE;
  count(&fake_cublaslt_counts::objects);
  *desc = reinterpret_cast<cublasLtMatmulDesc_t>(new Operation);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc) {
  delete &fake<Operation>(desc);
  count(&fake_cublaslt_counts::objects, -1);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, std::size_t size_bytes) {
  FAKE_CUBLASLT_ENTER;
  auto& operation = fake<Operation>(desc);
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA: return assign(operation.transposed[0], value, size_bytes);
    case CUBLASLT_MATMUL_DESC_TRANSB: return assign(operation.transposed[1], value, size_bytes);
    case CUBLASLT_MATMUL_DESC_EPILOGUE: return assign(operation.epilogue, value, size_bytes);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER: return assign(operation.bias, value, size_bytes);
    default: return CUBLAS_STATUS_INVALID_VALUE;
  }
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type,
                                          std::uint64_t rows, std::uint64_t columns,
                                          std::int64_t stride) {
  FAKE_CUBLASLT_ENTER;
  if (static_cast<std::uint64_t>(stride) < rows) return CUBLAS_STATUS_INVALID_VALUE;
  count(&fake_cublaslt_counts::objects);
  *layout = reinterpret_cast<cublasLtMatrixLayout_t>(
      new Layout{.type = type, .rows = rows, .columns = columns, .stride = stride});
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete &fake<Layout>(layout);
  count(&fake_cublaslt_counts::objects, -1);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute,
                                                const void* value, std::size_t size_bytes) {
  FAKE_CUBLASLT_ENTER;
  if (attribute == CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT)
    return assign(fake<Layout>(layout).batch, value, size_bytes);
  if (attribute == CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET)
    return assign(fake<Layout>(layout).batch_stride, value, size_bytes);
  return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  FAKE_CUBLASLT_ENTER;
  count(&fake_cublaslt_counts::objects);
  *preference = reinterpret_cast<cublasLtMatmulPreference_t>(new Preference);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete &fake<Preference>(preference);
  count(&fake_cublaslt_counts::objects, -1);
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, std::size_t size_bytes) {
  FAKE_CUBLASLT_ENTER;
  auto& preferred = fake<Preference>(preference);
  if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES)
    return assign(preferred.workspace_bytes, value, size_bytes);
  if (attribute == CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK)
    return assign(preferred.reductions, value, size_bytes);
  return assign(preferred.alignments[attribute], value, size_bytes);
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[],
                                              int* found) {
  FAKE_CUBLASLT_ENTER;
  const auto& preferred = fake<Preference>(preference);
  const auto& operation = fake<Operation>(desc);
  const cublasLtMatrixLayout_t layouts[] = {a, b, c, d};
  *found = 0;
  if (requested < 1) return CUBLAS_STATUS_INVALID_VALUE;
  results[0] = {};
  std::uint64_t* const chosen = results[0].algo.data;
  bool knows = true;
  Mix mix;
  for (int i = 0; i < 4; ++i) {
    const auto& layout = fake<Layout>(layouts[i]);
    chosen[kAlignments + i] = promised_alignment(preferred, kMinAlignments[i]);
    knows = knows && is_tiled(layout, static_cast<std::uint32_t>(chosen[kAlignments + i]));
    mix.add(layout);
    mix.add(chosen[kAlignments + i]);
  }
  for (const std::int32_t transposed : operation.transposed)
    mix.add(static_cast<std::uint64_t>(transposed));
  mix.add(operation.epilogue);
  chosen[kSplit] = mix.mixed();
  if (!knows) {
    count(&fake_cublaslt_counts::refused);
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  if (preferred.workspace_bytes == 0 || preferred.reductions == 0)
    return CUBLAS_STATUS_INVALID_VALUE;
  // COMPUTE_TYPE is the only exact scheme, and comes last.
  const std::uint32_t inexact =
      preferred.reductions & ~std::uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE};
  chosen[kReduction] = inexact != 0 ? std::bit_floor(inexact) : preferred.reductions;
  *found = 1;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void* alpha,
                              const void* a_memory, cublasLtMatrixLayout_t a, const void* b_memory,
                              cublasLtMatrixLayout_t b, const void* beta, const void* c_memory,
                              cublasLtMatrixLayout_t, void* d_memory, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t* algorithm, void*, std::size_t,
                              cudaStream_t stream) {
  FAKE_CUBLASLT_ENTER;
  int gpu = 0;
  (void)cudaGetDevice(&gpu);
  const bool is_of_gpu =
      reinterpret_cast<std::uintptr_t>(handle) == static_cast<std::uintptr_t>(gpu) + 1;
  if (!is_of_gpu || *static_cast<const float*>(alpha) != 1) return CUBLAS_STATUS_INVALID_VALUE;
  const void* const addresses[] = {a_memory, b_memory, c_memory, d_memory};
  for (int i = 0; i < 4; ++i)
    if (reinterpret_cast<std::uintptr_t>(addresses[i]) % algorithm->data[kAlignments + i] != 0)
      return CUBLAS_STATUS_INVALID_VALUE;
  count(&fake_cublaslt_counts::products);
  auto* const work = new Work{.operation = fake<Operation>(desc),
                              .a = fake<Layout>(a),
                              .b = fake<Layout>(b),
                              .d = fake<Layout>(d),
                              .a_memory = a_memory,
                              .b_memory = b_memory,
                              .c_memory = c_memory,
                              .d_memory = d_memory,
                              .beta = *static_cast<const float*>(beta),
                              .reduction = static_cast<std::uint32_t>(algorithm->data[kReduction]),
                              .split = algorithm->data[kSplit]};
  if (work->reduction != CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE)
    count(&fake_cublaslt_counts::rounded_sums);
  sluice_fake_cuda_launch(
      stream,
      [](void* data) {
        const auto* const launched = static_cast<const Work*>(data);
        launched->run();
        delete launched;
      },
      work);
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"
