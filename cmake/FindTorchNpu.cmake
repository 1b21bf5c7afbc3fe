# Finds torch_npu, which gives libtorch the device type "npu" (Ascend) and the HCCL collectives.
#
# Looks at FSDP_TORCH_NPU (CMake variable or environment): the folder with the include/ and lib/ of
# a torch-npu wheel, or of a build of torch_npu for libtorch. Then at where `tools/bootstrap npu`
# unpacked the wheel. CANN, to which libtorch_npu.so is linked, is needed to run, not to build.
#
# libtorch_npu.so of the wheel uses Python: it names libtorch_python.so as a library that it needs,
# and expects that the program has libpython's symbols. Both become needed libraries of ours. A
# build of torch_npu for libtorch (it exports torch_npu::init_npu) needs neither.
#
# Defines: TorchNpu::TorchNpu, TorchNpu_ROOT, TorchNpu_VERSION. Call after find_package(Libtorch).

if(NOT FSDP_TORCH_NPU AND DEFINED ENV{FSDP_TORCH_NPU})
  set(FSDP_TORCH_NPU "$ENV{FSDP_TORCH_NPU}")
endif()
if(FSDP_TORCH_NPU)
  set(_torch_npu_candidates "${FSDP_TORCH_NPU}")
else()
  set(_torch_npu_candidates "${CMAKE_SOURCE_DIR}/.deps/npu/torch_npu")
endif()

find_path(TorchNpu_ROOT NAMES include/torch_npu/csrc/distributed/ProcessGroupHCCL.hpp
          PATHS ${_torch_npu_candidates} NO_DEFAULT_PATH)
if(TorchNpu_ROOT)
  find_library(TorchNpu_LIBRARY torch_npu PATHS "${TorchNpu_ROOT}/lib" NO_DEFAULT_PATH)
  if(EXISTS "${TorchNpu_ROOT}/version.py")
    file(STRINGS "${TorchNpu_ROOT}/version.py" _torch_npu_version REGEX "^__version__ *=")
    string(REGEX MATCH "[0-9]+[.][0-9]+[.][0-9]+" TorchNpu_VERSION "${_torch_npu_version}")
  endif()
  # libtorch_npu.so needs it and does not say where it is; what is loaded already is not looked for.
  find_library(TorchNpu_TORCH_LIBRARY torch PATHS "${Libtorch_ROOT}/lib" NO_DEFAULT_PATH)
  set(TorchNpu_NEEDED "${TorchNpu_TORCH_LIBRARY}")
  # The Python extension lies beside lib/ in a wheel, and its name says which Python.
  file(GLOB _torch_npu_extension "${TorchNpu_ROOT}/_C.cpython-*.so")
  if(_torch_npu_extension)
    string(REGEX MATCH "cpython-3([0-9]+)" _torch_npu_match "${_torch_npu_extension}")
    set(_torch_npu_python "3.${CMAKE_MATCH_1}")
    find_library(TorchNpu_TORCH_PYTHON_LIBRARY torch_python PATHS "${Libtorch_ROOT}/lib"
                 NO_DEFAULT_PATH)
    # By its full name too: the file without a number comes with Python's development files only.
    find_library(TorchNpu_PYTHON_LIBRARY
                 NAMES "python${_torch_npu_python}" "libpython${_torch_npu_python}.so.1.0"
                 HINTS "${FSDP_PYTHON_LIBDIR}" ENV CONDA_PREFIX PATH_SUFFIXES lib)
    set(_torch_npu_required TorchNpu_TORCH_PYTHON_LIBRARY TorchNpu_PYTHON_LIBRARY)
    list(APPEND TorchNpu_NEEDED "${TorchNpu_TORCH_PYTHON_LIBRARY}" "${TorchNpu_PYTHON_LIBRARY}")
  endif()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(
  TorchNpu
  REQUIRED_VARS TorchNpu_ROOT TorchNpu_LIBRARY TorchNpu_TORCH_LIBRARY ${_torch_npu_required}
  VERSION_VAR TorchNpu_VERSION
  REASON_FAILURE_MESSAGE
    "run tools/bootstrap npu, or set FSDP_TORCH_NPU to the folder that holds torch_npu's include/ \
and lib/. A wheel also needs libpython${_torch_npu_python}.so, in FSDP_PYTHON_LIBDIR if it is not \
where libraries usually are. See docs/ascend.md.")

if(TorchNpu_FOUND AND TorchNpu_VERSION AND NOT TorchNpu_VERSION STREQUAL Libtorch_VERSION)
  message(FATAL_ERROR "torch_npu ${TorchNpu_VERSION} in ${TorchNpu_ROOT} does not fit libtorch \
${Libtorch_VERSION} in ${Libtorch_ROOT}: the two must be of one version.")
endif()

if(TorchNpu_FOUND AND NOT TARGET TorchNpu::TorchNpu)
  set(_torch_npu_rpath "${TorchNpu_ROOT}/lib")
  if(TorchNpu_PYTHON_LIBRARY)
    cmake_path(GET TorchNpu_PYTHON_LIBRARY PARENT_PATH _torch_npu_python_dir)
    string(APPEND _torch_npu_rpath ":${_torch_npu_python_dir}")
  endif()
  add_library(TorchNpu::TorchNpu INTERFACE IMPORTED)
  # Its headers name c10d's as <c10d/...>, and ACL's as <acl/...>.
  set(_torch_npu_includes "${TorchNpu_ROOT}/include" "${TorchNpu_ROOT}/include/third_party/acl/inc"
                          "${Libtorch_ROOT}/include/torch/csrc/distributed")
  # Needed although nothing of ours names a symbol of some of them.
  set(_torch_npu_libraries "-Wl,--push-state,--no-as-needed" "${TorchNpu_LIBRARY}"
                           ${TorchNpu_NEEDED} "-Wl,--pop-state")
  set_target_properties(
    TorchNpu::TorchNpu
    PROPERTIES INTERFACE_SYSTEM_INCLUDE_DIRECTORIES "${_torch_npu_includes}"
               INTERFACE_INCLUDE_DIRECTORIES "${_torch_npu_includes}"
               INTERFACE_LINK_LIBRARIES "${_torch_npu_libraries}"
               INTERFACE_LINK_OPTIONS
               "LINKER:--unresolved-symbols=ignore-in-shared-libs,-rpath,${_torch_npu_rpath}")
endif()
