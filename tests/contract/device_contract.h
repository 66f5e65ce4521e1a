// These test cases check the duties of every Device. The cases test memory, streams, events,
// failures and whole programs. An implementation's test program includes this header once and
// instantiates DeviceContract with a factory, as tests/gpu/device/host_device_test.cc does. Values
// are checked only through host memory, so the cases also work if the CPU cannot read device
// memory.
#pragma once

#include "tests/contract/device_contract_fixture.h"
#include "tests/contract/device_event_cases.h"
#include "tests/contract/device_memory_cases.h"
#include "tests/contract/device_misuse_cases.h"
#include "tests/contract/device_program_cases.h"
#include "tests/contract/device_stream_cases.h"
