# The tests of the installed package: what is in it, and that examples/ build against it alone, as any application would.
#   MODE=install   installs the build tree SLUICE_BUILD to WORK/static and, with the shared C++ library, to WORK/shared. Each
#                  has the files that it should have and no other. Each public header compiles alone in C++20, with nothing
#                  but the standard library beside it. The C interface alone goes to WORK/c
#   MODE=cmake, MODE=pkg_config   builds the example SOURCE against the prefix WORK/KIND (static, shared or c) by find_package()
#                  or by pkg-config, and runs it
# Given with -D: MODE, SLUICE_BUILD, SOURCE, WORK, KIND, NAME, GENERATOR, COMPILER, BUILD_TYPE, VERSION, FLAGS (the sanitizer's,
# or nothing), HAS_C, HAS_TOOLS, HAS_MPI; LAUNCH (a launcher of ranks, its words separated by commas) runs it once more below that.
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "failed (${status}): ${command}")
  endif()
endfunction()

# check_files(KIND EXPECTED...): the files of the prefix WORK/KIND.
function(check_files kind)
  file(GLOB_RECURSE installed RELATIVE ${WORK}/${kind} ${WORK}/${kind}/*)
  set(surplus ${installed})
  set(absent ${ARGN})
  list(REMOVE_ITEM surplus ${ARGN})
  list(REMOVE_ITEM absent ${installed})
  if(surplus OR absent)
    message(FATAL_ERROR "${kind}: installed, but not expected: ${surplus}\nexpected, but not installed: ${absent}")
  endif()
endfunction()

if(MODE STREQUAL "install")
  file(REMOVE_RECURSE ${WORK})
  file(MAKE_DIRECTORY ${WORK})
  run(${CMAKE_COMMAND} --install ${SLUICE_BUILD} --prefix ${WORK}/static)
  foreach(component c shared shared_development development tools mpi)
    run(${CMAKE_COMMAND} --install ${SLUICE_BUILD} --prefix ${WORK}/shared --component ${component})
  endforeach()
  foreach(component c development)
    run(${CMAKE_COMMAND} --install ${SLUICE_BUILD} --prefix ${WORK}/c --component ${component})
  endforeach()

  # An application that can do without Sluice goes on where a library behind the static one is missing.
  file(WRITE ${WORK}/without/CMakeLists.txt "cmake_minimum_required(VERSION 3.25)\nproject(without CXX)\nfind_package(sluice QUIET)\n"
       "if(sluice_FOUND OR NOT sluice_NOT_FOUND_MESSAGE MATCHES liburing)\n  message(FATAL_ERROR \"found\")\nendif()\n")
  run(${CMAKE_COMMAND} -E env PKG_CONFIG_LIBDIR=${WORK}/without ${CMAKE_COMMAND} -S ${WORK}/without -B ${WORK}/without/build
      -DCMAKE_CXX_COMPILER=${COMPILER} -DCMAKE_PREFIX_PATH=${WORK}/static -DCMAKE_FIND_PACKAGE_NO_PACKAGE_REGISTRY=ON)

  file(GLOB headers ${SOURCE}/*/include/sluice/*.h)
  file(GLOB_RECURSE shared_files RELATIVE ${SOURCE} ${SOURCE}/examples/* ${SOURCE}/configs/*)
  list(REMOVE_ITEM shared_files configs/sluice.schema.json)
  list(APPEND shared_files LICENSE sluice.schema.json)
  list(TRANSFORM shared_files PREPEND share/sluice/)
  string(TOLOWER ${BUILD_TYPE} type)
  string(REGEX REPLACE "^([0-9]+)[.]([0-9]+)[.].*" "\\1;\\2" numbers ${VERSION})
  list(GET numbers 0 major)
  list(GET numbers 1 minor)
  set(package lib/cmake/sluice)
  set(common ${shared_files} ${package}/sluiceConfig.cmake ${package}/sluiceConfigVersion.cmake ${package}/sluiceTargets.cmake
             lib/pkgconfig/sluice.pc)
  if(HAS_C)
    list(APPEND headers ${SOURCE}/capi/sluice.h ${SOURCE}/capi/sluice_gpu.h)
    list(APPEND common lib/libsluice.so lib/libsluice.so.${major} lib/libsluice.so.${VERSION} lib/pkgconfig/sluice_c.pc
                ${package}/sluiceTargets-${type}.cmake)
  endif()
  if(HAS_TOOLS)
    list(APPEND common bin/sluice share/man/man1/sluice.1 share/bash-completion/completions/sluice
                share/zsh/site-functions/_sluice share/fish/vendor_completions.d/sluice.fish)
  endif()
  if(HAS_MPI)
    list(APPEND common lib/sluice/libsluice_mpi.so)
  endif()
  list(TRANSFORM headers REPLACE "^.*/" "include/sluice/")
  list(APPEND common ${headers})
  set(layers base io cpu_optim gpu engine)
  list(TRANSFORM layers REPLACE "(.+)" "lib/libsluice_\\1.a")
  check_files(static ${common} ${layers} ${package}/sluiceStatic.cmake ${package}/sluiceStatic-${type}.cmake)
  check_files(shared ${common} lib/libsluice_cxx.so lib/libsluice_cxx.so.${major}.${minor} lib/libsluice_cxx.so.${VERSION}
              ${package}/sluiceShared.cmake ${package}/sluiceShared-${type}.cmake)

  foreach(header ${headers})
    file(WRITE ${WORK}/alone.cc "#include <${header}>\n")
    file(READ ${WORK}/alone.cc text)
    string(REPLACE "include/" "" text "${text}")
    file(WRITE ${WORK}/alone.cc "${text}")
    run(${COMPILER} -std=c++20 -Wall -Wextra -Wpedantic -Werror -fsyntax-only -I ${WORK}/static/include ${WORK}/alone.cc)
  endforeach()
  return()
endif()

set(work ${WORK}/${NAME}.${KIND}.${MODE})
set(prefix ${WORK}/${KIND})
file(REMOVE_RECURSE ${work})
file(MAKE_DIRECTORY ${work}/run)
if(MODE STREQUAL "cmake")
  string(TOUPPER ${BUILD_TYPE} type)
  # Without optimization: the examples take half the time to compile, and their own code computes little.
  run(${CMAKE_COMMAND} -S ${SOURCE} -B ${work}/build -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${COMPILER}
      -DCMAKE_BUILD_TYPE=${BUILD_TYPE} -DCMAKE_CXX_FLAGS_${type}= -DCMAKE_PREFIX_PATH=${prefix} -DCMAKE_CXX_FLAGS=${FLAGS} -DCMAKE_C_FLAGS=${FLAGS}
      -DCMAKE_FIND_PACKAGE_NO_PACKAGE_REGISTRY=ON)
  run(${CMAKE_COMMAND} --build ${work}/build)
else()
  set(ENV{PKG_CONFIG_PATH} ${prefix}/lib/pkgconfig)
  set(module sluice)
  set(language -std=c++20)
  file(GLOB source ${SOURCE}/main.*)
  if(source MATCHES "[.]c$")
    set(module sluice_c)
    set(language -x c)
  endif()
  execute_process(COMMAND pkg-config --cflags ${module} OUTPUT_VARIABLE cflags OUTPUT_STRIP_TRAILING_WHITESPACE
                  COMMAND_ERROR_IS_FATAL ANY)
  execute_process(COMMAND pkg-config --libs ${module} OUTPUT_VARIABLE libs OUTPUT_STRIP_TRAILING_WHITESPACE
                  COMMAND_ERROR_IS_FATAL ANY)
  separate_arguments(cflags)
  separate_arguments(libs)
  separate_arguments(FLAGS)
  file(MAKE_DIRECTORY ${work}/build)
  run(${COMPILER} ${FLAGS} ${cflags} ${language} ${source} -x none -o ${work}/build/${NAME} ${libs})
endif()

# A program that is linked with the shared library needs that, and none of the libraries behind it.
if(KIND STREQUAL "shared" AND NOT NAME STREQUAL "line")
  execute_process(COMMAND readelf --dynamic --wide ${work}/build/${NAME} OUTPUT_VARIABLE section COMMAND_ERROR_IS_FATAL ANY)
  if(NOT section MATCHES "NEEDED[^\n]*libsluice_cxx[.]so[.][0-9]+[.][0-9]+\\]" OR section MATCHES "NEEDED[^\n]*(fmt|tbb|hwloc|uring)")
    message(FATAL_ERROR "${NAME} needs other libraries than libsluice_cxx:\n${section}")
  endif()
endif()
set(ENV{LD_LIBRARY_PATH} ${prefix}/lib)
run(${work}/build/${NAME} ${work}/run)

# refuse(TEXT ARGUMENTS...): the example ends with 1, and says TEXT.
function(refuse text)
  execute_process(COMMAND ${work}/build/${NAME} ${ARGN} RESULT_VARIABLE status ERROR_VARIABLE errors)
  if(NOT status EQUAL 1 OR NOT errors MATCHES "${text}" OR errors MATCHES "terminate called")
    list(JOIN ARGN " " arguments)
    message(FATAL_ERROR "${NAME} ${arguments}: ended with ${status}: ${errors}")
  endif()
endfunction()
refuse("absent" ${work}/absent)
if(NAME STREQUAL "experts")
  refuse("absent cannot be read" ${work}/run ${work}/absent)
  refuse("run cannot be read" ${work}/run ${work}/run)
elseif(NAME STREQUAL "line")
  refuse("quote" ${work}/a\"b)
  refuse("quote" ${work}/a\\b)
  string(REPEAT "a" 9000 long)
  refuse("too long" ${work}/${long})
endif()
if(LAUNCH)
  string(REPLACE "," ";" LAUNCH "${LAUNCH}")
  run(${LAUNCH} ${work}/build/${NAME} ${work}/run)
endif()
