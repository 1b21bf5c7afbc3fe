#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "fsdp/policy.h"

// Scenarios (docs/scenario.md): a module tree, how it is sharded, and what is then done with it.
// bench/peer/scenario.py does the same with PyTorch's FSDP2.
namespace fsdp::testing {

/// Runs the scenario on two rank threads: a record for each operation, of events, collectives, the
/// losses of each rank, and norms and checksums of gradients and parameters. What it throws ends
/// the list, as {"error": text}.
nlohmann::json run_scenario(const nlohmann::json& scenario, Layout layout);

/// What differs between the records of a scenario, a line each: events and counts at all, numbers
/// by more than `tolerance` of their size (a checksum: of its tensor's norm) plus 1e-7.
std::vector<std::string> differences(const nlohmann::json& scenario, const nlohmann::json& ours,
                                     const nlohmann::json& original, double tolerance = 1e-5);

}  // namespace fsdp::testing
