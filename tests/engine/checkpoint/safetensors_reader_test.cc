// Reading and writing of safetensors as applications do it, files and folders.
#include <sluice/safetensors.h>

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <utility>

#include <fmt/format.h>

#include <sluice/dtype.h>
#include <sluice/error.h>
#include "tests/support/expect_error.h"
#include "tests/support/file_text.h"
#include "tests/support/refused_syscall.h"
#include "tests/support/temp_directory.h"

namespace sluice::test {
namespace {

class SafetensorsFiles : public testing::Test {
 protected:
  std::string path(const std::string& name) const { return directory_.path() + "/" + name; }

  std::string content(const std::string& name) const { return file_text(path(name)); }
  void put(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
  }
  // A file by hand: the header and the data as given.
  void put_file(const std::string& name, const std::string& header, const std::string& data) const {
    std::string length;
    for (int i = 0; i < 8; ++i) length += static_cast<char>(header.size() >> (8 * i));
    put(name, length + header + data);
  }
  static std::string bytes_of(const std::vector<std::uint16_t>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * 2};
  }
  void refused(const std::string& name, const std::string& words) const {
    const std::string said =
        expect_error(ErrorCode::kInput, [&] { const SafetensorsReader reader(path(name)); });
    EXPECT_NE(said.find(words), std::string::npos) << said;
  }

