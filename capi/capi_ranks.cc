// Several processes that train together, behind the C interface.
#include <span>
#include <string>
#include <vector>

#include <fmt/format.h>

#include <sluice/config.h>
#include <sluice/config_document.h>

#include "capi/call_guard.h"
#include "capi/ranks_handle.h"
#include "capi/sluice.h"
#include "cpu_optim/rank_sum.h"

using namespace sluice;

extern "C" {

sluice_status sluice_ranks_create(const char* address, uint32_t rank, uint32_t rank_count,
                                  sluice_ranks** ranks) {
  const char* const name = __func__;
  return guarded([&] {
    require(ranks, name, "the place for the ranks");
    *ranks = nullptr;
    require(address, name, "the address");
    *ranks = new sluice_ranks(address, rank, rank_count);
  });
}

void sluice_ranks_destroy(sluice_ranks* ranks) {
  destroy(ranks);
}

sluice_status sluice_ranks_endpoint(sluice_ranks* ranks, const char** endpoint) {
  return guarded(ranks, __func__, [&](const char* name) {
    require(endpoint, name, "the place for the endpoint");
    *endpoint = ranks->endpoint.c_str();
  });
}

sluice_status sluice_ranks_connect(sluice_ranks* ranks, const char* config_json,
                                   const char* const* endpoints) {
  return guarded(ranks, __func__, [&](const char* name) {
    require(config_json, name, "config_json");
    require(endpoints, name, "the endpoints");
    if (ranks->world != nullptr) refuse(fmt::format("{}: the ranks are connected already", name));
    const Config config = engine_config(ConfigDocument(config_json, "config"));
    std::vector<std::string> texts;
    for (const char* text : std::span(endpoints, ranks->door->endpoint().rank_count)) {
      require(text, name, "an endpoint");
      texts.emplace_back(text);
    }
    ranks->world = std::make_shared<SocketWorld>(
        HostCollectivesOptions{.timeout_s = config.sharding.timeout_s, .sum = sum_in_order},
        *ranks->door, texts);
    ranks->door.reset();
  });
}

}  // extern "C"
