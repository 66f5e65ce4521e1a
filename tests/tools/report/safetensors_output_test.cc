#include "tools/report/safetensors_output.h"
#include "tests/support/file_text.h"

#include <gtest/gtest.h>

#include <sys/stat.h>

#include <filesystem>
#include <fstream>

#include <fmt/format.h>

#include "engine/checkpoint/safetensors_file.h"
#include "tests/support/expect_error.h"
#include "tests/support/temp_directory.h"

namespace sluice {
namespace {

using test::expect_error;

const std::vector<SavedTensor> kTensors{
    {"a", {2, 3}}, {"scalar", {}}, {"large", {700'001}}, {"z", {1, 1, 4}}};

float value_of(std::size_t tensor, std::uint64_t element) {
  return static_cast<float>(tensor) + 0.25f * static_cast<float>(element);
}

void fill(std::size_t tensor, std::uint64_t first, std::span<float> values) {
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = value_of(tensor, first + i);
}

void write_file(const std::string& path, std::span<const SavedTensor> tensors,
                const std::map<std::string, std::string>& metadata, const TensorSource& source) {
  OutputFile file("--save", path);
  file.check();
  write_safetensors(file, tensors, metadata, source);
  file.commit();
}

class SafetensorsTest : public testing::Test {
 protected:
  std::string content(const std::string& name) const { return test::file_text(folder_.file(name)); }

  std::string write(const std::string& bytes) const {
    std::ofstream(folder_.file("file"), std::ios::binary) << bytes;
    return folder_.file("file");
  }

  static std::string with_length(std::uint64_t length) {
    std::string bytes;
    for (int i = 0; i < 8; ++i) bytes += static_cast<char>(length >> (8 * i));
    return bytes;
  }

  std::string write_header(const std::string& header, std::size_t data_bytes) const {
    return write(with_length(header.size()) + header + std::string(data_bytes, '\x01'));
  }

  std::string expect_refused(const std::string& path) const {
    const std::string message =
        expect_error(ErrorCode::kInput, [&] { const SafetensorsFile file(path); });
    EXPECT_NE(message.find(path), std::string::npos) << message;
    return message;
  }

  // Opens a file that may be damaged, and when it opens, reads all that it promises.
  static void open_and_read(const std::string& path) {
    try {
      const SafetensorsFile file(path);
      for (const SavedTensor& tensor : kTensors) {
        if (!file.has(tensor.name)) continue;
        std::vector<float> values(SavedTensor{"", file.shape(tensor.name)}.element_count());
        file.read(tensor.name, 0, values);
      }
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInput) << error.what();
    }
  }

  std::vector<std::string> names() const {
    std::vector<std::string> all;
    for (const auto& entry : std::filesystem::directory_iterator(folder_.path()))
      all.push_back(entry.path().filename());
    return all;
  }

  test::TempDirectory folder_;
};

TEST_F(SafetensorsTest, ReadsWhatWasWritten) {
  const std::string path = folder_.file("model");
  write_file(path, kTensors, {{"key", "value \" \n"}}, fill);
  EXPECT_EQ(names(), std::vector<std::string>{"model"});
  const SafetensorsFile file(path);
  EXPECT_EQ(file.metadata(), (std::map<std::string, std::string>{{"key", "value \" \n"}}));
  for (std::size_t i = 0; i < kTensors.size(); ++i) {
    ASSERT_TRUE(file.has(kTensors[i].name));
    EXPECT_EQ(file.shape(kTensors[i].name), kTensors[i].shape);
    std::vector<float> values(kTensors[i].element_count());
    file.read(kTensors[i].name, 0, values);
    for (std::uint64_t k = 0; k < values.size(); ++k) ASSERT_EQ(values[k], value_of(i, k));
  }
  std::vector<float> middle(5);
  file.read("large", 300'000, middle);
  EXPECT_EQ(middle[4], value_of(2, 300'004));
  EXPECT_FALSE(file.has("b"));
  (void)expect_error(ErrorCode::kInput, [&] { (void)file.shape("b"); });
}

TEST_F(SafetensorsTest, RefusesAFileCutAnywhere) {
  write_file(folder_.file("model"), std::span(kTensors).first(2), {{"k", "v"}}, fill);
  const std::string whole = content("model");
  for (std::size_t length = 0; length < whole.size(); ++length)
    (void)expect_refused(write(whole.substr(0, length)));
  (void)SafetensorsFile(write(whole));
}

TEST_F(SafetensorsTest, SurvivesAnyDamagedByteOfTheHeader) {
  write_file(folder_.file("model"), std::span(kTensors).first(2), {{"k", "v"}}, fill);
  const std::string whole = content("model");
  const std::size_t header_bytes = whole.size() - 7 * sizeof(float);
  for (std::size_t place = 0; place < header_bytes; ++place) {
    for (const char byte : {'\0', '\xff', '0', '9', '-', '"', '}', ']', 'e'}) {
      std::string damaged = whole;
      damaged[place] = byte;
      open_and_read(write(damaged));
    }
    std::string flipped = whole;
    flipped[place] = static_cast<char>(flipped[place] ^ 1);
    open_and_read(write(flipped));
  }
}

TEST_F(SafetensorsTest, RefusesBadHeaders) {
  EXPECT_NE(expect_refused(folder_.file("missing")).find("No such file"), std::string::npos);
  (void)expect_refused(folder_.path());
  ASSERT_EQ(::mkfifo(folder_.file("pipe").c_str(), 0600), 0);
  (void)expect_refused(folder_.file("pipe"));
  (void)expect_refused(write(""));
  (void)expect_refused(write(with_length(100) + "{}"));
  (void)expect_refused(write(with_length(UINT64_MAX) + "{}"));
  (void)expect_refused(write(with_length(0)));
  for (const char* header :
       {"", "x", "[]", "17", "{", "{\"a\": 1}", "{\"a\": {}}", "{\"a\": {\"dtype\": \"F32\"}}",
        "{\"__metadata__\": {\"k\": 1}}", "{\"__metadata__\": []}", "{\"\xff\": {}}"})
    (void)expect_refused(write_header(header, 24));
}

TEST_F(SafetensorsTest, RefusesBadShapesAndOffsets) {
  const auto refuse = [&](const char* shape, const char* offsets) {
    (void)expect_refused(
        write_header(fmt::format(R"({{"a": {{"dtype": "F32", "shape": {}, "data_offsets": {}}}}})",
                                 shape, offsets),
                     24));
  };
  refuse("[2, 3]", "[0, 20]");
  refuse("[2, 3]", "[1, 24]");
  refuse("[2, 3]", "[4, 28]");
  refuse("[2, 3]", "[24, 0]");
  refuse("[2, 3]", "[0, 18446744073709551615]");
  refuse("[2, 3]", "[-24, 0]");
  refuse("[2, 3]", "[0]");
  refuse("[2, 3]", "[0, 24, 24]");
  refuse("[2, 3]", "{}");
  refuse("[2.0, 3]", "[0, 24]");
  refuse("[2, 3]", "[0.5, 24.5]");
  refuse("\"2\"", "[0, 24]");
  refuse("[\"2\"]", "[0, 24]");
  refuse("[2, 4]", "[0, 24]");
  refuse("[0]", "[0, 24]");
  refuse("[]", "[0, 24]");
  refuse("[6, 0]", "[0, 24]");
  // Products that wrap to the right number.
  refuse("[4611686018427387904]", "[0, 0]");
  refuse("[4611686018427387910]", "[0, 24]");
  refuse("[-1, -6]", "[0, 24]");
  refuse("[4294967296, 4294967296]", "[0, 0]");
}

TEST_F(SafetensorsTest, RefusesTensorsThatShareBytes) {
  const auto header = [](int begin) {
    return fmt::format(R"({{"a": {{"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}},)"
                       R"( "b": {{"dtype": "BOOL", "shape": [8], "data_offsets": [{}, {}]}},)"
                       R"( "c": {{"dtype": "F32", "shape": [], "data_offsets": [24, 28]}}}})",
                       begin, begin + 8);
  };
  const SafetensorsFile file(write_header(header(16), 28));
  for (const int begin : {15, 0, 9, 17})
    EXPECT_NE(expect_refused(write_header(header(begin), 28)).find("share bytes"),
              std::string::npos);
  (void)expect_refused(
      write_header(R"({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},)"
                   R"( "a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}})",
                   8));
}

// As soon as it comes, however much of it there is.
TEST_F(SafetensorsTest, RefusesWhatTheFormatHasNoPlaceFor) {
  constexpr std::size_t kMany = 4 << 20;
  std::string ones;
  for (std::size_t i = 0; i < kMany; ++i) ones += "1,";
  const std::string headers[] = {std::string(kMany, '['),
                                 R"({"a": )" + std::string(kMany, '['),
                                 R"({"a": {"shape": [)" + ones,
                                 "[" + ones,
                                 R"({"__metadata__": {"k": {}}})",
                                 R"({"a": {"b": {}}})",
                                 R"({"a": {"b": null}})",
                                 R"({"a": {"shape": [[1]]}})",
                                 std::string("{}\0", 3)};
  for (const std::string& header : headers) (void)expect_refused(write_header(header, 24));
}

TEST_F(SafetensorsTest, PassesOverOtherTypes) {
  const SafetensorsFile file(
      write_header(R"({"mask": {"dtype": "BOOL", "shape": [8], "data_offsets": [0, 8]},)"
                   R"( "a": {"dtype": "F32", "shape": [4], "data_offsets": [8, 24]}})",
                   24));
  EXPECT_FALSE(file.has("mask"));
  EXPECT_TRUE(file.has("a"));
  EXPECT_TRUE(file.metadata().empty());
}

TEST_F(SafetensorsTest, NoticesAFileCutMeanwhile) {
  write_file(folder_.file("model"), kTensors, {}, fill);
  const SafetensorsFile file(folder_.file("model"));
  std::filesystem::resize_file(folder_.file("model"), 1000);
  std::vector<float> values(4);
  (void)expect_error(ErrorCode::kInput, [&] { file.read("z", 0, values); });
}

TEST_F(SafetensorsTest, AFailedWriteChangesNothing) {
  const std::string path = folder_.file("model");
  write_file(path, kTensors, {}, fill);
  const std::string before = content("model");
  (void)expect_error(ErrorCode::kIo, [&] {
    write_file(path, kTensors, {{"other", "metadata"}},
               [](std::size_t tensor, std::uint64_t first, std::span<float> values) {
                 if (first != 0) throw Error(ErrorCode::kIo, "the source failed");
                 fill(tensor, first, values);
               });
  });
  EXPECT_EQ(content("model"), before);
  EXPECT_EQ(names(), std::vector<std::string>{"model"});
}

TEST_F(SafetensorsTest, RefusesToWriteWhereItCannot) {
  (void)expect_error(ErrorCode::kInput,
                     [&] { write_file(folder_.file("missing/model"), kTensors, {}, fill); });
  std::filesystem::create_directory(folder_.file("taken"));
  (void)expect_error(ErrorCode::kInput,
                     [&] { write_file(folder_.file("taken"), kTensors, {}, fill); });
  EXPECT_EQ(names(), std::vector<std::string>{"taken"});
}

}  // namespace
}  // namespace sluice
