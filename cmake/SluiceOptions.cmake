# Build options, the compiler flags they stand for, and the summary printed at the end of a configure run.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Debug, RelWithDebInfo or Release" FORCE)
endif()

option(SLUICE_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(SLUICE_TOOLS "Build the sluice command" ${PROJECT_IS_TOP_LEVEL})
option(SLUICE_C "Build libsluice.so, the C interface" ${PROJECT_IS_TOP_LEVEL})
option(BUILD_SHARED_LIBS "Install the C++ library as libsluice_cxx.so, else as static libraries" OFF)
option(SLUICE_DEB "Lay out what is installed as Debian does, for packages made by cpack (preset deb)" OFF)
option(SLUICE_WERROR "Treat warnings as errors" OFF)
option(SLUICE_PRECOMPILED "Compile common headers once: a quicker build, which does not notice a missing #include" OFF)
option(SLUICE_UNITY "Compile ten or twenty sources at a time, in half the time; does not notice a missing #include" OFF)
set(SLUICE_SANITIZE "" CACHE STRING "Empty, address (with undefined) or thread")
set_property(CACHE SLUICE_SANITIZE PROPERTY STRINGS "" address thread)

# AUTO uses what is found, ON fails without it, OFF does not look.
foreach(feature CUDA NCCL MPI NVTX)
  set(SLUICE_${feature} AUTO CACHE STRING "AUTO, ON or OFF")
  set_property(CACHE SLUICE_${feature} PROPERTY STRINGS AUTO ON OFF)
  if(NOT SLUICE_${feature} MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "SLUICE_${feature} is \"${SLUICE_${feature}}\"; it must be AUTO, ON or OFF")
  endif()
endforeach()
# CMake's own name for it. It is taken out of the cache, so that the last of the two that is given counts.
if(PROJECT_IS_TOP_LEVEL AND CMAKE_CUDA_ARCHITECTURES)
  set(SLUICE_CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}" CACHE STRING "CUDA architectures to compile for" FORCE)
  unset(CMAKE_CUDA_ARCHITECTURES CACHE)
endif()
set(SLUICE_CUDA_ARCHITECTURES "90-real" CACHE STRING "CUDA architectures to compile for")

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
# A shared library shows what <sluice/export.h> marks, and nothing else.
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
find_package(Threads REQUIRED)
# The sources of a batch share their unnamed namespaces, so their file-local names differ within a library or program.
# Left out is cpu_optim/, whose files set the instructions that the compiler may use.
if(SLUICE_UNITY)
  set(CMAKE_UNITY_BUILD ON)
  if(NOT CMAKE_UNITY_BUILD_BATCH_SIZE)
    # Larger batches take less time in all, and leave less to do side by side.
    cmake_host_system_information(RESULT processors QUERY NUMBER_OF_LOGICAL_CORES)
    set(CMAKE_UNITY_BUILD_BATCH_SIZE 10)
    if(processors LESS_EQUAL 4)
      set(CMAKE_UNITY_BUILD_BATCH_SIZE 20)
    endif()
  endif()
endif()
# GCC cleans up its memory again and again while it compiles a batch. A sixth of the time is saved where it waits until a batch
# takes half a gibibyte; the output is the same.
if(SLUICE_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  cmake_host_system_information(RESULT memory_mib QUERY TOTAL_PHYSICAL_MEMORY)
  cmake_host_system_information(RESULT processors QUERY NUMBER_OF_LOGICAL_CORES)
  math(EXPR memory_needed_mib "2048 * ${processors}")
  if(memory_mib GREATER_EQUAL memory_needed_mib)
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=524288>)
  endif()
endif()
# A release build is the same to the byte wherever it is made. Builds with debug information keep the paths that debuggers need.
foreach(map "${PROJECT_BINARY_DIR}/=build/" "${PROJECT_SOURCE_DIR}/=")
  add_compile_options("$<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CXX>>:-ffile-prefix-map=${map}>"
                      "$<$<AND:$<CONFIG:Release>,$<COMPILE_LANGUAGE:CUDA>>:-Xcompiler=\"-ffile-prefix-map=${map}\">")
endforeach()

# The options that every target of the project is compiled with. Applications that link it need them, too, since the
# linker may choose their copies of inline functions. -ffp-contract=off is part of the result, not of the speed: a fused
# multiply-add rounds once where the definition rounds twice. -fno-fast-math takes back a -ffast-math of CXXFLAGS,
# which stand before it.
add_library(sluice_flags INTERFACE)
target_compile_options(sluice_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-fno-fast-math;-ffp-contract=off>
  $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-fno-fast-math,-ffp-contract=off>)
# Public headers lie in the layers' folders `include`; everything else is included by its path from the root.
foreach(layer base gpu engine)
  target_include_directories(sluice_flags INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/${layer}/include>)
endforeach()
target_include_directories(sluice_flags INTERFACE $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}>
                                                  $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
set_target_properties(sluice_flags PROPERTIES EXPORT_NAME flags)

set(SLUICE_WARNINGS -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wnon-virtual-dtor -Woverloaded-virtual)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  list(APPEND SLUICE_WARNINGS -Wno-restrict)  # false alarms in std::string (GCC bug 105651)
endif()
if(SLUICE_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # The first takes a source of the batch for a header, the second sees names of a neighbour.
  list(APPEND SLUICE_WARNINGS -Wno-subobject-linkage -Wno-shadow)
  # The optimizer's guesses are errors where a source is compiled alone (preset dev): here they depend on its neighbours.
  foreach(guess array-bounds maybe-uninitialized stringop-overflow stringop-overread free-nonheap-object)
    list(APPEND SLUICE_WARNINGS -Wno-error=${guess})
  endforeach()
endif()
set(SLUICE_CUDA_WARNINGS -Xcompiler=-Wall,-Wextra)
if(SLUICE_CUDA_ARCHITECTURES STREQUAL "90-real")
  # An array on a kernel's stack lies in the GPU's memory. For other architectures, a few bytes beside calls do, too.
  list(APPEND SLUICE_CUDA_WARNINGS -Xptxas=--warn-on-spills,--warn-on-local-memory-usage)
endif()
if(SLUICE_WERROR)
  list(APPEND SLUICE_WARNINGS -Werror)
  list(APPEND SLUICE_CUDA_WARNINGS --Werror=all-warnings)
endif()
if(SLUICE_SANITIZE STREQUAL "address")
  # Left out is what costs much to compile and says little here: AddressSanitizer sees a null or short object itself, and
  # the access behind a pointer that has wrapped around. Alignment is checked where bytes become numbers: in all
  # layers but the engine (sluice_add_library), and in sources of the engine and the tools that their CMakeLists.txt name.
  set(SLUICE_SANITIZE_FLAGS -fsanitize=address,undefined -fno-sanitize=null,vptr,object-size,pointer-overflow,alignment -fno-sanitize-recover=all
      -fno-omit-frame-pointer)
elseif(SLUICE_SANITIZE STREQUAL "thread")
  set(SLUICE_SANITIZE_FLAGS -fsanitize=thread -fno-omit-frame-pointer)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # ThreadSanitizer does not see fences. The only ones are in the status page, between processes.
    list(APPEND SLUICE_WARNINGS -Wno-tsan)
  endif()
elseif(NOT SLUICE_SANITIZE STREQUAL "")
  message(FATAL_ERROR "SLUICE_SANITIZE is \"${SLUICE_SANITIZE}\"; it must be empty, address or thread")
endif()
if(SLUICE_SANITIZE_FLAGS)
  add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:${SLUICE_SANITIZE_FLAGS}>")
  add_link_options(${SLUICE_SANITIZE_FLAGS})
endif()

# sluice_precompile(TARGET OWNER MORE...): TARGET begins with common headers, and MORE, that are compiled once, for OWNER:
# a target of the same kind and flags, which may be TARGET itself.
function(sluice_precompile target owner)
  if(SLUICE_PRECOMPILED AND target STREQUAL owner)
    target_precompile_headers(${target} PRIVATE
      <fmt/format.h> <algorithm> <array> <atomic> <chrono> <cmath> <condition_variable> <cstdint> <cstring> <fstream>
      <functional> <map> <memory> <mutex> <optional> <span> <string> <thread> <utility> <vector> ${ARGN})
  elseif(SLUICE_PRECOMPILED)
    target_precompile_headers(${target} REUSE_FROM ${owner})
  endif()
endfunction()

# sluice_add_library(NAME SOURCES...): one layer of the library, with the project's flags and warnings.
function(sluice_add_library name)
  add_library(sluice_${name} STATIC ${ARGN})
  add_library(sluice::${name} ALIAS sluice_${name})
  set_target_properties(sluice_${name} PROPERTIES EXPORT_NAME ${name})
  target_compile_features(sluice_${name} PUBLIC cxx_std_20)
  target_compile_options(sluice_${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${SLUICE_WARNINGS}>)
  target_link_libraries(sluice_${name} PUBLIC sluice_flags)
  set_property(GLOBAL APPEND PROPERTY SLUICE_LIBRARIES sluice_${name})
  if(name STREQUAL "engine")
    # It moves bytes and leaves most computing to cpu_optim and gpu, so -O2 is enough. With the second option GCC makes
    # vectors of loops as at -O3; clang does so without. Under AddressSanitizer -Og takes four fifths of the time of -O1,
    # and its tests take as long.
    target_compile_options(sluice_engine PRIVATE
      $<$<AND:$<COMPILE_LANGUAGE:CXX>,$<CONFIG:Release>>:-O2;$<$<CXX_COMPILER_ID:GNU>:-fvect-cost-model=dynamic>>)
    if(SLUICE_SANITIZE STREQUAL "address")
      target_compile_options(sluice_engine PRIVATE -Og)
    endif()
    sluice_precompile(sluice_engine sluice_engine)
  else()
    if(SLUICE_SANITIZE STREQUAL "address")
      target_compile_options(sluice_${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=alignment>)
    endif()
    if(SLUICE_SANITIZE)
      sluice_precompile(sluice_${name} sluice_base)
    endif()
  endif()
endfunction()

function(sluice_print_summary)
  message(STATUS "Sluice ${PROJECT_VERSION}")
  message(STATUS "  build type     ${CMAKE_BUILD_TYPE}   sanitizer: ${SLUICE_SANITIZE}")
  message(STATUS "  tools, tests   ${SLUICE_TOOLS}, ${SLUICE_TESTS}   C interface: ${SLUICE_C}   shared C++ library: ${BUILD_SHARED_LIBS}")
  foreach(feature CUDA NCCL MPI NVTX)
    message(STATUS "  ${feature} (${SLUICE_${feature}})    ${SLUICE_${feature}_SUMMARY}")
  endforeach()
endfunction()
