#include "engine/store/transfer_error.h"

#include <fmt/format.h>

#include "engine/store/block_store.h"
#include "io/errno_action.h"

namespace sluice {

Error transfer_error(const Transfer& transfer, const std::string& subject) {
  const IoRequest& request = transfer.request;
  return {ErrorCode::kIo,
          fmt::format("{} failed{} after {} bytes: {}; {}", subject,
                      transfer.is_reread ? " twice" : "", request.transferred_bytes,
                      errno_text(request.error), errno_rule(request.kind, request.error).advice)};
}

}  // namespace sluice
