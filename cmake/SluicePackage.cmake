# install() rules, and the files behind find_package(sluice) and pkg-config. Components: c (the C interface); shared with
# shared_development, or static (the C++ library, as BUILD_SHARED_LIBS says); development (headers and what finds the
# libraries); tools (the command); mpi (what it opens to train over MPI).
include(CMakePackageConfigHelpers)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)
get_property(layers GLOBAL PROPERTY SLUICE_LIBRARIES)
# Whichever is not chosen can be installed by its component, as the tests do.
set(not_static "")
set(not_shared EXCLUDE_FROM_ALL)
if(BUILD_SHARED_LIBS)
  set(not_static EXCLUDE_FROM_ALL)
  set(not_shared "")
endif()
install(TARGETS sluice_flags EXPORT sluiceTargets)
install(EXPORT sluiceTargets NAMESPACE sluice:: DESTINATION ${package_dir} COMPONENT development)
install(TARGETS ${layers} EXPORT sluiceStatic ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT static ${not_static})
install(EXPORT sluiceStatic NAMESPACE sluice:: DESTINATION ${package_dir} COMPONENT static ${not_static})
if(TARGET sluice_shared)
  install(TARGETS sluice_shared EXPORT sluiceShared
    LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT shared NAMELINK_COMPONENT shared_development ${not_shared})
  install(EXPORT sluiceShared NAMESPACE sluice:: DESTINATION ${package_dir} COMPONENT shared_development ${not_shared})
endif()

foreach(layer base gpu engine)
  install(DIRECTORY ${layer}/include/sluice DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT development)
endforeach()
configure_package_config_file(cmake/sluiceConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/sluiceConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/sluiceConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/sluiceConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/sluiceConfigVersion.cmake
        DESTINATION ${package_dir} COMPONENT development)

# pkg-config: a static library names all that it needs, a shared one nothing.
file(RELATIVE_PATH pkg_up "${CMAKE_INSTALL_PREFIX}/${SLUICE_LIBDIR}/pkgconfig" "${CMAKE_INSTALL_PREFIX}")
set(pkg_cuda "")
if(SLUICE_HAVE_CUDA)
  get_target_property(pkg_cuda CUDA::cudart_static IMPORTED_LOCATION)
endif()
set(pkg_requires "liburing >= 2.3, hwloc >= 2.5, libxxhash >= 0.8, tbb, fmt")
set(pkg_libs "-lsluice_engine -lsluice_io -lsluice_cpu_optim -lsluice_gpu -lsluice_base ${pkg_cuda} -lrt -ldl -pthread")
configure_file(cmake/sluice.pc.in static/sluice.pc @ONLY)
set(pkg_requires "")
set(pkg_libs -lsluice_cxx)
configure_file(cmake/sluice.pc.in shared/sluice.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/static/sluice.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
        COMPONENT static ${not_static})
if(TARGET sluice_shared)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/shared/sluice.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
          COMPONENT shared_development ${not_shared})
endif()
if(SLUICE_C)
  configure_file(cmake/sluice_c.pc.in sluice_c.pc @ONLY)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/sluice_c.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT development)
endif()

install(FILES configs/sluice.schema.json DESTINATION ${CMAKE_INSTALL_DATADIR}/sluice COMPONENT tools)
if(NOT SLUICE_DEB)  # Debian has the text of the licence once
  install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/sluice COMPONENT tools)
endif()
install(DIRECTORY configs/ DESTINATION ${CMAKE_INSTALL_DATADIR}/sluice/configs COMPONENT tools PATTERN sluice.schema.json EXCLUDE)
install(DIRECTORY examples DESTINATION ${CMAKE_INSTALL_DATADIR}/sluice COMPONENT development)
if(SLUICE_DEB)
  include(SluiceDebian)
endif()
