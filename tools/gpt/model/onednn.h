// Matrix products by oneDNN, a library that is opened at run time: a program with this in it starts
// without it. Only two functions of it compute: dnnl_sgemm and dnnl_gemm_bf16bf16f32, which every
// release since 2.6 exports (the second is in no header of its own). They keep nothing between two
// calls: what they pack, they free.
//
// Thread rule: any thread, any number at once; each call computes on the thread that makes it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace sluice::gpt {

// Kinds of instructions that matrix kernels are written for, weakest first.
enum class KernelFamily : std::uint8_t { kNone, kAvx2, kAvx512, kAvx512Bf16, kAmx };

std::string_view name_of(KernelFamily family);
// The family of one of the names "avx2", "avx512", "avx512_bf16" and "amx".
KernelFamily kernel_family_from(std::string_view name);
// The strongest that this processor and its kernel of the operating system have.
KernelFamily processor_family();

class OneDnn {
 public:
  // Opens the library at the first call: the file that SLUICE_ONEDNN names, otherwise libdnnl.so.3
  // or libdnnl.so.2 of the system. The process has one; it stays open.
  static OneDnn& library();

  // Why it cannot be used; empty when it can.
  const std::string& why_not() const { return why_not_; }
  const std::string& version() const { return version_; }  // "2.6.3"
  // The strongest family that it has kernels for; the library chooses by the processor.
  KernelFamily family() const;
  // Allows kernels up to `family` from now on. False where another is fixed already, as it is after
  // family() or a product.
  // Requires: why_not() is empty.
  bool limit(KernelFamily family);

  // A row-major product with the elements of C `c_stride` apart from row to row; `beta` 0 or 1 is
  // what C counts for. False when the library refuses.
  // Requires: why_not() is empty.
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
  void (*set_threads_)(int) = nullptr;  // of the calling thread, where the library has threads
};

}  // namespace sluice::gpt
