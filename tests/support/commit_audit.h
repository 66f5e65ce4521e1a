// An IoQueue that wraps a real queue and checks the order of a durable store's requests.
//
//   - a commit record is written only after all data that the record names is written and flushed.
//     The checksums in the record match this data;
//   - the record's twin is written after the record is flushed;
//   - data is not overwritten if the data is named by the last durable record, or by the record
//     that is being written.
// The audit knows only the files and the format of the records, and nothing else of the engine.
//
// Thread rule: the same as for IoQueue. The audit may be read when the queue is idle.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "io/io_queue.h"

namespace sluice::test {

struct CommitAudit {
  std::uint64_t records = 0;            // records that have become durable
  std::uint64_t stores = 0;             // writes to data files
  std::vector<std::string> violations;  // empty if every check held
};

// `audit` must outlive the queue.
std::unique_ptr<IoQueue> make_audit_queue(std::unique_ptr<IoQueue> inner, CommitAudit& audit);

}  // namespace sluice::test
