// Marks the symbols of the shared library that programs may use. All other symbols are hidden.
#pragma once

#define SLUICE_EXPORT __attribute__((visibility("default")))
