#include "tools/deepspeed/hjson_reader.h"

#include <algorithm>
#include <set>

#include <fmt/format.h>

#include <sluice/error.h>
#include "base/utf8.h"

namespace sluice {
namespace {

constexpr int kNestingMax = 32;
constexpr std::string_view kPunctuators = "{}[],:";

std::string line_and_column(std::string_view text, std::size_t offset) {
  const std::string_view before = text.substr(0, std::min(offset, text.size()));
  const auto line = 1 + std::count(before.begin(), before.end(), '\n');
  return fmt::format("{}:{}", line, before.size() - (before.rfind('\n') + 1) + 1);
}

bool is_space(char character) {
  return character == ' ' || character == '\t' || character == '\n' || character == '\r';
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

class Reader {
 public:
  explicit Reader(HjsonDocument& document) : document_(document), text_(document.text) {}

  void read() {
    skip();
    const std::size_t begin = at_;
    if (peek() == '{') {
      document_.root = value("");
    } else {
      document_.root = members("", /*has_braces=*/false);
    }
    skip();
    if (at_ < text_.size()) fail(at_, "there is more text after the end of the document");
    if (!document_.root.is_object()) fail(begin, "the document is no object");
  }

 private:
  [[noreturn]] void fail(std::size_t at, const std::string& why) const {
    throw Error(ErrorCode::kConfig,
                fmt::format("{}:{}: {}", document_.name, line_and_column(text_, at), why));
  }

  char peek(std::size_t ahead = 0) const {
    return at_ + ahead < text_.size() ? text_[at_ + ahead] : '\0';
  }

  bool is_comment() const {
    return peek() == '#' || (peek() == '/' && (peek(1) == '/' || peek(1) == '*'));
  }

  // Over white space and comments.
  void skip() {
    while (at_ < text_.size()) {
      if (is_space(peek())) {
        ++at_;
      } else if (peek() == '/' && peek(1) == '*') {
        const std::size_t end = text_.find("*/", at_ + 2);
        if (end == std::string_view::npos) fail(at_, "the comment does not end");
        at_ = end + 2;
      } else if (is_comment()) {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else {
        return;
      }
    }
  }

  OrderedJson value(const std::string& path) {
    skip();
    const char first = peek();
    if (at_ >= text_.size()) fail(at_, "the text ends where a value is expected");
    if (first == '{' || first == '[') return nested(path, first);
    if (text_.substr(at_).starts_with("'''")) return block_string();
    if (first == '"' || first == '\'') return quoted();
    if (kPunctuators.find(first) != std::string_view::npos)
      fail(at_, fmt::format("a value is expected before '{}'", first));
    return without_quotes();
  }

  OrderedJson nested(const std::string& path, char first) {
    if (++depth_ > kNestingMax) fail(at_, "it is nested more than 32 levels deep");
    ++at_;
    OrderedJson result = first == '{' ? members(path, /*has_braces=*/true) : entries(path);
    --depth_;
    return result;
  }

  // Behind the opening brace, if there is one.
  OrderedJson members(const std::string& path, bool has_braces) {
    OrderedJson object = OrderedJson::object();
    // The object itself looks a name up among all others, one by one.
    auto& list = object.get_ref<OrderedJson::object_t&>();
    std::set<std::string> names;
    for (;;) {
      skip();
      if (peek() == '}' && has_braces) {
        ++at_;
        return object;
      }
      if (at_ >= text_.size()) {
        if (has_braces) fail(at_, "the text ends inside of an object: a '}' is missing");
        return object;
      }
      const std::size_t begin = at_;
      const std::string name = key();
      const std::string full = path.empty() ? name : path + "." + name;
      if (!names.insert(name).second) fail(begin, fmt::format("key \"{}\" is given twice", full));
      document_.places.emplace(full, begin);
      skip();
      if (peek() != ':') fail(at_, fmt::format("a ':' is expected after the key \"{}\"", full));
      ++at_;
      list.emplace_back(name, value(full));
      comma();
    }
  }

  OrderedJson entries(const std::string& path) {
    OrderedJson array = OrderedJson::array();
    for (;;) {
      skip();
      if (at_ >= text_.size()) fail(at_, "the text ends inside of a list: a ']' is missing");
      if (peek() == ']') {
        ++at_;
        return array;
      }
      array.push_back(value(fmt::format("{}.{}", path, array.size())));
      comma();
    }
  }

  void comma() {
    skip();
    if (peek() == ',') ++at_;
  }

  std::string key() {
    if (peek() == '"' || peek() == '\'') return quoted().get<std::string>();
    const std::size_t begin = at_;
    while (at_ < text_.size() && !is_space(peek()) &&
           kPunctuators.find(peek()) == std::string_view::npos)
      ++at_;
    if (at_ == begin) fail(at_, fmt::format("a key is expected before '{}'", peek()));
    return std::string(text_.substr(begin, at_ - begin));
  }

  // With the escapes of JSON; inside single quotes a double one stands for itself.
  OrderedJson quoted() {
    const char quote = peek();
    const std::size_t begin = at_++;
    std::string json = "\"";
    while (peek() != quote || at_ >= text_.size()) {
      if (at_ >= text_.size() || peek() == '\n') fail(begin, "the string does not end");
      if (peek() == '\\') {
        if (peek(1) != '\'') json += '\\';
        json += peek(1);
        at_ += 2;
        continue;
      }
      if (peek() == '"') json += '\\';
      json += text_[at_++];
    }
    ++at_;
    OrderedJson result = OrderedJson::parse(json + "\"", nullptr, /*allow_exceptions=*/false);
    if (result.is_discarded())
      fail(begin, "the string has an escape or a character unknown to JSON");
    return result;
  }

  // Characters between the begin of the line and `at`.
  std::size_t column(std::size_t at) const {
    const std::string_view before = text_.substr(0, at);
    const std::string_view line = before.substr(before.rfind('\n') + 1);
    return static_cast<std::size_t>(
        std::ranges::count_if(line, [](char byte) { return (byte & 0xc0) != 0x80; }));
  }

  // Lines lose the white space that stands before the opening quotes, and the ends of the first and
  // of the last line do not count.
  OrderedJson block_string() {
    const std::size_t begin = at_;
    const std::size_t end = text_.find("'''", at_ + 3);
    if (end == std::string_view::npos) fail(begin, "the string does not end");
    const std::string_view content = text_.substr(0, end);
    const auto skip_blanks = [&](std::size_t most) {
      for (; most > 0 && at_ < end && is_space(content[at_]) && content[at_] != '\n'; --most) ++at_;
    };
    const std::size_t indent = column(begin);
    at_ += 3;
    skip_blanks(end);
    if (at_ < end && content[at_] == '\n') {
      ++at_;
      skip_blanks(indent);
    }
    std::string result;
    while (at_ < end) {
      const char next = content[at_++];
      if (next != '\r') result += next;
      if (next == '\n') skip_blanks(indent);
    }
    at_ = end + 3;
    if (result.ends_with('\n')) result.pop_back();
    return result;
  }

  // A number or a word as far as the next comma, bracket or comment; else a string to the end of
  // the line.
  OrderedJson without_quotes() {
    const std::size_t begin = at_;
    while (at_ < text_.size() && peek() != '\n' && peek() != ',' && peek() != '}' &&
           peek() != ']' && !is_comment())
      ++at_;
    const std::string_view word = trimmed(text_.substr(begin, at_ - begin));
    OrderedJson literal = OrderedJson::parse(word, nullptr, /*allow_exceptions=*/false);
    if (!literal.is_discarded() && literal.is_primitive()) return literal;
    at_ = std::min(text_.find('\n', begin), text_.size());
    return std::string(trimmed(text_.substr(begin, at_ - begin)));
  }

  HjsonDocument& document_;
  std::string_view text_;
  std::size_t at_ = 0;
  int depth_ = 0;
};

HjsonDocument document_of(std::string_view text, std::string name) {
  constexpr std::string_view kByteOrderMark = "\xef\xbb\xbf";
  if (text.starts_with(kByteOrderMark)) text.remove_prefix(kByteOrderMark.size());
  return {.name = std::move(name),
          .text = std::string(text),
          .root = {},
          .places = {},
          .line_begins = {0}};
}

}  // namespace

std::string HjsonDocument::place_of(const std::string& key) const {
  const auto place = places.find(key);
  if (place == places.end()) return name;
  const auto line = std::ranges::upper_bound(line_begins, place->second) - 1;
  return fmt::format("{}:{}:{}", name, line - line_begins.begin() + 1, place->second - *line + 1);
}

HjsonDocument read_hjson(std::string_view text, std::string name) {
  HjsonDocument document = document_of(text, std::move(name));
  for (std::string_view rest = document.text; !rest.empty();) {
    const Utf8Character character = first_utf8(rest);
    if (!character.code)
      throw Error(
          ErrorCode::kConfig,
          fmt::format("{}:{}: byte 0x{:02x} is no UTF-8; save the file as UTF-8", document.name,
                      line_and_column(document.text, document.text.size() - rest.size()),
                      static_cast<unsigned char>(rest.front())));
    rest.remove_prefix(character.size_bytes);
  }
  for (std::size_t i = 0; i < document.text.size(); ++i)
    if (document.text[i] == '\n') document.line_begins.push_back(i + 1);
  Reader(document).read();
  return document;
}

std::map<std::string, std::size_t> hjson_places(std::string_view text) {
  HjsonDocument document = document_of(text, "");
  try {
    Reader(document).read();
  } catch (const Error&) {
    // The keys so far are the result.
  }
  return std::move(document.places);
}

}  // namespace sluice
