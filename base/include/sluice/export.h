// Marks the symbols that the shared library exports to programs. All other symbols are hidden.
#pragma once

#define SLUICE_EXPORT __attribute__((visibility("default")))