  TempDirectory directory_;
};

TEST_F(SafetensorsFiles, EveryHalfArrivesAsItsValue) {
  std::vector<std::uint16_t> halves(1 << 16);
  for (std::size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<std::uint16_t>(i);
  const std::string shape = R"("shape":[256,256],"data_offsets":)";
  put_file(
      "f",
      fmt::format(
          R"({{"a":{{"dtype":"BF16",{0}[0,131072]}},"b":{{"dtype":"F16",{0}[131072,262144]}}}})",
          shape),
      bytes_of(halves) + bytes_of(halves));
  const SafetensorsReader reader(path("f"));
  EXPECT_EQ(reader.names(), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(reader.find("a")->shape, (std::vector<std::uint64_t>{256, 256}));
  EXPECT_EQ(reader.find("c"), nullptr);
  std::vector<float> values(halves.size() - 3);
  reader.read("a", 3, values);
  for (std::size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(std::bit_cast<std::uint32_t>(values[i]), static_cast<std::uint32_t>(i + 3) << 16);
  reader.read("b", 3, values);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const float expected = float_from_fp16(halves[i + 3]);
    ASSERT_EQ(std::bit_cast<std::uint32_t>(values[i]), std::bit_cast<std::uint32_t>(expected)) << i;
  }
}

TEST_F(SafetensorsFiles, AFolderIsReadByItsIndex) {
  put_file("model-00001-of-00002.safetensors",
           R"({"x":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},)"
           R"("unlisted":{"dtype":"BF16","shape":[1],"data_offsets":[4,6]}})",
           bytes_of({0x3f80, 0x4000, 0x4040}));
  put_file("model-00002-of-00002.safetensors",
           R"({"y":{"dtype":"I64","shape":[1],"data_offsets":[0,8]}})",
           "\x07" + std::string(7, '\0'));
  const auto index = [&](const std::string& x, const std::string& y) {
    put("model.safetensors.index.json",
        fmt::format(R"({{"metadata":{{"total_size":12}},"weight_map":{{"x":{},"y":{}}}}})", x, y));
  };
  const std::string first = R"("model-00001-of-00002.safetensors")";
  const std::string second = R"("model-00002-of-00002.safetensors")";
  index(first, second);
  const SafetensorsReader reader(directory_.path());
  EXPECT_TRUE(reader.is_folder());
  EXPECT_EQ(reader.names(), (std::vector<std::string>{"x", "y"}));
  std::vector<float> values(2);
  reader.read("x", 0, values);
  EXPECT_EQ(values, (std::vector<float>{1, 2}));
  std::int64_t integer = 0;
  reader.read_bytes("y", 0, std::as_writable_bytes(std::span(&integer, 1)));
  EXPECT_EQ(integer, 7);
  const auto fails = [&](const std::string& words, const auto& body) {
    const std::string said = expect_error(ErrorCode::kInput, body);
    EXPECT_NE(said.find(words), std::string::npos) << said;
  };
  fails("is of type \"I64\", expected F32, BF16 or F16", [&] { reader.read("y", 0, values); });
  fails("no tensor \"unlisted\"", [&] { reader.read("unlisted", 0, values); });
  fails("beyond the end of tensor \"x\"", [&] { reader.read("x", 1, values); });
  index(first, first);
  refused("", "has \"y\" in \"model-00001-of-00002.safetensors\"");
  index(first, R"("../model-00002-of-00002.safetensors")");
  refused("", "\"weight_map.y\" is \"../model-00002");
  index(first, "7");
  refused("", "\"weight_map.y\" is 7");
  index(first, R"("model-00003-of-00003.safetensors")");
  refused("", "model-00003-of-00003.safetensors");
  put("model.safetensors.index.json", "{}");
  refused("", "no index of safetensors files");
  std::filesystem::remove(path("model.safetensors.index.json"));
  refused("", "has neither model.safetensors.index.json nor model.safetensors");
  std::filesystem::rename(path("model-00001-of-00002.safetensors"), path("model.safetensors"));
  EXPECT_NE(SafetensorsReader(directory_.path()).find("unlisted"), nullptr);
}

TEST_F(SafetensorsFiles, WhatIsWrittenReadsBackAndAFailureLeavesTheOldFile) {
  const std::vector<SafetensorsTensor> tensors{
      {"large", "F32", {1300, 1000}}, {"half", "F16", {3}}, {"scalar", "F32", {}}};
  const auto byte_at = [](std::size_t index, std::uint64_t at) {
    return static_cast<std::byte>(at * 31 + at / 4096 + index);
  };
  const auto fill = [&](std::size_t index, std::uint64_t first, std::span<std::byte> bytes) {
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = byte_at(index, first + i);
  };
  write_safetensors_file(path("f"), tensors, {{"format", "pt"}}, fill);
  const SafetensorsReader reader(path("f"));
  EXPECT_EQ(reader.metadata().at("format"), "pt");
  for (std::size_t index = 0; index < tensors.size(); ++index) {
    std::vector<std::byte> bytes(tensors[index].element_count() * (index == 1 ? 2 : 4));
    reader.read_bytes(tensors[index].name, 0, bytes);
    for (std::size_t i = 0; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], byte_at(index, i)) << i;
  }
  const std::string before = content("f");
  EXPECT_THROW(write_safetensors_file(path("f"), tensors, {},
                                      [&](std::size_t index, std::uint64_t, std::span<std::byte>) {
                                        if (index == 1) throw Error(ErrorCode::kIo, "no values");
                                      }),
               Error);
  EXPECT_TRUE(content("f") == before);
  const SafetensorsTensor twice[] = {{"a", "F32", {1}}, {"a", "F32", {1}}};
  (void)expect_error(ErrorCode::kInvalidArgument,
                     [&] { write_safetensors_file(path("f"), twice, {}, fill); });
  const SafetensorsTensor unknown[] = {{"a", "F8", {1}}};
  (void)expect_error(ErrorCode::kInvalidArgument,
                     [&] { write_safetensors_file(path("f"), unknown, {}, fill); });
  (void)expect_error(ErrorCode::kInput,
                     [&] { write_safetensors_file(path("none/f"), tensors, {}, fill); });
  const auto refuse = [&](ErrorCode code, const SafetensorsTensor& tensor, const char* words,
                          const std::map<std::string, std::string>& metadata = {}) {
    const std::string said = expect_error(code, [&] {
      write_safetensors_file(path("f"), {&tensor, 1}, metadata, fill);
    });
    EXPECT_NE(said.find(words), std::string::npos) << said;
  };
  const auto large = [](std::vector<std::uint64_t> shape) {
    return SafetensorsTensor{"x", "F32", std::move(shape)};
  };
  refuse(ErrorCode::kInvalidArgument, {"\xff", "F32", {1}}, "is not UTF-8");
  refuse(ErrorCode::kInvalidArgument, large({1}), "metadata \"k\" is not", {{"k", "\xff"}});
  refuse(ErrorCode::kInvalidArgument, large({1}), "is not UTF-8", {{"\xff", "text"}});
  // Four times 2^80 is 0 in 64 bits.
  for (const std::uint64_t extent : {1ull << 40, 1ull << 21})
    refuse(ErrorCode::kInvalidArgument, large({1ull << 40, extent}), "the tensors have more than");
  refuse(ErrorCode::kNoSpace, large({1ull << 59}), path("f").c_str());  // before a byte is written
  (void)expect_error(ErrorCode::kInvalidArgument,
                     [&] { write_safetensors_file(path("f"), tensors, {}, nullptr); });
  EXPECT_TRUE(content("f") == before);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(directory_.path()), {}), 1);
}

TEST_F(SafetensorsFiles, AWriterKeepsLinksAndReplacesOnlyFiles) {
  namespace fs = std::filesystem;
  const SafetensorsTensor tensor{"x", "F32", {1}};
  const auto write = [&](const std::string& name) {
    write_safetensors_file(path(name), {&tensor, 1}, {}, [](auto, auto, auto) {});
  };
  fs::create_directory(path("real"));
  fs::create_symlink("real/link", path("link"));
  fs::create_symlink("f", path("real/link"));
  write("link");  // of a file that is not there yet
  put("real/f", "older");
  write("link");
  EXPECT_TRUE(fs::is_symlink(path("link")) && fs::is_symlink(path("real/link")));
  EXPECT_NO_THROW(SafetensorsReader(path("real/f")));

  ASSERT_EQ(::mkfifo(path("pipe").c_str(), 0600), 0);
  fs::create_symlink("round", path("round"));
  for (const char* const name : {"pipe", "real"}) {
    const std::string said = expect_error(ErrorCode::kInput, [&] { write(name); });
    EXPECT_NE(said.find("is no regular file"), std::string::npos) << said;
  }
  (void)expect_error(ErrorCode::kInput, [&] { write("round"); });
  EXPECT_TRUE(fs::is_fifo(path("pipe")));
}

