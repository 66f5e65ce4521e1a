# Port of the C++ library for vcpkg, built from the archive beside this file:
#   vcpkg install sluice --overlay-ports=FOLDER     FOLDER is vcpkg/ of what tools/release.sh has written
set(archive ${CURRENT_PORT_DIR}/sluice-@VERSION@.tar.gz)
file(SHA512 ${archive} checksum)
if(NOT checksum STREQUAL "@SHA512@")
  message(FATAL_ERROR "${archive} is not the archive of the release: its SHA-512 is ${checksum}")
endif()
vcpkg_extract_source_archive(SOURCE_PATH ARCHIVE ${archive})
if(VCPKG_LIBRARY_LINKAGE STREQUAL "dynamic")
  set(shared ON)
else()
  set(shared OFF)
endif()
vcpkg_cmake_configure(SOURCE_PATH ${SOURCE_PATH}
  OPTIONS -DBUILD_SHARED_LIBS=${shared} -DSLUICE_TESTS=OFF -DSLUICE_TOOLS=OFF -DSLUICE_C=OFF -DSLUICE_UNITY=ON -DSLUICE_CUDA=OFF
          -DSLUICE_MPI=OFF -DSLUICE_NVTX=OFF)
vcpkg_cmake_install()
vcpkg_cmake_config_fixup(CONFIG_PATH lib/cmake/sluice)
vcpkg_fixup_pkgconfig()
file(REMOVE_RECURSE ${CURRENT_PACKAGES_DIR}/debug/include ${CURRENT_PACKAGES_DIR}/debug/share)
vcpkg_install_copyright(FILE_LIST ${SOURCE_PATH}/LICENSE)
