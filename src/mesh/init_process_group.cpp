#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <exception>
#include <memory>
#include <numeric>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "fsdp/error.h"
#include "fsdp/process_group.h"
#include "mesh/gloo_backend.h"
#include "mesh/hccl_backend.h"
#include "mesh/job_group.h"
#include "mesh/peer_monitor.h"
#include "mesh/rendezvous.h"

namespace fsdp {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

std::string address_of(const Rendezvous& rendezvous) {
  return c10::str(rendezvous.master_addr, ":", rendezvous.master_port);
}

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kProbeInterval{20};
constexpr std::chrono::milliseconds kProbeTimeout{1000};

// Whether a connection can be made to one address now.
bool accepts(const addrinfo& address) {
  const int socket = ::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK, 0);
  if (socket < 0) return false;
  bool connected = ::connect(socket, address.ai_addr, address.ai_addrlen) == 0;
  if (!connected && errno == EINPROGRESS) {
    pollfd event{socket, POLLOUT, 0};
    int error = 0;
    socklen_t length = sizeof(error);
    connected = ::poll(&event, 1, static_cast<int>(kProbeTimeout.count())) == 1 &&
                ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0;
  }
  ::close(socket);
  return connected;
}

// Waits until somebody listens at the master address; false if nobody does until the deadline.
// TCPStore itself asks once a second only, may take three times its timeout, and logs stack traces.
bool wait_for_listener(const Rendezvous& rendezvous, Clock::time_point deadline) {
  const std::string port = std::to_string(rendezvous.master_port);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  while (true) {
    addrinfo* list = nullptr;
    if (::getaddrinfo(rendezvous.master_addr.c_str(), port.c_str(), &hints, &list) == 0) {
      const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> addresses(list, &::freeaddrinfo);
      for (const addrinfo* address = list; address != nullptr; address = address->ai_next) {
        if (accepts(*address)) return true;
      }
    }
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kProbeInterval);
  }
}

// A connection to the job's store; with `may_host` rank 0 also keeps the store.
StorePtr connect(const Rendezvous& rendezvous, std::chrono::milliseconds timeout, bool may_host) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(rendezvous.master_port);
  options.isServer = may_host && rendezvous.rank == 0 && !rendezvous.store_of_agent;
  options.waitWorkers = false;
  options.timeout = timeout;
  FSDP_CHECK(CommError, options.isServer || wait_for_listener(rendezvous, Clock::now() + timeout),
             "init_process_group: rank ", rendezvous.rank, " of ", rendezvous.world_size,
             " did not reach rank 0 within ", timeout.count(), " ms at ", address_of(rendezvous),
             ". Is rank 0 running, and are MASTER_ADDR and MASTER_PORT the same on all ranks?");
  StorePtr store;
  try {
    store = c10::make_intrusive<c10d::TCPStore>(rendezvous.master_addr, options);
  } catch (const std::exception& error) {
    FSDP_CHECK(CommError, false, "init_process_group: rank ", rendezvous.rank, " of ",
               rendezvous.world_size, " cannot ", options.isServer ? "keep" : "use",
               " the store at ", address_of(rendezvous),
               ". Is another job using the port? Set MASTER_PORT to a free one of the machine of "
               "rank 0. The store says: ",
               message_of(error));
  }
  return c10::make_intrusive<c10d::PrefixStore>("fsdp/" + rendezvous.restart_count, store);
}

std::string joined_key(int rank) { return c10::str("joined/", rank); }

std::string missing_ranks(c10d::Store& store, int world_size) {
  std::vector<int> missing;
  try {
    for (int rank = 0; rank < world_size; ++rank) {
      if (!store.check({joined_key(rank)})) missing.push_back(rank);
    }
  } catch (const std::exception&) {
    return "rank 0 or another rank";  // rank 0 gave up first, and took its store along
  }
  return c10::str("ranks [", c10::Join(", ", missing), "]");
}

// Returns when all ranks have come this far.
void wait_for_all(c10d::Store& store, const Rendezvous& rendezvous,
                  std::chrono::milliseconds timeout) {
  store.set(joined_key(rendezvous.rank), c10::str(rendezvous.world_size));
  if (store.add("num_joined", 1) == rendezvous.world_size) store.set("all_joined", "1");
  try {
    store.wait({"all_joined"}, timeout);
  } catch (const std::exception& error) {
    FSDP_CHECK(CommError, false,
               "init_process_group: ", missing_ranks(store, rendezvous.world_size), " of ",
               rendezvous.world_size, " did not join at ", address_of(rendezvous), " within ",
               timeout.count(),
               " ms. Were all of them started, with the same world size? The store says: ",
               message_of(error));
  }
}

// A write to the socket of a rank that died would end this process, too: the store's library leaves
// the signal as it is, and relies on Python, which ignores it.
void ignore_broken_pipes() {
  struct sigaction action {};
  if (::sigaction(SIGPIPE, nullptr, &action) != 0 || action.sa_handler != SIG_DFL) return;
  action.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &action, nullptr);
}

