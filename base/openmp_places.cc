#include "base/openmp_places.h"

#include <dlfcn.h>

namespace sluice {
namespace {

// A function of OpenMP 4.5, of the runtime that is there; null without one.
template <class Function>
Function* openmp_function(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

}  // namespace

std::vector<int> openmp_processors() {
  auto* const proc_bind = openmp_function<int()>("omp_get_proc_bind");
  auto* const place_count = openmp_function<int()>("omp_get_num_places");
  auto* const processor_count = openmp_function<int(int)>("omp_get_place_num_procs");
  auto* const processors_of = openmp_function<void(int, int*)>("omp_get_place_proc_ids");
  std::vector<int> all;
  if (proc_bind == nullptr || place_count == nullptr || processor_count == nullptr ||
      processors_of == nullptr || proc_bind() == 0)
    return all;
  for (int place = 0; place < place_count(); ++place) {
    const int count = processor_count(place);
    if (count <= 0) continue;
    std::vector<int> some(static_cast<std::size_t>(count));
    processors_of(place, some.data());
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

}  // namespace sluice
