// A folder's name shows another model, or the folder gets one, while a reader opens its files.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdarg>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <sluice/error.h>
#include <sluice/safetensors.h>
#include <sluice/units.h>
#include "engine/checkpoint/checkpoint_source.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"
#include "tests/support/toy_training.h"

namespace {

std::function<void()> before_model_file;  // what another process does just before the next opening

}  // namespace

// Stands before that of libc.
extern "C" int open(const char* path, int flags, ...) {
  mode_t mode = 0;
  if ((flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE) {
    va_list rest;
    va_start(rest, flags);
    mode = va_arg(rest, mode_t);
    va_end(rest);
  }
  if (before_model_file && std::string_view(path).ends_with(".safetensors"))
    std::exchange(before_model_file, nullptr)();
  return static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

namespace sluice::test {
namespace {

namespace fs = std::filesystem;

class ChangingFolder : public testing::Test {
 protected:
  ~ChangingFolder() override { before_model_file = nullptr; }

  std::string path(const std::string& name) const { return directory_.file(name); }
  void link(const std::string& target) const {
    fs::create_symlink(target, path(".new"));
    fs::rename(path(".new"), path("latest"));
  }
  void put_index(const std::string& folder) const {
    std::ofstream(path(folder + "/.new"))
        << R"({"weight_map":{"a":"1.safetensors","b":"2.safetensors"}})";
    fs::rename(path(folder + "/.new"), path(folder + "/model.safetensors.index.json"));
  }
  // Two files with one number each.
  void put(const std::string& folder, float number) const {
    fs::create_directory(path(folder));
    for (const char* const name : {"a", "b"})
      write_safetensors_file(path(fmt::format("{}/{}.safetensors", folder, *name == 'a' ? 1 : 2)),
                             std::vector<SafetensorsTensor>{{name, "F32", {1}}}, {},
                             [number](std::size_t, std::uint64_t, std::span<std::byte> bytes) {
                               std::memcpy(bytes.data(), &number, bytes.size());
                             });
    put_index(folder);
  }
  static std::vector<float> values_of(const SafetensorsReader& reader) {
    std::vector<float> values(2);
    reader.read("a", 0, std::span(values).first(1));
    reader.read("b", 0, std::span(values).last(1));
    return values;
  }

  TempDirectory directory_;
};

TEST_F(ChangingFolder, ALinkThatIsSetAnewLeavesTheReaderOneModel) {
  put("one", 1);
  put("two", 2);
  link("one");
  before_model_file = [&] { link("two"); };
  EXPECT_EQ(values_of(SafetensorsReader(path("latest"))), (std::vector<float>{1, 1}));
  EXPECT_EQ(values_of(SafetensorsReader(path("latest"))), (std::vector<float>{2, 2}));
}

TEST_F(ChangingFolder, AFolderThatIsSavedMeanwhileIsNamed) {
  put("one", 1);
  for (const bool has_index : {true, false}) {
    before_model_file = [&] {
      if (has_index)
        put_index("one");
      else
        fs::remove(path("one/model.safetensors.index.json"));
    };
    const std::string said =
        expect_error(ErrorCode::kInput, [&] { const SafetensorsReader reader(path("one")); });
    EXPECT_NE(said.find("one/model.safetensors.index.json"), std::string::npos) << said;
    EXPECT_NE(said.find("written anew while the files that it names were opened"),
              std::string::npos)
        << said;
  }
}

TEST_F(ChangingFolder, ACheckpointIsReadWhereTheLinkShowedFirst) {
  std::vector<std::string> saved;
  for (const std::uint32_t steps : {1u, 2u}) {
    const auto device = make_host_device({.memory_bytes = 64_MiB});
    const Config config = toy_config(directory_.path());
    const ModelSpec model = toy_model({});
    Engine engine(config, model, *device);
    (void)run_toy(engine, model, *device, config, {.steps = steps});
    saved.push_back(engine.save(path("run"), {.file_bytes_max = 60'000}).path);
  }
  const auto show = [&](const std::string& folder) {
    fs::create_symlink(folder, path("run/.new"));
    fs::rename(path("run/.new"), path("run/latest"));
  };
  show(fs::path(saved[0]).filename());
  before_model_file = [&] { show(fs::path(saved[1]).filename()); };
  CheckpointSource source(path("run/latest"));
  EXPECT_EQ(source.position().step, 1u);
  source.verify();
  EXPECT_EQ(CheckpointSource(path("run/latest")).position().step, 2u);
}

}  // namespace
}  // namespace sluice::test
