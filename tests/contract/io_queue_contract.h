// These test cases check the duties of every IoQueue. A factory makes the queue. Include this
// header in one source of a test program and name the implementation:
//   INSTANTIATE_TEST_SUITE_P(Sync, IoQueueContract,
//                            ::testing::Values(IoQueueFactory{"sync", make_sync_queue}));
// Cases are skipped if the implementation fails with kUnsupported.
#pragma once

#include "tests/contract/io_queue_flush_cases.h"
#include "tests/contract/io_queue_lifetime_cases.h"
#include "tests/contract/io_queue_priority_cases.h"
#include "tests/contract/io_queue_transfer_cases.h"
