#pragma once

#include <string>

#include <gtest/gtest.h>

#include "fsdp/policy.h"

// Tests that hold in either layout: `class Suite : public LayoutTest {}`, FSDP_BOTH_LAYOUTS(Suite),
// TEST_P(Suite, Name), and `.layout = GetParam()`.
namespace fsdp::testing {

/// The layouts as a part of parameterised tests, for ::testing::Combine.
inline auto layouts() { return ::testing::Values(Layout::kFlat, Layout::kPerParameter); }

/// The end of a test's name.
inline std::string name_of(Layout layout) {
  return layout == Layout::kFlat ? "Flat" : "PerParameter";
}

/// The base of a suite that runs in either layout.
class LayoutTest : public ::testing::TestWithParam<Layout> {};

}  // namespace fsdp::testing

/// Runs the tests of `suite`, derived from LayoutTest: Layouts/suite.Name/Flat and /PerParameter.
#define FSDP_BOTH_LAYOUTS(suite)                                       \
  INSTANTIATE_TEST_SUITE_P(Layouts, suite, ::fsdp::testing::layouts(), \
                           [](const auto& info) { return ::fsdp::testing::name_of(info.param); })
