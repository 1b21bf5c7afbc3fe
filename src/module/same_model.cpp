#include "module/same_model.h"

#include <chrono>
#include <functional>
#include <sstream>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "fsdp/error.h"

namespace fsdp {
namespace {

constexpr std::chrono::seconds kWaitForText{10};

std::string to_string(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }
std::vector<uint8_t> to_bytes(const std::string& text) { return {text.begin(), text.end()}; }

// The first line in which they differ, of each.
std::pair<std::string, std::string> first_difference(const std::string& a, const std::string& b) {
  std::istringstream lines_a(a), lines_b(b);
  for (;;) {
    std::string line_a, line_b;
    const bool more_a = static_cast<bool>(std::getline(lines_a, line_a));
    const bool more_b = static_cast<bool>(std::getline(lines_b, line_b));
    if (!more_a) line_a = "no more parameters";
    if (!more_b) line_b = "no more parameters";
    if (line_a != line_b || (!more_a && !more_b)) return {line_a, line_b};
  }
}

}  // namespace

void check_same_on_ranks(const std::string& description, c10d::ProcessGroup& group,
                         const char* function) {
  const c10::intrusive_ptr<c10d::Store> store = group.getStore();
  if (!store || group.getSize() == 1) return;
  // The n-th model of this rank is compared with the n-th of the others.
  const std::string rank = std::to_string(group.getRank());
  const int64_t index = store->add("fsdp/models_of/" + rank, 1);
  const std::string key = "fsdp/model/" + std::to_string(index);
  const std::string hash = std::to_string(std::hash<std::string>()(description));
  const std::string own = hash + " " + rank;
  const std::string first = to_string(store->compareSet(key, {}, to_bytes(own)));
  if (first == own) {
    store->set(key + "/text", to_bytes(description));
    return;
  }
  const std::string first_hash = first.substr(0, first.find(' '));
  if (first_hash == hash) return;
  store->wait({key + "/text"}, kWaitForText);
  const auto [here, there] = first_difference(description, to_string(store->get(key + "/text")));
  FSDP_CHECK(StateError, false, function, ": rank ", rank, " of group '", group.getGroupName(),
             "' has another model than rank ", first.substr(first.find(' ') + 1), ": here ", here,
             ", there ", there,
             ". Every rank must build the same model and shard it with the same options.");
}

}  // namespace fsdp