// Which backends a group has. At least one.
struct BackendNames {
  bool gloo = false;
  bool hccl = false;
};

// PyTorch's way to name them: one backend, or one for each type of device.
BackendNames parse_backend(const std::string& text) {
  BackendNames names;
  if (text == "gloo" || text == "cpu:gloo") {
    names = {.gloo = true};
  } else if (text == "hccl" || text == "npu:hccl") {
    names = {.hccl = true};
  } else if (text == "cpu:gloo,npu:hccl" || text == "npu:hccl,cpu:gloo") {
    names = {.gloo = true, .hccl = true};
  }
  const bool has_hccl = make_hccl_backend != nullptr;
  FSDP_CHECK(ConfigError, names.gloo || names.hccl, "init_process_group: the backend '", text,
             "' is not known; there is 'gloo'",
             has_hccl ? ", 'hccl' and both, 'cpu:gloo,npu:hccl'." : ".");
  FSDP_CHECK(ConfigError, !names.hccl || has_hccl, "init_process_group: the backend '", text,
             "' is for Ascend NPUs, and this library was built without them. Build it with "
             "-DFSDP_WITH_NPU=ON (docs/ascend.md).");
  return names;
}

c10::intrusive_ptr<c10d::Backend> make_gloo(const Rendezvous& rendezvous, const StorePtr& store,
                                            std::chrono::milliseconds timeout) {
  GlooOptions gloo;
  gloo.store = c10::make_intrusive<c10d::PrefixStore>("world", store);
  gloo.rank = rendezvous.rank;
  gloo.world_size = rendezvous.world_size;
  gloo.timeout = timeout;
  gloo.loopback = rendezvous.master_addr == "127.0.0.1" || rendezvous.master_addr == "localhost";
  try {
    return make_gloo_backend(gloo);
  } catch (const std::exception& error) {
    FSDP_CHECK(CommError, false, "init_process_group: Gloo could not connect rank ",
               rendezvous.rank, " of ", rendezvous.world_size, ": ", message_of(error));
  }
}

c10::intrusive_ptr<c10d::Backend> make_hccl(const Rendezvous& rendezvous, const StorePtr& store,
                                            std::chrono::milliseconds timeout) {
  HcclOptions hccl;
  hccl.store = c10::make_intrusive<c10d::PrefixStore>("hccl/world", store);
  hccl.rank = rendezvous.rank;
  hccl.world_size = rendezvous.world_size;
  hccl.timeout = timeout;
  hccl.name = "world";
  try {
    return make_hccl_backend(hccl);
  } catch (const std::exception& error) {
    FSDP_CHECK(CommError, false, "init_process_group: HCCL does not start on rank ",
               rendezvous.rank, " of ", rendezvous.world_size, ": ", message_of(error));
  }
}

}  // namespace

ProcessGroupPtr init_process_group(const ProcessGroupOptions& options) {
  const BackendNames names = parse_backend(options.backend);
  FSDP_CHECK(ConfigError, options.timeout.count() > 0,
             "init_process_group: the timeout must be positive, found ", options.timeout.count(),
             " ms.");
  const Rendezvous rendezvous = read_rendezvous(options, process_environment());
  ignore_broken_pipes();
  if (names.hccl) init_npu(rendezvous.local_rank);

  const StorePtr store = connect(rendezvous, options.timeout, /*may_host=*/true);
  PeerMonitor::Options monitor;
  monitor.store = c10::make_intrusive<c10d::PrefixStore>(
      "peers", connect(rendezvous, options.timeout, /*may_host=*/false));
  monitor.store_address = address_of(rendezvous);
  monitor.rank = rendezvous.rank;
  monitor.world_size = rendezvous.world_size;
  monitor.store_host = rendezvous.store_of_agent ? -1 : 0;
  auto peers = std::make_shared<PeerMonitor>(std::move(monitor));
  wait_for_all(*store, rendezvous, options.timeout);

  JobGroup::Options group;
  group.name = "world";
  group.store = store;
  group.monitor = std::move(peers);
  group.job_ranks.resize(static_cast<size_t>(rendezvous.world_size));
  std::iota(group.job_ranks.begin(), group.job_ranks.end(), 0);
  if (names.gloo) {
    group.backend_type = c10d::ProcessGroup::BackendType::GLOO;
    group.backend = make_gloo(rendezvous, store, options.timeout);
  }
  if (names.hccl) {
    group.npu_backend = make_hccl(rendezvous, store, options.timeout);
    if (!names.gloo) group.backend = group.npu_backend;
  }
  ProcessGroupPtr made = c10::make_intrusive<JobGroup>(std::move(group));
  set_default_process_group(made);
  return made;
}

}  // namespace fsdp
