# install() rules and the package files behind find_package(sluice).
include(CMakePackageConfigHelpers)

get_property(libraries GLOBAL PROPERTY SLUICE_LIBRARIES)
install(TARGETS ${libraries} EXPORT sluiceTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT sluiceTargets NAMESPACE sluice:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)
foreach(layer base gpu engine)
  install(DIRECTORY ${layer}/include/sluice DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
endforeach()
configure_package_config_file(cmake/sluiceConfig.cmake.in ${CMAKE_CURRENT_BINARY_DIR}/sluiceConfig.cmake
                              INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/sluiceConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/sluiceConfig.cmake ${CMAKE_CURRENT_BINARY_DIR}/sluiceConfigVersion.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/sluice)
install(FILES LICENSE configs/sluice.schema.json DESTINATION ${CMAKE_INSTALL_DATADIR}/sluice)
install(DIRECTORY configs/ DESTINATION ${CMAKE_INSTALL_DATADIR}/sluice/configs PATTERN sluice.schema.json EXCLUDE)
install(DIRECTORY examples DESTINATION ${CMAKE_INSTALL_DATADIR}/sluice)
