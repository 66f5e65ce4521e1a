// The mark of what programs may use of the shared library: its other symbols are hidden.
#pragma once

#define SLUICE_EXPORT __attribute__((visibility("default")))
