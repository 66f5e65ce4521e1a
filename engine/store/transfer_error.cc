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

bool repeats_read(Transfer& transfer) {
  const IoRequest& request = transfer.request;
  if (request.kind != IoKind::kRead || transfer.is_reread) return false;
  transfer.is_reread =
      request.error == 0 || errno_rule(request.kind, request.error).action == ErrnoAction::kReread;
  return transfer.is_reread;
}

}  // namespace sluice