TEST_F(SafetensorsFiles, WhatIsMissingCutOrForeignIsNamed) {
  const std::string header = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  refused("none", path("none"));
  put("f", "no tensors in here, and no length either");
  refused("f", path("f"));
  put_file("f", header, "1234567");
  refused("f", path("f"));
  put_file("f", header, "12345678");
  const SafetensorsReader reader(path("f"));
  std::filesystem::resize_file(path("f"), std::filesystem::file_size(path("f")) - 1);
  std::vector<float> values(2);
  for (const auto& body :
       {std::function<void()>([&] { reader.read("a", 0, values); }), std::function<void()>([&] {
          reader.read_bytes("a", 0, std::as_writable_bytes(std::span(values)));
        })}) {
    const std::string said = expect_error(ErrorCode::kInput, body);
    EXPECT_NE(said.find(path("f")), std::string::npos) << said;
  }
}

// A full or failing drive, by its kind; the file that was there stays.
TEST_F(SafetensorsFiles, ElementsBeyondTheEndAreNamed) {
  put_file("f", R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", std::string(8, 'x'));
  const SafetensorsReader reader(path("f"));
  std::vector<float> values(1);
  reader.read("w", 1, values);
  // Four times 2^62 is 0 in 64 bits.
  for (const std::uint64_t first : {std::uint64_t{2}, std::uint64_t{1} << 62, ~std::uint64_t{0}}) {
    const std::string said =
        expect_error(ErrorCode::kInput, [&] { reader.read("w", first, values); });
    EXPECT_NE(said.find(fmt::format("from element {} on", first)), std::string::npos) << said;
    EXPECT_NE(said.find("tensor \"w\", which has 2"), std::string::npos) << said;
  }
}

TEST_F(SafetensorsFiles, AnIndexThatIsAPipeOrHasNoEndIsNamed) {
  std::filesystem::create_directory(path("folder"));
  const std::string index = path("folder/model.safetensors.index.json");
  ASSERT_EQ(::mkfifo(index.c_str(), 0600), 0);
  refused("folder", "it is no regular file");
  std::filesystem::remove(index);
  std::filesystem::create_symlink("/dev/zero", index);
  refused("folder", "it is no regular file");
}

TEST_F(SafetensorsFiles, ADriveThatIsFullOrFailsIsNamed) {
  const SafetensorsTensor tensors[] = {{"a", "F32", {100'000}}};
  const auto zeros = [](std::size_t, std::uint64_t, std::span<std::byte> bytes) {
    std::ranges::fill(bytes, std::byte{0});
  };
  write_safetensors_file(path("f"), tensors, {}, zeros);
  const std::string before = content("f");
  const auto write = [&] { write_safetensors_file(path("f"), tensors, {{"new", "1"}}, zeros); };
  const auto old_handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit old_limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &old_limit), 0);
  const rlimit limit{.rlim_cur = 65536, .rlim_max = old_limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  (void)expect_error(ErrorCode::kNoSpace, write);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &old_limit), 0);
  std::signal(SIGXFSZ, old_handler);
  const SafetensorsReader reader(path("f"));
  std::vector<float> values(100'000);
  const bool filtered =
      run_with_refused({.number = SYS_fsync, .error = EIO},
                       [&] {
                         const std::string said = expect_error(ErrorCode::kIo, write);
                         EXPECT_NE(said.find(path("f")), std::string::npos) << said;
                         EXPECT_NE(said.find("check the drive"), std::string::npos) << said;
                       }) &&
      // As a network file system says it.
      run_with_refused({.number = SYS_close, .error = EDQUOT},
                       [&] {
                         const std::string said = expect_error(ErrorCode::kNoSpace, write);
                         EXPECT_NE(said.find(path("f")), std::string::npos) << said;
                         EXPECT_NE(said.find("raise the quota"), std::string::npos) << said;
                       }) &&
      run_with_refused({.number = SYS_pread64, .error = EIO}, [&] {
        const std::string said = expect_error(ErrorCode::kIo, [&] { reader.read("a", 0, values); });
        EXPECT_NE(said.find(path("f")), std::string::npos) << said;
        expect_error(ErrorCode::kIo,
                     [&] { reader.read_bytes("a", 0, std::as_writable_bytes(std::span(values))); });
      });
  EXPECT_TRUE(content("f") == before);
  if (!filtered) GTEST_SKIP() << "seccomp filters are not allowed here";
}

}  // namespace
}  // namespace sluice::test
