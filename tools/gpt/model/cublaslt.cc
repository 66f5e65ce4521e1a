#include "tools/gpt/model/cublaslt.h"

#include <cublasLt.h>
#include <dlfcn.h>

#include <algorithm>
#include <bit>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>
#include <sluice/units.h>
#include "gpu/cuda/cuda_current_device.h"

namespace sluice::gpt {
namespace {

constexpr std::uint64_t kWorkspaceBytes = 32_MiB;  // what the library asks for on Hopper

// How a product whose sum is split adds up its parts: in fp32. In place, or in the result's type,
// each part would be rounded to bf16 before it is added.
constexpr std::uint32_t kReductionSchemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;

// The functions that are used, under their own types.
struct Library {
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtDestroy) destroy;
  decltype(&cublasLtGetVersion) get_version;
  decltype(&cublasLtMatmul) matmul;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatrixLayoutSetAttribute) layout_set;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;

  std::string why_not;  // empty when all of the above are there

  Library() {
    const std::string name = fmt::format("libcublasLt.so.{}", CUBLAS_VER_MAJOR);
    void* const handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
      why_not = fmt::format("{} (put its folder into LD_LIBRARY_PATH)", ::dlerror());
      return;
    }
    const auto find = [&](auto& function, const char* symbol) {
      void* const address = ::dlsym(handle, symbol);
      if (address == nullptr) why_not = fmt::format("{} has no {}", name, symbol);
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
    };
    find(create, "cublasLtCreate");
    find(destroy, "cublasLtDestroy");
    find(get_version, "cublasLtGetVersion");
    find(matmul, "cublasLtMatmul");
    find(desc_create, "cublasLtMatmulDescCreate");
    find(desc_destroy, "cublasLtMatmulDescDestroy");
    find(desc_set, "cublasLtMatmulDescSetAttribute");
    find(layout_create, "cublasLtMatrixLayoutCreate");
    find(layout_destroy, "cublasLtMatrixLayoutDestroy");
    find(layout_set, "cublasLtMatrixLayoutSetAttribute");
    find(preference_create, "cublasLtMatmulPreferenceCreate");
    find(preference_destroy, "cublasLtMatmulPreferenceDestroy");
    find(preference_set, "cublasLtMatmulPreferenceSetAttribute");
    find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
  }
};

// Stays open until the process ends.
const Library& library() {
  static const Library opened;
  return opened;
}

void check(cublasStatus_t status, const char* call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw Error(ErrorCode::kInternal,
              fmt::format("{}: cuBLASLt status {}; CUBLASLT_LOG_LEVEL=5 in the environment makes "
                          "the library say more",
                          call, static_cast<int>(status)));
}

cudaDataType_t data_type(DType type) {
  return type == DType::kFp32 ? CUDA_R_32F : CUDA_R_16BF;
}

// The alignment that the library may assume of an address.
std::uint32_t alignment_of(const void* memory) {
  const auto address = reinterpret_cast<std::uintptr_t>(memory);
  return address == 0 ? 256u : std::uint32_t{1} << std::min(8, std::countr_zero(address));
}

// Everything that the choice of an algorithm depends on.
std::string key_of(const Product& p, DType type) {
  return fmt::format("{} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {} {}",
                     static_cast<int>(p.form), p.m, p.n, p.k, p.a_stride, p.b_stride,
                     p.result_stride, static_cast<int>(p.result_type), static_cast<int>(type),
                     p.bias != nullptr, p.addend != nullptr, p.batch, p.a_batch_stride,
                     p.b_batch_stride, p.result_batch_stride, alignment_of(p.a), alignment_of(p.b),
                     alignment_of(p.result), alignment_of(p.addend), alignment_of(p.bias));
}

}  // namespace

