#include "mesh/rendezvous.h"

#include <array>
#include <charconv>
#include <cstdint>
#include <cstdlib>

#include "fsdp/error.h"

namespace fsdp {
namespace {

constexpr int kDefaultPort = 29500;  // torch's
constexpr int kFirstDerivedPort = 20000;
constexpr int kNumDerivedPorts = 9000;  // stays below the ports that systems give to clients

// The variables of one launcher. An empty name: it has none.
struct Launcher {
  const char* name;
  const char* rank;
  const char* world_size;
  const char* local_rank;
  const char* local_size;  // ranks on this machine
  const char* num_nodes;
};

constexpr std::array kLaunchers = {
    Launcher{"torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", ""},
    Launcher{"Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
             "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", ""},
    Launcher{"MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""},
    Launcher{"Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", "SLURM_NNODES"},
};

// Reads variables, and says which one is bad.
class Reader {
 public:
  explicit Reader(const Environment& environment) : environment_(environment) {}

  [[nodiscard]] std::optional<std::string> text(const std::string& name) const {
    return name.empty() ? std::nullopt : environment_(name);
  }

  [[nodiscard]] std::optional<int> number(const std::string& name) const {
    const std::optional<std::string> value = text(name);
    if (!value) return std::nullopt;
    int number = 0;
    const char* const end = value->data() + value->size();
    const auto [stop, error] = std::from_chars(value->data(), end, number);
    FSDP_CHECK(ConfigError, error == std::errc() && stop == end && !value->empty(),
               "init_process_group: ", name, "='", *value, "' is not an integer.");
    return number;
  }

 private:
  const Environment& environment_;
};

const Launcher* find_launcher(const Reader& reader) {
  for (const Launcher& launcher : kLaunchers) {
    if (reader.text(launcher.rank) || reader.text(launcher.world_size)) return &launcher;
  }
  return nullptr;
}

std::string known_variables() {
  std::string list;
  for (const Launcher& launcher : kLaunchers) {
    list += c10::str(list.empty() ? "" : ", ", launcher.rank, " and ", launcher.world_size, " (",
                     launcher.name, ")");
  }
  return list;
}

int required(const Reader& reader, const Launcher* launcher, const char* Launcher::*variable,
             const char* option) {
  FSDP_CHECK(ConfigError, launcher != nullptr, "init_process_group: the ", option,
             " is not given, and no launcher's environment was found. Start the program with "
             "torchrun, mpirun or srun, or set one of: ",
             known_variables(), ".");
  const char* const name = launcher->*variable;
  const std::optional<int> value = reader.number(name);
  FSDP_CHECK(ConfigError, value, "init_process_group: ", name,
             " is not set, but other variables of ", launcher->name, " are. Set it, or give the ",
             option, " as an option.");
  return *value;
}

bool all_on_one_machine(const Reader& reader, const Launcher* launcher, int world_size) {
  if (world_size == 1) return true;
  if (launcher == nullptr) return false;
  return reader.number(launcher->local_size) == world_size ||
         reader.number(launcher->num_nodes) == 1;
}

// Jobs on one machine get different ports, and the ranks of a job the same one.
int derived_port(const Reader& reader) {
  std::string id;
  for (const char* const name : {"SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE",
                                 "OMPI_MCA_ess_base_jobid", "PMI_JOBID"}) {
    id += reader.text(name).value_or("");
  }
  if (id.empty()) return kDefaultPort;
  uint32_t hash = 2166136261u;  // FNV-1a
  for (const char c : id) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return kFirstDerivedPort + static_cast<int>(hash % kNumDerivedPorts);
}

void read_master(const ProcessGroupOptions& options, const Reader& reader, const Launcher* launcher,
                 Rendezvous& rendezvous) {
  const std::optional<std::string> addr =
      options.master_addr ? options.master_addr : reader.text("MASTER_ADDR");
  const bool local = all_on_one_machine(reader, launcher, rendezvous.world_size);
  FSDP_CHECK(ConfigError, addr || local,
             "init_process_group: MASTER_ADDR is not set, and the ranks are not known to be on one "
             "machine. Set MASTER_ADDR to the host of rank 0 (and MASTER_PORT to a free port "
             "there).");
  rendezvous.master_addr = addr.value_or("127.0.0.1");

  const std::optional<int> port =
      options.master_port ? options.master_port : reader.number("MASTER_PORT");
  rendezvous.master_port = port ? *port : derived_port(reader);
  FSDP_CHECK(ConfigError, rendezvous.master_port > 0 && rendezvous.master_port < 65536,
             "init_process_group: the master port ", rendezvous.master_port,
             " is not between 1 and 65535.");
}

}  // namespace

Rendezvous read_rendezvous(const ProcessGroupOptions& options, const Environment& environment) {
  const Reader reader(environment);
  const bool from_options = options.rank && options.world_size;
  const Launcher* const launcher = from_options ? nullptr : find_launcher(reader);

  Rendezvous rendezvous;
  rendezvous.launcher = launcher != nullptr ? launcher->name : "options";
  rendezvous.rank =
      options.rank ? *options.rank : required(reader, launcher, &Launcher::rank, "rank");
  rendezvous.world_size = options.world_size
                              ? *options.world_size
                              : required(reader, launcher, &Launcher::world_size, "world size");
  FSDP_CHECK(
      ConfigError,
      rendezvous.world_size >= 1 && rendezvous.rank >= 0 && rendezvous.rank < rendezvous.world_size,
      "init_process_group: rank ", rendezvous.rank, " of ", rendezvous.world_size,
      " ranks: the rank must be at least 0 and below the world size.");
  rendezvous.local_rank = rendezvous.rank;
  if (launcher != nullptr) {
    rendezvous.local_rank = reader.number(launcher->local_rank).value_or(rendezvous.rank);
  } else if (const auto local_rank = reader.number("LOCAL_RANK")) {
    rendezvous.local_rank = *local_rank;
  }
  read_master(options, reader, launcher, rendezvous);
  rendezvous.store_of_agent = reader.text("TORCHELASTIC_USE_AGENT_STORE") == "True" &&
                              !options.master_addr && !options.master_port;
  rendezvous.restart_count = reader.text("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return rendezvous;
}

Environment process_environment() {
  return [](const std::string& name) -> std::optional<std::string> {
    const char* const value = std::getenv(name.c_str());
    return value == nullptr ? std::nullopt : std::optional<std::string>(value);
  };
}

}  // namespace fsdp
