# Runs a port of vcpkg where vcpkg itself is not: the functions that packaging/vcpkg/portfile.cmake calls, with the same effect
# on a system whose packages are installed already.
#   cmake -DPORT=FOLDER -DPREFIX=FOLDER -DWORK=FOLDER [-DLINKAGE=static|dynamic] -P tests/packaging/port_steps.cmake
# Not tried so: the dependencies of vcpkg.json, and the fixing of paths in the files for CMake and pkg-config.
function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

function(vcpkg_extract_source_archive variable)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "ARCHIVE" "")
  file(ARCHIVE_EXTRACT INPUT ${arg_ARCHIVE} DESTINATION ${WORK}/source)
  file(GLOB folder ${WORK}/source/*)
  set(${variable} ${folder} PARENT_SCOPE)
endfunction()

function(vcpkg_cmake_configure)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "SOURCE_PATH" "OPTIONS")
  run(${CMAKE_COMMAND} -S ${arg_SOURCE_PATH} -B ${WORK}/build -G Ninja -DCMAKE_BUILD_TYPE=Release
      -DCMAKE_INSTALL_PREFIX=${CURRENT_PACKAGES_DIR} -DCMAKE_INSTALL_LIBDIR=lib ${arg_OPTIONS})
endfunction()

function(vcpkg_cmake_install)
  run(${CMAKE_COMMAND} --build ${WORK}/build -- --quiet)
  run(${CMAKE_COMMAND} --install ${WORK}/build)
endfunction()

function(vcpkg_cmake_config_fixup)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "CONFIG_PATH" "")
  if(NOT EXISTS ${CURRENT_PACKAGES_DIR}/${arg_CONFIG_PATH}/sluiceConfig.cmake)
    message(FATAL_ERROR "the port names ${arg_CONFIG_PATH}, where no sluiceConfig.cmake was installed")
  endif()
endfunction()

function(vcpkg_fixup_pkgconfig)
endfunction()

function(vcpkg_install_copyright)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "FILE_LIST")
  file(COPY ${arg_FILE_LIST} DESTINATION ${CURRENT_PACKAGES_DIR}/share/sluice)
endfunction()

set(VCPKG_LIBRARY_LINKAGE ${LINKAGE})
set(CURRENT_PORT_DIR ${PORT})
set(CURRENT_PACKAGES_DIR ${PREFIX})
include(${PORT}/portfile.cmake)
