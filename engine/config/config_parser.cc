#include "engine/config/config_parser.h"

#include <iterator>
#include <utility>
#include <vector>

#include <fmt/format.h>

namespace sluice {
namespace {

using nlohmann::json;

// The schema has four.
constexpr std::size_t kNestingMax = 16;

// An input iterator that records how far the parser has read, because the library does not keep the
// places of keys.
class TrackingIterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = char;
  using difference_type = std::ptrdiff_t;
  using pointer = const char*;
  using reference = const char&;

  TrackingIterator(const char* position, const char** reached)
      : position_(position), reached_(reached) {}
  reference operator*() const { return *position_; }
  TrackingIterator& operator++() {
    *reached_ = ++position_;
    return *this;
  }
  TrackingIterator operator++(int) {
    TrackingIterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const TrackingIterator& other) const { return position_ == other.position_; }
  bool operator!=(const TrackingIterator& other) const { return position_ != other.position_; }

 private:
  const char* position_;
  const char** reached_;
};

// Builds the document and notes where each key stands.
class DocumentBuilder : public json::json_sax_t {
 public:
  DocumentBuilder(std::string_view text, std::string parent, KeyPlaces& places,
                  const ParseComplaint& complain)
      : text_(text),
        reached_(text.data()),
        parent_(std::move(parent)),
        places_(places),
        complain_(complain) {}

  const char** reached() { return &reached_; }

  bool null() override { return place(nullptr); }
  bool boolean(bool value) override { return place(value); }
  bool number_integer(json::number_integer_t value) override { return place(value); }
  bool number_unsigned(json::number_unsigned_t value) override { return place(value); }
  bool number_float(json::number_float_t value, const std::string&) override {
    return place(value);
  }
  bool string(std::string& value) override { return place(value); }
  bool binary(json::binary_t&) override { return false; }
  bool start_object(std::size_t) override { return open(json::object()); }
  bool start_array(std::size_t) override { return open(json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(std::string& name) override {
    key_ = name;
    const std::string full = path(name);
    const std::size_t begin = text_.rfind('"', offset() - 2);  // offset() is behind the key's quote
    if (!places_.emplace(full, begin).second)
      complain_(begin, fmt::format("key \"{}\" is given twice", full));
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const json::exception& error) override {
    std::string why = error.what();  // "[json.exception.parse_error.101] parse error at line 1,
                                     // column 2: syntax error while ..."
    const std::size_t detail = why.find(": ");
    if (detail != std::string::npos) why = why.substr(detail + 2);
    complain_(position == 0 ? 0 : position - 1,
              fmt::format("{}; a config is JSON, and may have comments", why));
    return false;
  }

  json take() { return std::move(root_); }

 private:
  std::size_t offset() const { return static_cast<std::size_t>(reached_ - text_.data()); }

  std::string path(const std::string& name) const {
    std::string full = parent_.empty() ? "" : parent_ + ".";
    for (const auto& [value, key] : open_) full += key.empty() ? "" : key + ".";
    return full + name;
  }

  json* place(json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    json& parent = *open_.back().first;
    if (parent.is_array()) return &parent.emplace_back(std::move(value));
    return &(parent[key_] = std::move(value));
  }

  bool open(json value) {
    if (open_.size() == kNestingMax)
      complain_(offset() - 1,
                fmt::format("it is nested more than {} levels deep; a config has at most four",
                            kNestingMax));
    std::string key = open_.empty() ? "" : key_;
    if (!open_.empty() && open_.back().first->is_array())
      key = std::to_string(open_.back().first->size());
    open_.emplace_back(place(std::move(value)), std::move(key));
    return true;
  }

  bool close() {
    open_.pop_back();
    return true;
  }

  std::string_view text_;
  const char* reached_;
  std::string parent_;
  KeyPlaces& places_;
  const ParseComplaint& complain_;
  json root_;
  std::vector<std::pair<json*, std::string>> open_;
  std::string key_;
};

}  // namespace

json parse_config(std::string_view text, const std::string& parent, KeyPlaces& places,
                  const ParseComplaint& complain) {
  DocumentBuilder builder(text, parent, places, complain);
  json::sax_parse(TrackingIterator(text.data(), builder.reached()),
                  TrackingIterator(text.data() + text.size(), builder.reached()), &builder,
                  json::input_format_t::json, /*strict=*/true, /*ignore_comments=*/true);
  return builder.take();
}

}  // namespace sluice