// The library's matrices are column-major: a row-major result is its transpose there, and
// (a b)^T = b^T a^T. So our b is its A and our a is its B. A matrix that is not transposed here is
// not transposed there.
struct CublasLt::Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t first = nullptr;   // our b
  cublasLtMatrixLayout_t second = nullptr;  // our a
  cublasLtMatrixLayout_t result = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
  bool has_algorithm = false;

  Plan(const Product& p, DType type) {
    try {
      describe(p, type);
    } catch (...) {
      destroy();
      throw;
    }
  }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() { destroy(); }

  void describe(const Product& p, DType type) {
    const bool b_transposed = p.form == Form::kABt;
    const bool a_transposed = p.form == Form::kAtB;
    check(library().desc_create(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
          "cublasLtMatmulDescCreate");
    set(CUBLASLT_MATMUL_DESC_TRANSA,
        static_cast<std::int32_t>(b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N));
    set(CUBLASLT_MATMUL_DESC_TRANSB,
        static_cast<std::int32_t>(a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N));
    if (p.bias != nullptr) {
      set(CUBLASLT_MATMUL_DESC_EPILOGUE, static_cast<std::uint32_t>(CUBLASLT_EPILOGUE_BIAS));
      set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    }
    // Rows and columns as the library sees them: a row of ours is a column of its.
    first = layout(data_type(type), b_transposed ? p.k : p.n, b_transposed ? p.n : p.k, p.b_stride,
                   p.batch, p.b_batch_stride);
    second = layout(data_type(type), a_transposed ? p.m : p.k, a_transposed ? p.k : p.m, p.a_stride,
                    p.batch, p.a_batch_stride);
    result =
        layout(data_type(p.result_type), p.n, p.m, p.result_stride, p.batch, p.result_batch_stride);
  }

  template <class Value>
  void set(cublasLtMatmulDescAttributes_t attribute, const Value& value) {
    check(library().desc_set(operation, attribute, &value, sizeof(value)),
          "cublasLtMatmulDescSetAttribute");
  }

  static cublasLtMatrixLayout_t layout(cudaDataType_t type, std::uint64_t rows,
                                       std::uint64_t columns, std::uint64_t stride,
                                       std::uint64_t batch, std::uint64_t batch_stride) {
    cublasLtMatrixLayout_t made = nullptr;
    check(library().layout_create(&made, type, rows, columns, static_cast<std::int64_t>(stride)),
          "cublasLtMatrixLayoutCreate");
    if (batch == 1) return made;
    const auto count = static_cast<std::int32_t>(batch);
    const auto offset = static_cast<std::int64_t>(batch_stride);
    cublasStatus_t status =
        library().layout_set(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof(count));
    if (status == CUBLAS_STATUS_SUCCESS)
      status = library().layout_set(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &offset,
                                    sizeof(offset));
    if (status != CUBLAS_STATUS_SUCCESS) library().layout_destroy(made);
    check(status, "cublasLtMatrixLayoutSetAttribute");
    return made;
  }

  void choose(cublasLtHandle_t handle, const Product& p) {
    cublasLtMatmulPreference_t preference = nullptr;
    check(library().preference_create(&preference), "cublasLtMatmulPreferenceCreate");
    const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      return library().preference_set(preference, attribute, &value, sizeof(value));
    };
    cublasLtMatmulHeuristicResult_t found{};
    int count = 0;
    const std::uint32_t result_alignment = alignment_of(p.result);
    cublasStatus_t status = prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, kWorkspaceBytes);
    if (status == CUBLAS_STATUS_SUCCESS)
      status = prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, kReductionSchemes);
    const std::pair<cublasLtMatmulPreferenceAttributes_t, std::uint32_t> alignments[] = {
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment_of(p.b)},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment_of(p.a)},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
         p.addend == nullptr ? result_alignment : alignment_of(p.addend)},
        {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, result_alignment}};
    for (const auto& [attribute, bytes] : alignments)
      if (status == CUBLAS_STATUS_SUCCESS) status = prefer(attribute, bytes);
    if (status == CUBLAS_STATUS_SUCCESS)
      status = library().heuristic(handle, operation, first, second, result, result, preference, 1,
                                   &found, &count);
    library().preference_destroy(preference);
    if (status != CUBLAS_STATUS_NOT_SUPPORTED) check(status, "cublasLtMatmulAlgoGetHeuristic");
    has_algorithm = status == CUBLAS_STATUS_SUCCESS && count != 0;
    algorithm = found.algo;
  }

  void destroy() noexcept {
    for (cublasLtMatrixLayout_t layout : {first, second, result})
      if (layout != nullptr) library().layout_destroy(layout);
    if (operation != nullptr) library().desc_destroy(operation);
  }
};

std::string CublasLt::why_not() {
  return library().why_not;
}

CublasLt::CublasLt(CudaDevice& device) : device_(device) {
  if (!library().why_not.empty()) throw Error(ErrorCode::kUnsupported, library().why_not);
  workspace_ = DeviceBuffer(device, kWorkspaceBytes, "workspace of matrix products");
  const CudaCurrentDevice current(device.ordinal());
  cublasLtHandle_t handle = nullptr;
  check(library().create(&handle), "cublasLtCreate");
  handle_ = handle;
}

CublasLt::~CublasLt() {
  const CudaCurrentDevice current(device_.ordinal(), std::nothrow);
  plans_.clear();
  library().destroy(static_cast<cublasLtHandle_t>(handle_));
}

std::string CublasLt::version() const {
  const std::size_t version = library().get_version();
  return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

const CublasLt::Plan& CublasLt::plan_of(const Product& product, DType type) {
  std::unique_ptr<Plan>& plan = plans_[key_of(product, type)];
  if (plan == nullptr) {
    auto made = std::make_unique<Plan>(product, type);
    made->choose(static_cast<cublasLtHandle_t>(handle_), product);
    plan = std::move(made);
  } else if (product.bias != nullptr) {
    plan->set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, product.bias);
  }
  return *plan;
}

bool CublasLt::multiply(const Product& p, DType type, StreamId stream) {
  const CudaCurrentDevice current(device_.ordinal());
  const Plan& plan = plan_of(p, type);
  if (!plan.has_algorithm) return false;
  if (device_.has_failed()) return true;  // as every other kernel and copy
  const float alpha = 1.0f;
  const float beta = p.addend == nullptr ? 0.0f : 1.0f;
  check(library().matmul(static_cast<cublasLtHandle_t>(handle_), plan.operation, &alpha, p.b,
                         plan.first, p.a, plan.second, &beta,
                         p.addend == nullptr ? p.result : p.addend, plan.result, p.result,
                         plan.result, &plan.algorithm, workspace_.data(), kWorkspaceBytes,
                         static_cast<cudaStream_t>(device_.native_stream(stream))),
        "cublasLtMatmul");
  return true;
}

}  // namespace sluice::gpt
