#include <fstream>
#include <iostream>
#include <string>

#include <CLI/CLI.hpp>

#include "scenario/scenario_run.h"

// scenario FILE [--layout flat|per-parameter]: runs the scenarios of a file, and prints a line of
// JSON for each of their operations. If the file holds the original's outputs (tests/scenario/
// differential.py puts them there), prints instead what differs from them; 1 if anything does.
namespace {

using nlohmann::json;

void print_records(int64_t number, const json& scenario, const json& records) {
  for (size_t i = 0; i < records.size(); ++i) {
    json line = {{"scenario", number}, {"operation", i}, {"op", scenario["operations"][i]["op"]}};
    line.update(records[i]);
    std::cout << line.dump() << "\n";
  }
}

int run(const json& file, fsdp::Layout layout) {
  const json& scenarios = file["scenarios"];
  size_t num_different = 0;
  for (size_t i = 0; i < scenarios.size(); ++i) {
    const json records = fsdp::testing::run_scenario(scenarios[i], layout);
    if (!file.contains("outputs")) {
      print_records(static_cast<int64_t>(i), scenarios[i], records);
      continue;
    }
    const auto lines = fsdp::testing::differences(scenarios[i], records, file["outputs"][i]);
    num_different += lines.empty() ? 0 : 1;
    for (const std::string& line : lines) std::cout << "scenario " << i << " " << line << "\n";
  }
  if (!file.contains("outputs")) return 0;
  std::cout << scenarios.size() - num_different << " of " << scenarios.size()
            << " scenarios are equal\n";
  return num_different == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Runs scenarios (docs/scenario.md) on two rank threads.");
  std::string path, layout = "flat";
  app.add_option("file", path, "JSON with scenarios")->required()->check(CLI::ExistingFile);
  app.add_option("--layout", layout)->check(CLI::IsMember({"flat", "per-parameter"}));
  CLI11_PARSE(app, argc, argv);
  std::ifstream file(path);
  return run(json::parse(file),
             layout == "flat" ? fsdp::Layout::kFlat : fsdp::Layout::kPerParameter);
}
