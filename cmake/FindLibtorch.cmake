# Finds libtorch: the directory with include/ and lib/ of a torch wheel or of a libtorch archive.
#
# Looks at FSDP_TORCH (CMake variable or environment), then at the private virtual environment that
# tools/bootstrap made. Needs no CUDA toolkit, also when that torch is a CUDA build: it links the
# CPU libraries alone by path, which torch's own package file cannot do (it insists on the toolkit).
#
# Defines: Libtorch::Libtorch, Libtorch_ROOT, Libtorch_VERSION.

if(NOT FSDP_TORCH AND DEFINED ENV{FSDP_TORCH})
  set(FSDP_TORCH "$ENV{FSDP_TORCH}")
endif()
if(FSDP_TORCH)
  set(_libtorch_candidates "${FSDP_TORCH}")
else()
  file(GLOB _libtorch_candidates
       "${CMAKE_SOURCE_DIR}/.deps/venv/lib/python3*/site-packages/torch"
       "${CMAKE_CURRENT_LIST_DIR}/../.deps/venv/lib/python3*/site-packages/torch")
endif()

find_path(Libtorch_ROOT NAMES include/ATen/core/Tensor.h PATHS ${_libtorch_candidates}
          NO_DEFAULT_PATH)
if(Libtorch_ROOT)
  find_library(Libtorch_CPU_LIBRARY torch_cpu PATHS "${Libtorch_ROOT}/lib" NO_DEFAULT_PATH)
  find_library(Libtorch_C10_LIBRARY c10 PATHS "${Libtorch_ROOT}/lib" NO_DEFAULT_PATH)
  set(_libtorch_version_file "${Libtorch_ROOT}/include/torch/headeronly/version.h")
  if(NOT EXISTS "${_libtorch_version_file}")
    set(_libtorch_version_file "${Libtorch_ROOT}/include/torch/version.h")
  endif()
  if(EXISTS "${_libtorch_version_file}")
    file(STRINGS "${_libtorch_version_file}" _libtorch_lines
         REGEX "define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
    string(REGEX REPLACE "[^0-9;]+" "" _libtorch_numbers "${_libtorch_lines}")
    string(REPLACE ";" "." Libtorch_VERSION "${_libtorch_numbers}")
  endif()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  Libtorch
  REQUIRED_VARS Libtorch_ROOT Libtorch_CPU_LIBRARY Libtorch_C10_LIBRARY
  VERSION_VAR Libtorch_VERSION
  REASON_FAILURE_MESSAGE
    "run tools/bootstrap, or set FSDP_TORCH to the directory that holds torch's include/ and lib/")

if(Libtorch_FOUND AND NOT TARGET Libtorch::Libtorch)
  add_library(Libtorch::Libtorch INTERFACE IMPORTED)
  set_target_properties(
    Libtorch::Libtorch
    PROPERTIES INTERFACE_SYSTEM_INCLUDE_DIRECTORIES
               "${Libtorch_ROOT}/include;${Libtorch_ROOT}/include/torch/csrc/api/include"
               INTERFACE_INCLUDE_DIRECTORIES
               "${Libtorch_ROOT}/include;${Libtorch_ROOT}/include/torch/csrc/api/include"
               INTERFACE_LINK_LIBRARIES "${Libtorch_CPU_LIBRARY};${Libtorch_C10_LIBRARY}"
               # A CUDA build of torch names CUDA libraries that a CPU build of ours never calls.
               INTERFACE_LINK_OPTIONS
               "LINKER:--unresolved-symbols=ignore-in-shared-libs,-rpath,${Libtorch_ROOT}/lib")
endif()
