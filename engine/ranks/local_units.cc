#include "engine/ranks/local_units.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <sluice/error.h>

namespace sluice {
namespace {

using nlohmann::json;

// [[place in the model, unit, [[tensor, elements], ...]], ...]
std::string text_of(const Layout& layout) {
  json units = json::array();
  for (const UnitPlace& unit : layout.units()) {
    if (!unit.is_local) continue;
    json tensors = json::array();
    for (const TensorPlace& tensor : layout.tensors_of(unit.id))
      tensors.push_back({tensor.name, tensor.element_count});
    units.push_back({index_of(unit.id), unit.name, std::move(tensors)});
  }
  return units.dump(-1, ' ', false, json::error_handler_t::replace);
}

// The units' places and lengths, without names.
json shapes_of(const json& unit) {
  json shapes = json::array({unit[0]});
  for (const json& tensor : unit[2]) shapes.push_back(tensor[1]);
  return shapes;
}

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorCode::kRanks, message);
}

void check_shapes(const json& first, const json& other, std::uint32_t rank) {
  if (first.size() != other.size())
    fail(fmt::format(
        "rank 0 has {} local units, and rank {} has {}; give all ranks as many, and let "
        "a rank leave some unused",
        first.size(), rank, other.size()));
  for (std::size_t i = 0; i < first.size(); ++i) {
    if (shapes_of(first[i]) == shapes_of(other[i])) continue;
    fail(fmt::format(
        "the local units \"{}\" of rank 0 and \"{}\" of rank {} stand in one place, and "
        "differ in it or in their shapes; give the units of one place the same shapes "
        "on all ranks",
        first[i][1].get<std::string>(), other[i][1].get<std::string>(), rank));
  }
}

// One document of each rank.
std::vector<json> gather_documents(const std::string& own, Ranks& ranks) {
  std::vector<json> documents;
  for (const std::vector<std::byte>& text :
       ranks.gather(std::as_bytes(std::span(own)), "the local units"))
    documents.push_back(json::parse(reinterpret_cast<const char*>(text.data()),
                                    reinterpret_cast<const char*>(text.data()) + text.size()));
  return documents;
}

}  // namespace

void check_local_units(const Layout& layout, Ranks& ranks) {
  const std::vector<json> units = gather_documents(text_of(layout), ranks);
  std::map<std::string, std::uint32_t> owners;  // by the name of a unit or of a tensor
  for (std::uint32_t rank = 0; rank < units.size(); ++rank) {
    check_shapes(units[0], units[rank], rank);
    for (const json& unit : units[rank]) {
      std::vector<std::string> names = {"unit " + unit[1].get<std::string>()};
      for (const json& tensor : unit[2]) names.push_back("tensor " + tensor[0].get<std::string>());
      for (const std::string& name : names) {
        const auto [found, is_new] = owners.emplace(name, rank);
        if (!is_new)
          fail(
              fmt::format("the local {} is one of rank {} and of rank {}; give the local units of "
                          "each rank names of their own",
                          name, found->second, rank));
      }
    }
  }
}

StateDescription describe_all_ranks(const StateDescription& own, const Layout& layout,
                                    Ranks& ranks) {
  StateDescription all = own;
  all.tensors.clear();
  json local = json::array();
  for (const TensorPlace& tensor : layout.tensors()) {
    const StateDescription::Tensor& described = own.tensors[index_of(tensor.id)];
    if (!layout.unit(tensor.unit).is_local)
      all.tensors.push_back(described);
    else
      local.push_back({described.name, described.shape, described.is_frozen, described.is_opaque});
  }
  for (const json& of_rank : gather_documents(local.dump(), ranks)) {
    for (const json& tensor : of_rank)
      all.tensors.push_back({.name = tensor[0].get<std::string>(),
                             .shape = tensor[1].get<std::vector<std::uint64_t>>(),
                             .is_frozen = tensor[2].get<bool>(),
                             .is_opaque = tensor[3].get<bool>()});
  }
  return all;
}

std::map<std::string, std::uint64_t> updates_of_all_ranks(
    const std::map<std::string, std::uint64_t>& own, Ranks& ranks) {
  std::map<std::string, std::uint64_t> all;
  for (const json& of_rank : gather_documents(json(own).dump(), ranks))
    all.merge(of_rank.get<std::map<std::string, std::uint64_t>>());
  return all;
}

}  // namespace sluice
