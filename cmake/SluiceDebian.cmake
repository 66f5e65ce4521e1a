# Debian packages by cpack, after the preset deb: libsluice0 (the C interface), libsluice-cxx0.1 (the C++ library),
# libsluice-dev, sluice (the command) and sluice-mpi.
# CPack looks for these when packages are made, and would then leave out dependencies.
foreach(program dpkg-shlibdeps file)
  find_program(SLUICE_PROGRAM_${program} ${program})
  if(NOT SLUICE_PROGRAM_${program})
    message(FATAL_ERROR "Debian packages need the program ${program}: apt install dpkg-dev file")
  endif()
  mark_as_advanced(SLUICE_PROGRAM_${program})
endforeach()

set(maintainer "Sluice developers <developers@sluice.example>")
set(c_package libsluice${PROJECT_VERSION_MAJOR})
set(cxx_package libsluice-cxx${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})

# The changelog's date is the commit's, or SOURCE_DATE_EPOCH, so that a package is the same whenever it is made.
if(NOT DEFINED ENV{SOURCE_DATE_EPOCH})
  execute_process(COMMAND git -C ${PROJECT_SOURCE_DIR} log -1 --format=%ct OUTPUT_VARIABLE epoch OUTPUT_STRIP_TRAILING_WHITESPACE
                  ERROR_QUIET RESULT_VARIABLE status)
  if(status EQUAL 0)
    set(ENV{SOURCE_DATE_EPOCH} ${epoch})
  endif()
endif()
string(TIMESTAMP date "%a, %d %b %Y %H:%M:%S +0000" UTC)

# sluice_package(COMPONENT PACKAGE SECTION SUMMARY DESCRIPTION): a package, with the documents that each must have.
function(sluice_package component package section summary description)
  string(TOUPPER ${component} upper)
  set(documents ${PROJECT_BINARY_DIR}/debian/${package})
  file(CONFIGURE OUTPUT ${documents}/changelog CONTENT "sluice (@PROJECT_VERSION@) unstable; urgency=medium

  * Version @PROJECT_VERSION@. CHANGELOG.md of the source tells what is new.

 -- @maintainer@  @date@
" @ONLY)
  execute_process(COMMAND gzip -9nkf ${documents}/changelog COMMAND_ERROR_IS_FATAL ANY)
  file(CONFIGURE OUTPUT ${documents}/copyright CONTENT
"Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: Sluice

Files: *
Copyright: 2026 Sluice developers
License: Apache-2.0
 On Debian systems, the full text of the Apache License version 2.0 is in
 /usr/share/common-licenses/Apache-2.0.
" @ONLY)
  install(FILES ${documents}/changelog.gz ${documents}/copyright DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/${package}
          COMPONENT ${component})
  set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${package} PARENT_SCOPE)
  set(CPACK_DEBIAN_${upper}_FILE_NAME DEB-DEFAULT PARENT_SCOPE)
  set(CPACK_DEBIAN_${upper}_PACKAGE_SECTION ${section} PARENT_SCOPE)
  set(CPACK_DEBIAN_${upper}_DESCRIPTION "${summary}\n${description}" PARENT_SCOPE)
  set(CPACK_COMPONENT_${upper}_GROUP ${component} PARENT_SCOPE)
endfunction()
set(about "Sluice keeps a model's parameters and optimizer state in host memory or on
NVMe drives and brings each layer to the device just before it is needed.")
sluice_package(c ${c_package} libs "offload engine for training neural networks (C library)"
  "${about}\nThis package has the library for programs in C.")
sluice_package(shared ${cxx_package} libs "offload engine for training neural networks (C++ library)"
  "${about}\nThis package has the library for programs in C++.")
sluice_package(development libsluice-dev libdevel "offload engine for training neural networks (development files)"
  "${about}\nThis package has the headers, and what CMake and pkg-config need.")
sluice_package(tools sluice science "command to train neural networks that are larger than memory"
  "${about}\nThis package has the command, which trains GPTs, plans and measures.")
set(CPACK_COMPONENTS_ALL c shared shared_development development tools)
if(SLUICE_HAVE_MPI)
  sluice_package(mpi sluice-mpi science "command to train neural networks larger than memory (MPI)"
    "${about}\nThis package lets the command train with several processes over MPI.")
  set(CPACK_DEBIAN_MPI_PACKAGE_DEPENDS "sluice (= ${PROJECT_VERSION})")
  set(CPACK_DEBIAN_TOOLS_PACKAGE_SUGGESTS sluice-mpi)
  list(APPEND CPACK_COMPONENTS_ALL mpi)
endif()
set(CPACK_COMPONENT_SHARED_DEVELOPMENT_GROUP development)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "${c_package} (= ${PROJECT_VERSION}), ${cxx_package} (= ${PROJECT_VERSION})")

# lintian takes -fno-fast-math for an option that changes arithmetic. It keeps a program's -ffast-math away from the inline
# functions of the public headers.
file(WRITE ${PROJECT_BINARY_DIR}/debian/overrides/libsluice-dev
     "libsluice-dev: pkg-config-bad-directive -fno-fast-math [usr/lib/*/pkgconfig/sluice.pc]\n")
install(FILES ${PROJECT_BINARY_DIR}/debian/overrides/libsluice-dev DESTINATION ${CMAKE_INSTALL_DATADIR}/lintian/overrides
        COMPONENT development)

# The linker's cache is renewed by a trigger. CPack would add scripts that call ldconfig, which Debian no longer wants: naming
# scripts that do not exist keeps it from that.
file(WRITE ${PROJECT_BINARY_DIR}/debian/triggers "activate-noawait ldconfig\n")
foreach(library C SHARED)
  set(CPACK_DEBIAN_${library}_PACKAGE_CONTROL_EXTRA ${PROJECT_BINARY_DIR}/debian/triggers
      ${PROJECT_BINARY_DIR}/debian/none/postinst ${PROJECT_BINARY_DIR}/debian/none/postrm)
endforeach()

set(CPACK_GENERATOR DEB)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING ONE_PER_GROUP)
set(CPACK_PACKAGE_NAME sluice)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_CONTACT ${maintainer})
set(CPACK_DEBIAN_PACKAGE_MAINTAINER ${maintainer})
set(CPACK_DEBIAN_PACKAGE_PRIORITY optional)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS_PRIVATE_DIRS ${PROJECT_BINARY_DIR}/capi ${PROJECT_BINARY_DIR}/engine)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY "=")
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_STRIP_FILES ON)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ
    WORLD_EXECUTE)
set(CPACK_OUTPUT_FILE_PREFIX ${PROJECT_BINARY_DIR}/packages)
include(CPack)
