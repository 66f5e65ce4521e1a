#include "tools/gpt/model/onednn.h"

#if defined(__x86_64__) && defined(__clang__)
#include <cpuid.h>
#endif

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

#include <fmt/format.h>

#include <sluice/error.h>

namespace sluice::gpt {
namespace {

constexpr int kOldestMajor = 2;
constexpr int kOldestMinor = 6;

// dnnl_version_t, as far as releases 2 and 3 have it alike.
struct Version {
  int major, minor, patch;
  const char* hash;
  unsigned cpu_runtime;
};
constexpr unsigned kSequential = 1;
constexpr unsigned kOpenMp = 2;

// Bits of dnnl_cpu_isa_t that releases 2 and 3 have alike.
constexpr int kIsaAvx2 = 0x7;
constexpr int kIsaAvx512 = 0x27;
constexpr int kIsaAvx512Bf16 = 0xe7;
constexpr int kIsaAmxBit = 0x200;
constexpr int kIsaAll2 = 0x0;  // no limit

constexpr std::array<std::pair<KernelFamily, std::string_view>, 5> kNames = {
    {{KernelFamily::kNone, "none"},
     {KernelFamily::kAvx2, "avx2"},
     {KernelFamily::kAvx512, "avx512"},
     {KernelFamily::kAvx512Bf16, "avx512_bf16"},
     {KernelFamily::kAmx, "amx"}}};

}  // namespace

std::string_view name_of(KernelFamily family) {
  return kNames[static_cast<std::size_t>(family)].second;
}

KernelFamily kernel_family_from(std::string_view name) {
  const auto found = std::ranges::find(kNames, name, [](const auto& row) { return row.second; });
  SLUICE_CHECK(found != kNames.end(), "the schema admits no other name");
  return found->first;
}

#if defined(__x86_64__)
namespace {

bool has_amx_bf16() {
#if defined(__clang__)  // Clang 16 does not know the name
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kAmxBf16 = 1u << 22;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0 || (d & kAmxBf16) == 0) return false;
  // Whether the kernel keeps the tiles' registers.
  constexpr unsigned kTiles = 3u << 17;
  unsigned low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTiles) == kTiles;
#else
  return __builtin_cpu_supports("amx-bf16");
#endif
}

}  // namespace
#endif

KernelFamily processor_family() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512bf16"))
    return has_amx_bf16() ? KernelFamily::kAmx : KernelFamily::kAvx512Bf16;
  if (__builtin_cpu_supports("avx512bw")) return KernelFamily::kAvx512;
  if (__builtin_cpu_supports("avx2")) return KernelFamily::kAvx2;
#endif
  return KernelFamily::kNone;
}

OneDnn& OneDnn::library() {
  static OneDnn opened;
  return opened;
}

OneDnn::OneDnn() {
  if (const char* const file = std::getenv("SLUICE_ONEDNN"); file != nullptr && *file != '\0') {
    open(file);
    if (!why_not_.empty()) why_not_ = "SLUICE_ONEDNN: " + why_not_;
    return;
  }
  open("libdnnl.so.3");
  if (why_not_.empty()) return;
  const std::string newer = std::exchange(why_not_, {});
  open("libdnnl.so.2");
  if (!why_not_.empty()) why_not_ = newer + "; " + why_not_;
}

void OneDnn::open(const std::string& file) {
  void* const handle = ::dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    why_not_ = ::dlerror();
    return;
  }
  look_up(handle, file);
}

void OneDnn::look_up(void* handle, const std::string& file) {
  const auto find = [&](auto& function, const char* symbol) {
    void* const address = ::dlsym(handle, symbol);
    if (address == nullptr && why_not_.empty())
      why_not_ = fmt::format("{} has no {}", file, symbol);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
  };
  const Version* (*version_of)() = nullptr;
  find(version_of, "dnnl_version");
  if (version_of == nullptr) return;
  const Version& version = *version_of();
  version_ = fmt::format("{}.{}.{}", version.major, version.minor, version.patch);
  if (std::pair(version.major, version.minor) < std::pair(kOldestMajor, kOldestMinor)) {
    why_not_ = fmt::format("{} is oneDNN {}, which is too old; {}.{} or newer is needed", file,
                           version_, kOldestMajor, kOldestMinor);
    return;
  }
  find(sgemm_, "dnnl_sgemm");
  find(bf16_gemm_, "dnnl_gemm_bf16bf16f32");
  find(effective_isa_, "dnnl_get_effective_cpu_isa");
  find(set_max_isa_, "dnnl_set_max_cpu_isa");
  if (version.cpu_runtime == kOpenMp) {
    find(set_threads_, "omp_set_num_threads");
  } else if (version.cpu_runtime != kSequential) {
    why_not_ = fmt::format(
        "{} is oneDNN {} built for another way of threading than OpenMP, which cannot be told to "
        "compute on the calling thread",
        file, version_);
  }
}

KernelFamily OneDnn::family() const {
  const int isa = effective_isa_();
  const auto has = [isa](int bits) { return (isa & bits) == bits; };
  // No bit of AMX is there in 2.6 on a processor without it, nor after a limit.
  if (has(kIsaAvx512Bf16)) return has(kIsaAmxBit) ? KernelFamily::kAmx : KernelFamily::kAvx512Bf16;
  if (has(kIsaAvx512)) return KernelFamily::kAvx512;
  return has(kIsaAvx2) ? KernelFamily::kAvx2 : KernelFamily::kNone;
}

bool OneDnn::limit(KernelFamily family) {
  if (limit_) return *limit_ == family;
  constexpr std::array<int, 5> kIsas = {kIsaAll2, kIsaAvx2, kIsaAvx512, kIsaAvx512Bf16, kIsaAll2};
  const int isa = kIsas[static_cast<std::size_t>(family)];
  if (isa != kIsaAll2 && set_max_isa_(isa) != 0) return false;
  limit_ = family;
  return true;
}

// The number of threads is a variable of each thread in OpenMP.
void OneDnn::compute_here() const {
  thread_local bool is_set = false;
  if (is_set || set_threads_ == nullptr) return;
  set_threads_(1);
  is_set = true;
}

bool OneDnn::multiply_fp32(const Call& call) const {
  compute_here();
  return sgemm_(call.a_transposed ? 'T' : 'N', call.b_transposed ? 'T' : 'N', call.m, call.n,
                call.k, 1.0f, static_cast<const float*>(call.a), call.a_stride,
                static_cast<const float*>(call.b), call.b_stride, call.beta, call.c,
                call.c_stride) == 0;
}

bool OneDnn::multiply_bf16(const Call& call) const {
  compute_here();
  return bf16_gemm_(call.a_transposed ? 'T' : 'N', call.b_transposed ? 'T' : 'N', call.m, call.n,
                    call.k, 1.0f, static_cast<const std::uint16_t*>(call.a), call.a_stride,
                    static_cast<const std::uint16_t*>(call.b), call.b_stride, call.beta, call.c,
                    call.c_stride) == 0;
}

}  // namespace sluice::gpt
