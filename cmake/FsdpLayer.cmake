# fsdp_layer(NAME SOURCES a.cpp b.cpp DEPENDS layer ...)
#
# An object library from src/NAME. It finds the headers of its own folder and of the layers it
# DEPENDS on (and theirs), and no others: an include that points upwards does not compile. That is
# what the links under build/layers are for: each holds one folder.
function(fsdp_layer name)
  cmake_parse_arguments(LAYER "" "" "SOURCES;DEPENDS" ${ARGN})
  set(link_dir "${CMAKE_BINARY_DIR}/layers/${name}")
  file(MAKE_DIRECTORY "${link_dir}")
  file(CREATE_LINK "${PROJECT_SOURCE_DIR}/src/${name}" "${link_dir}/${name}" SYMBOLIC)

  list(TRANSFORM LAYER_SOURCES PREPEND "${PROJECT_SOURCE_DIR}/src/${name}/")
  set(target fsdp_${name})
  add_library(${target} OBJECT ${LAYER_SOURCES})
  target_include_directories(${target} PUBLIC "${PROJECT_SOURCE_DIR}/include" "${link_dir}")
  target_link_libraries(${target} PUBLIC fsdp_settings)
  foreach(layer IN LISTS LAYER_DEPENDS)
    target_link_libraries(${target} PUBLIC fsdp_${layer}_headers)
  endforeach()
  add_library(fsdp_${name}_headers INTERFACE)
  target_include_directories(fsdp_${name}_headers INTERFACE "${link_dir}")
  foreach(layer IN LISTS LAYER_DEPENDS)
    target_link_libraries(fsdp_${name}_headers INTERFACE fsdp_${layer}_headers)
  endforeach()
  target_precompile_headers(${target} REUSE_FROM fsdp_pch)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${FSDP_UNITY} UNITY_BUILD_BATCH_SIZE 8)
  target_sources(fsdp PRIVATE $<TARGET_OBJECTS:${target}>)
endfunction()
