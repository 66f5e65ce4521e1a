// Matrix products by oneDNN. The library is opened at run time, so a program with this class starts
// on machines without oneDNN. Only two functions of oneDNN are used for products: dnnl_sgemm and
// dnnl_gemm_bf16bf16f32. Every release since 2.6 exports both functions, but no header of oneDNN
// declares dnnl_gemm_bf16bf16f32. Both functions of oneDNN release their packed data at the end of
// a call. No memory is therefore kept between two calls.
//
// Thread rule: any number of threads may call the functions at the same time. A call computes on
// the calling thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace sluice::gpt {

// The families of instructions for which matrix kernels exist, from the weakest to the strongest.
enum class KernelFamily : std::uint8_t { kNone, kAvx2, kAvx512, kAvx512Bf16, kAmx };

std::string_view name_of(KernelFamily family);
// Returns the family with the name "avx2", "avx512", "avx512_bf16" or "amx".
KernelFamily kernel_family_from(std::string_view name);
// Returns the strongest family that this processor and the operating system's kernel support.
KernelFamily processor_family();

class OneDnn {
 public:
  // Returns the library of this process. The first call opens the file that the environment
  // variable SLUICE_ONEDNN names. If the variable is not set, the first call opens the system's
  // libdnnl.so.3 or libdnnl.so.2. The library stays open.
  static OneDnn& library();

  // Returns the reason why oneDNN cannot be used. The text is empty if oneDNN can be used.
  const std::string& why_not() const { return why_not_; }
  const std::string& version() const { return version_; }  // "2.6.3"
  // Returns the strongest family for which the library has kernels on this processor.
  KernelFamily family() const;
  // The call limits oneDNN to the kernels of `family` and of weaker families. Returns false if
  // another family is fixed already. The first call of limit() or family(), or the first product,
  // fixes the family.
  // Requires: why_not() is empty.
  bool limit(KernelFamily family);

  // A row-major product. The rows of C are `c_stride` elements apart. C is first multiplied by
  // `beta`, which is 0 or 1.
  struct Call {
    bool a_transposed = false;
    bool b_transposed = false;
    std::int64_t m = 0, n = 0, k = 0;
    const void* a = nullptr;
    std::int64_t a_stride = 0;
    const void* b = nullptr;
    std::int64_t b_stride = 0;
    float beta = 0;
    float* c = nullptr;
    std::int64_t c_stride = 0;
  };
  // Both functions compute a product. Each function returns false if the library refuses the
  // product.
  // Requires: why_not() is empty.
  bool multiply_fp32(const Call& call) const;
  bool multiply_bf16(const Call& call) const;  // bf16 factors, sums in fp32

 private:
  using Size = std::int64_t;  // dnnl_dim_t
  using Sgemm = int(char, char, Size, Size, Size, float, const float*, Size, const float*, Size,
                    float, float*, Size);
  using Bf16Gemm = int(char, char, Size, Size, Size, float, const std::uint16_t*, Size,
                       const std::uint16_t*, Size, float, float*, Size);

  OneDnn();
  void open(const std::string& file);
  void look_up(void* handle, const std::string& file);
  void compute_here() const;

  std::string why_not_;
  std::string version_;
  std::optional<KernelFamily> limit_;
  Sgemm* sgemm_ = nullptr;
  Bf16Gemm* bf16_gemm_ = nullptr;
  int (*effective_isa_)() = nullptr;
  int (*set_max_isa_)(int) = nullptr;
  void (*set_threads_)(int) = nullptr;  // null in a library without threads
};

}  // namespace sluice::gpt
