// Marks the symbols of the shared library that programs may use. All others are hidden.
#pragma once

#define SLUICE_EXPORT __attribute__((visibility("default")))
