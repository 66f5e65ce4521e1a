// An IoQueue that wraps a real one and checks what a durable store may rely on, request by request:
//   - a commit record is written when all that it names has been written and flushed, with the
//     checksums that it says; its twin when the first one is flushed;
//   - nothing that the last durable record or the one under way names is written again.
// It knows nothing of the engine but its files and the format of records.
//
// Thread rule: as IoQueue; violations() when the queue is idle.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/io_queue.h"

namespace sluice::test {

struct CommitAudit {
  std::uint64_t records = 0;            // that have become durable
  std::uint64_t stores = 0;             // writes to data files
  std::vector<std::string> violations;  // empty: all held
};

// `audit` outlives the queue.
std::unique_ptr<IoQueue> make_audit_queue(std::unique_ptr<IoQueue> inner, CommitAudit& audit);

}  // namespace sluice::test
