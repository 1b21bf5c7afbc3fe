#include "fsdp/pytree.h"

#include <memory>
#include <string>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace {

struct Cache {
  at::Tensor key;
  std::vector<at::Tensor> values;
  int64_t length = 0;
};

struct Unknown {
  at::Tensor tensor;
};

}  // namespace

template <>
struct fsdp::TensorTraits<Cache> : fsdp::TensorFields<&Cache::key, &Cache::values> {};

namespace fsdp {
namespace {

at::Tensor number(int64_t value) { return at::full({1}, value); }

/// The numbers in the tensors of `value`, in the order in which they are found.
template <class T>
std::vector<int64_t> numbers_in(T value) {
  TensorRefs refs;
  collect_tensors(value, refs);
  std::vector<int64_t> numbers;
  for (const at::Tensor* tensor : refs) numbers.push_back(tensor->item<int64_t>());
  return numbers;
}

using Numbers = std::vector<int64_t>;

// Promise: each container gives its tensors in order, and nothing else.
TEST(PytreeTest, FindsTheTensorsOfEachContainerInOrder) {
  EXPECT_EQ(numbers_in(number(1)), Numbers({1}));
  EXPECT_EQ(numbers_in(std::optional(number(1))), Numbers({1}));
  EXPECT_EQ(numbers_in(std::vector<at::Tensor>{number(1), number(2)}), Numbers({1, 2}));
  EXPECT_EQ(numbers_in(std::array<at::Tensor, 2>{number(1), number(2)}), Numbers({1, 2}));
  EXPECT_EQ(numbers_in(std::pair(number(1), 7)), Numbers({1}));
  EXPECT_EQ(numbers_in(std::tuple(number(1), std::string("two"), number(3))), Numbers({1, 3}));
  EXPECT_EQ(numbers_in(std::map<std::string, at::Tensor>{{"b", number(2)}, {"a", number(1)}}),
            Numbers({1, 2}));
  EXPECT_EQ(numbers_in(std::unordered_map<int, at::Tensor>{{5, number(1)}}), Numbers({1}));
  torch::OrderedDict<std::string, at::Tensor> dictionary;
  dictionary.insert("b", number(1));
  dictionary.insert("a", number(2));
  EXPECT_EQ(numbers_in(dictionary), Numbers({1, 2}));
}

TEST(PytreeTest, FindsTensorsInAnyNesting) {
  using Nested = std::tuple<at::Tensor, std::vector<std::pair<int, std::optional<at::Tensor>>>,
                            std::map<int, std::array<at::Tensor, 2>>>;
  const Nested nested{number(1),
                      {{0, number(2)}, {0, std::nullopt}, {0, number(3)}},
                      {{0, {number(4), number(5)}}}};
  EXPECT_EQ(numbers_in(nested), Numbers({1, 2, 3, 4, 5}));
}

TEST(PytreeTest, SkipsUndefinedTensorsAndEmptyContainers) {
  EXPECT_EQ(numbers_in(at::Tensor()), Numbers());
  EXPECT_EQ(numbers_in(std::optional<at::Tensor>()), Numbers());
  EXPECT_EQ(numbers_in(std::vector<at::Tensor>{at::Tensor(), number(2)}), Numbers({2}));
  EXPECT_EQ(numbers_in(std::tuple<>()), Numbers());
}

// Promise: a class that is made known is walked like a container, also inside of one.
TEST(PytreeTest, FindsTheFieldsOfAClassMadeKnown) {
  const Cache cache{number(1), {number(2), number(3)}, 9};
  EXPECT_EQ(numbers_in(cache), Numbers({1, 2, 3}));
  EXPECT_EQ(numbers_in(std::vector<Cache>{cache, cache}), Numbers({1, 2, 3, 1, 2, 3}));
}

TEST(PytreeTest, ReplacesTensorsInPlace) {
  std::pair<at::Tensor, std::vector<Cache>> value{number(1), {{number(2), {number(3)}, 0}}};
  TensorRefs refs;
  collect_tensors(value, refs);
  for (at::Tensor* tensor : refs) *tensor = *tensor * 10;
  EXPECT_EQ(numbers_in(value), Numbers({10, 20, 30}));
}

// Promise: it is known at compile time which types are not looked into.
TEST(PytreeTest, KnowsAtCompileTimeWhatHoldsTensors) {
  static_assert(contains_tensors<const at::Tensor&>);
  static_assert(contains_tensors<std::optional<std::tuple<int, at::Tensor>>>);
  static_assert(contains_tensors<std::tuple<const at::Tensor&, int>>);
  static_assert(contains_tensors<Cache&&>);
  static_assert(!contains_tensors<int>);
  static_assert(!contains_tensors<std::tuple<>>);
  static_assert(!contains_tensors<std::vector<bool>>);
  static_assert(!contains_tensors<std::map<at::Tensor*, int>>);
  static_assert(!contains_tensors<at::Tensor*>);
  static_assert(!contains_tensors<at::TensorList>);
  static_assert(!contains_tensors<std::unique_ptr<at::Tensor>>);
  static_assert(!contains_tensors<Unknown>);
}

// Promise: what refers to tensors is copied into what owns them; the rest keeps its type.
TEST(PytreeTest, OwnsWhatATupleRefersTo) {
  static_assert(std::is_same_v<OwnedTensorsOf<const at::Tensor&>, at::Tensor>);
  static_assert(std::is_same_v<OwnedTensorsOf<std::tuple<at::Tensor&, const at::Tensor&, int&>>,
                               std::tuple<at::Tensor, at::Tensor, int&>>);
  static_assert(std::is_same_v<OwnedTensorsOf<std::pair<const at::Tensor, std::tuple<at::Tensor&>>>,
                               std::pair<at::Tensor, std::tuple<at::Tensor>>>);
  at::Tensor mine = number(1);
  OwnedTensorsOf<std::tuple<at::Tensor&>> owned = std::tie(mine);
  std::get<0>(owned) = number(2);
  EXPECT_EQ(mine.item<int64_t>(), 1);
}

}  // namespace
}  // namespace fsdp
