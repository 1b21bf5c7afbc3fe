# Installs the library with its public headers, and a package for find_package(fsdp).
#
# The package carries FindLibtorch: whoever uses it compiles against the same torch that the library
# was built with, which the package remembers and FSDP_TORCH may replace by an equal one.
option(FSDP_INSTALL "Generate the rules of cmake --install" ${PROJECT_IS_TOP_LEVEL})
if(NOT FSDP_INSTALL)
  return()
endif()

include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Where libtorch is, Libtorch::Libtorch writes into whatever is linked to it.
set_target_properties(fsdp PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
# In the build tree fsdp names Libtorch::Libtorch, in the package too: the config file finds it.
set_property(TARGET fsdp APPEND PROPERTY INTERFACE_LINK_LIBRARIES
                                         $<INSTALL_INTERFACE:Libtorch::Libtorch>)

add_custom_target(installed)
add_dependencies(installed fsdp)

set(FSDP_PACKAGE_DIR "${CMAKE_INSTALL_LIBDIR}/cmake/fsdp")
install(TARGETS fsdp EXPORT fsdpTargets)
if(NOT FSDP_WITH_NPU)
  set_target_properties(fsdp_sim PROPERTIES VERSION ${PROJECT_VERSION}
                        SOVERSION ${PROJECT_VERSION_MAJOR} EXPORT_NAME sim
                        INSTALL_RPATH "$ORIGIN")
  install(TARGETS fsdp_sim EXPORT fsdpTargets)
  add_dependencies(installed fsdp_sim)
endif()
install(DIRECTORY include/fsdp DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING
        PATTERN "*.h")
if(FSDP_BUILD_TRAIN)
  set_target_properties(fsdp-train PROPERTIES
                        INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
  install(TARGETS fsdp-train)
  add_dependencies(installed fsdp-train)
endif()

install(EXPORT fsdpTargets NAMESPACE fsdp:: DESTINATION "${FSDP_PACKAGE_DIR}")
configure_package_config_file(
  cmake/fsdpConfig.cmake.in "${PROJECT_BINARY_DIR}/package/fsdpConfig.cmake"
  INSTALL_DESTINATION "${FSDP_PACKAGE_DIR}" NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/package/fsdpConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/package/fsdpConfig.cmake"
              "${PROJECT_BINARY_DIR}/package/fsdpConfigVersion.cmake" cmake/FindLibtorch.cmake
        DESTINATION "${FSDP_PACKAGE_DIR}")
install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DATAROOTDIR}/doc/fsdp")
