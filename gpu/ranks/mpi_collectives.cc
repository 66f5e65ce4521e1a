#include "gpu/ranks/mpi_collectives.h"

#include <dlfcn.h>
#include <unistd.h>

#include <filesystem>
#include <vector>

#include <fmt/format.h>

#include "gpu/ranks/message_port.h"
#include "gpu/ranks/message_thread.h"

namespace sluice {
namespace {

// The installed library: from the program's own place, from the place of Sluice's shared library,
// or where Sluice was installed. For tests, where it was built.
std::string default_plugin_path() {
  std::error_code ignored;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", ignored);
  std::vector<std::filesystem::path> places = {program.parent_path().parent_path() /
                                               SLUICE_MPI_PLUGIN_INSTALLED};
  if (Dl_info own{}; ::dladdr(reinterpret_cast<const void*>(&why_no_mpi), &own) != 0)
    places.push_back(std::filesystem::path(own.dli_fname).parent_path() /
                     "sluice/libsluice_mpi.so");
  places.emplace_back(SLUICE_MPI_PLUGIN_PREFIX);
  places.emplace_back(SLUICE_MPI_PLUGIN_BUILT);  // nothing in a build without tests
  for (const std::filesystem::path& place : places)
    if (std::filesystem::exists(place, ignored)) return place.string();
  return places.front().string();
}

[[noreturn]] void refuse_plugin(const std::string& path, const std::string& why) {
  throw Error(ErrorCode::kUnsupported,
              fmt::format("MPI cannot be used through \"{}\": {}", path, why));
}

std::unique_ptr<MessagePort> open_plugin(const std::string& path) {
  // Global, because Open MPI's own plugins look for its symbols there. Never closed, because its
  // threads and exit handlers stay.
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    const char* const text = ::dlerror();
    refuse_plugin(path, fmt::format("{}; MPI needs Sluice's component mpi (Debian's package "
                                    "sluice-mpi; wheels have none) and the MPI of its build",
                                    text == nullptr ? "unknown reason" : text));
  }
  void* const symbol = ::dlsym(library, SLUICE_MPI_SYMBOL);
  if (symbol == nullptr)
    refuse_plugin(path,
                  "the library belongs to another build of Sluice; build or install both together");
  std::string why;
  std::unique_ptr<MessagePort> port(reinterpret_cast<OpenMpiPort>(symbol)(why));
  if (port == nullptr) refuse_plugin(path, why);
  return port;
}

Connection mpi_connection(const std::string& plugin_path) {
  const std::string path = plugin_path.empty() ? default_plugin_path() : plugin_path;
  return {.kind = "mpi",
          .opening = "MPI_Init, which every rank calls,",
          .closing = "MPI_Finalize, which every rank calls,",
          .open = [path] { return open_plugin(path); }};
}

}  // namespace

std::string why_no_mpi(const std::string& plugin_path) {
  const std::string path = plugin_path.empty() ? default_plugin_path() : plugin_path;
  if (::access(path.c_str(), R_OK) == 0) return {};
  return fmt::format("this build has no MPI (SLUICE_MPI): there is no \"{}\"", path);
}

MpiWorld::MpiWorld(const HostCollectivesOptions& options, const std::string& plugin_path)
    : MessageWorld(options, mpi_connection(plugin_path)) {}

}  // namespace sluice
