// [Note: starting torch_npu]
// A program has to start torch_npu: nothing happens by itself when libtorch_npu.so is loaded,
// except that the device type gets its name. There are two builds of that library.
//
// One for libtorch (torch_npu built with BUILD_LIBTORCH) exports torch_npu::init_npu(device).
//
// The one in the wheel does not, nor any other function that sets the device up, and it takes the
// state of a Python interpreter for granted: before it waits for its queue of kernels it asks
// whether the thread holds Python's lock, and without an interpreter the answer is yes, after which
// giving the lock back ends the process. So an interpreter is started here, unless the program has
// one, its lock is given back at once, and torch_npu's own initialisation is called in it; what is
// imported is the torch and the torch_npu whose libraries this process has loaded. For the end
// Python calls what torch_npu registered with its atexit; an exit of the process would be too late,
// since torch_npu's thread-local state and its threads are gone by then.
//
// All of this is looked up as weak symbols: either build will do, and neither torch_npu's nor
// Python's headers are needed.

#include <dlfcn.h>
#include <atomic>
#include <filesystem>
#include <mutex>
#include <string>

#include <c10/core/Device.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "fsdp/error.h"
#include "mesh/hccl_backend.h"

namespace torch_npu {
[[gnu::weak]] void init_npu(c10::DeviceIndex device_index);
[[gnu::weak]] void finalize_npu();
}  // namespace torch_npu

namespace c10_npu {
c10::DeviceIndex device_count() noexcept;
}

extern "C" {
[[gnu::weak]] int Py_IsInitialized();
[[gnu::weak]] void Py_InitializeEx(int install_signal_handlers);
[[gnu::weak]] void* PyEval_SaveThread();
[[gnu::weak]] int PyGILState_Ensure();
[[gnu::weak]] void PyGILState_Release(int state);
[[gnu::weak]] int PyRun_SimpleStringFlags(const char* code, void* flags);
[[gnu::weak]] void* PyImport_AddModule(const char* name);
[[gnu::weak]] void* PyObject_GetAttrString(void* object, const char* name);
[[gnu::weak]] const char* PyUnicode_AsUTF8(void* object);
}

namespace fsdp {
namespace {

std::atomic<bool> owns_interpreter = false;  // it is the process's, as torch_npu is

// The folder that holds the Python package of a loaded library: <folder>/torch/lib/libc10.so.
std::string package_folder(const void* symbol) {
  Dl_info info{};
  TORCH_INTERNAL_ASSERT(::dladdr(symbol, &info) != 0);
  const std::filesystem::path library = std::filesystem::canonical(info.dli_fname);
  return library.parent_path().parent_path().parent_path().string();
}

std::string python_literal(const std::string& text) {
  std::string literal = "'";
  for (const char c : text) {
    if (c == '\'' || c == '\\') literal += '\\';
    literal += c;
  }
  return literal + "'";
}

// The start of torch_npu as a Python program would do it; its error is left in a variable.
std::string start_code(int index) {
  const auto* torch = reinterpret_cast<const void*>(&c10::DeviceTypeName);
  const auto* torch_npu = reinterpret_cast<const void*>(&c10_npu::device_count);
  return c10::str(
      "import sys\n"
      "fsdp_npu_error = ''\n"
      "try:\n"
      "    for fsdp_folder in [",
      python_literal(package_folder(torch)), ", ", python_literal(package_folder(torch_npu)),
      "]:\n"
      "        if fsdp_folder not in sys.path:\n"
      "            sys.path.append(fsdp_folder)\n"
      "    import torch_npu\n"
      "    torch_npu.npu.set_device(",
      index,
      ")\n"
      "    torch_npu.npu._lazy_init()\n"
      "except BaseException as fsdp_error:\n"
      "    fsdp_npu_error = type(fsdp_error).__name__ + ': ' + str(fsdp_error)\n");
}

void start_in_python(int index) {
  FSDP_CHECK(
      ConfigError, Py_InitializeEx != nullptr,
      "init_process_group: this libtorch_npu.so needs Python, and libpython is not linked to "
      "this program. Link it, or use a torch_npu that was built for libtorch.");
  static std::once_flag started;  // by all rank threads of this process
  std::call_once(started, [] {
    if (Py_IsInitialized() != 0) return;  // the program is Python, or has it
    Py_InitializeEx(/*install_signal_handlers=*/0);
    PyEval_SaveThread();
    owns_interpreter = true;
  });
  const int state = PyGILState_Ensure();
  std::string error = "the code that starts it is refused";
  if (PyRun_SimpleStringFlags(start_code(index).c_str(), nullptr) == 0) {
    error =
        PyUnicode_AsUTF8(PyObject_GetAttrString(PyImport_AddModule("__main__"), "fsdp_npu_error"));
  }
  PyGILState_Release(state);
  FSDP_CHECK(StateError, error.empty(), "init_process_group: torch_npu does not start on NPU ",
             index, ". It says: ", error,
             ". Does `import torch_npu` work in the Python that it was installed for, in this "
             "environment?");
}

void start_without_python(int index) { torch_npu::init_npu(static_cast<c10::DeviceIndex>(index)); }

}  // namespace

void init_npu(int index) {
  const c10::impl::VirtualGuardImpl guard(c10::DeviceType::PrivateUse1);
  const int num_devices = guard.deviceCount();
  FSDP_CHECK(ConfigError, index < num_devices, "init_process_group: this rank is number ", index,
             " of its machine, and takes the NPU of that number, but there are ", num_devices,
             " NPUs. Start at most one rank for each of them (ASCEND_RT_VISIBLE_DEVICES may hide "
             "some); `npu-smi info` shows them.");
  if (torch_npu::init_npu != nullptr) {
    start_without_python(index);
  } else {
    start_in_python(index);
  }
  guard.setDevice(c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index)));
}

void end_npu() {
  if (torch_npu::init_npu != nullptr) {
    torch_npu::finalize_npu();
  } else if (owns_interpreter.exchange(false)) {
    const int state = PyGILState_Ensure();
    PyRun_SimpleStringFlags("import atexit\natexit._run_exitfuncs()\n", nullptr);
    PyGILState_Release(state);
  }
}

}  // namespace fsdp
