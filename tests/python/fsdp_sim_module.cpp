// The simulated accelerator and the c10d backend of rank threads, for Python: so that PyTorch's own
// FSDP2 runs on both.

#include <pthread.h>

#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <torch/csrc/utils/pybind.h>

#include "fsdp/sim.h"
#include "mesh/thread_backend.h"
#include "mesh/thread_room.h"

namespace py = pybind11;
namespace sim = fsdp::sim;

namespace {

// A call may wait for work that a thread puts on a stream while it has Python's lock.
using NoGil = py::call_guard<py::gil_scoped_release>;

void name_thread(const std::string& name) {
  pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
}

// The rank threads of one run, and their process groups by name: ranks with equal names meet.
struct Job {
  std::shared_ptr<fsdp::ThreadRoom> room;
  std::map<std::string, std::shared_ptr<fsdp::ThreadGroup>> groups;
};
std::mutex jobs_mutex;
std::map<std::string, Job> jobs;

c10::intrusive_ptr<c10d::Backend> make_thread_backend(const std::string& job_name, int world_size,
                                                      const std::string& group_name,
                                                      const std::vector<int>& ranks, int rank,
                                                      double timeout_s) {
  const std::lock_guard lock(jobs_mutex);
  Job& job = jobs[job_name];
  if (!job.room) {
    const std::chrono::duration<double> timeout(timeout_s);
    job.room = std::make_shared<fsdp::ThreadRoom>(
        world_size, std::chrono::duration_cast<std::chrono::milliseconds>(timeout));
  }
  auto& group = job.groups[group_name];
  if (!group) group = job.room->make_group(ranks);
  return c10::make_intrusive<fsdp::ThreadBackend>(group, rank);
}

// Frees the job's other ranks, with what this one threw.
void abort_job(const std::string& job_name, int rank, const std::string& message) {
  const std::lock_guard lock(jobs_mutex);
  const auto job = jobs.find(job_name);
  if (job != jobs.end()) job->second.room->abort(rank, message);
}

void forget_job(const std::string& job_name) {
  const std::lock_guard lock(jobs_mutex);
  jobs.erase(job_name);
}

std::vector<std::string> take_races() {
  std::vector<std::string> texts;
  for (const sim::Race& race : sim::take_races()) texts.push_back(race.describe());
  return texts;
}

}  // namespace

PYBIND11_MODULE(fsdp_sim_module, module) {
  py::enum_<sim::Execution>(module, "Execution")
      .value("EAGER", sim::Execution::kEager)
      .value("LATE_SIDE_STREAMS", sim::Execution::kLateSideStreams)
      .value("LATE_DEFAULT_STREAMS", sim::Execution::kLateDefaultStreams)
      .value("LATE", sim::Execution::kLate);
  py::enum_<sim::OnRace>(module, "OnRace")
      .value("THROW", sim::OnRace::kThrow)
      .value("RECORD", sim::OnRace::kRecord)
      .value("IGNORE", sim::OnRace::kIgnore);
  py::class_<sim::MemoryStats>(module, "MemoryStats")
      .def_readonly("allocated", &sim::MemoryStats::allocated)
      .def_readonly("peak_allocated", &sim::MemoryStats::peak_allocated)
      .def_readonly("reserved", &sim::MemoryStats::reserved)
      .def_readonly("peak_reserved", &sim::MemoryStats::peak_reserved)
      .def_readonly("num_allocations", &sim::MemoryStats::num_allocations);
  py::class_<sim::Launch>(module, "Launch")
      .def_readonly("operation", &sim::Launch::operation)
      .def_readonly("stream", &sim::Launch::stream)
      .def_readonly("place", &sim::Launch::place)
      .def_readonly("thread", &sim::Launch::thread);
  py::class_<sim::Trace>(module, "Trace")
      .def(py::init<>(), NoGil())
      .def("launches", &sim::Trace::launches, NoGil())
      .def("is_ordered", &sim::Trace::is_ordered, NoGil());

  module.def("enable", &sim::enable, NoGil());
  module.def("is_enabled", &sim::is_enabled);
  module.def("set_execution", &sim::set_execution, NoGil());
  module.def("execution", &sim::execution);
  module.def("set_on_race", &sim::set_on_race, NoGil());
  module.def("take_races", &take_races, NoGil());
  module.def("memory_stats", &sim::memory_stats, NoGil());
  module.def("reset_peak_memory_stats", &sim::reset_peak_memory_stats, NoGil());
  module.def("empty_cache", &sim::empty_cache, NoGil());
  module.def("synchronize", &sim::synchronize, NoGil());
  module.def("name_thread", &name_thread);
  module.def("default_generator", [](int device) {
    return at::detail::getPrivateUse1Hooks().getDefaultGenerator(
        static_cast<c10::DeviceIndex>(device));
  });

  module.def("make_thread_backend", &make_thread_backend);
  module.def("abort_job", &abort_job, NoGil());
  module.def("forget_job", &forget_job);
}
