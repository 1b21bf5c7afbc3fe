#pragma once

#include <array>
#include <map>
#include <optional>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

#include "fsdp/fsdp_module.h"

/// Walks the tensors of a value, at compile time.
///
/// Known: Tensor, std::optional, tuple, pair, vector, array, map, unordered_map (the values) and
/// torch::OrderedDict, in any nesting. A type of your own is made known beside its definition, and
/// then counts wherever the others do:
///
///     struct Cache { at::Tensor key; at::Tensor value; int64_t length; };
///     template <>
///     struct fsdp::TensorTraits<Cache> : fsdp::TensorFields<&Cache::key, &Cache::value> {};
///
/// Every other type holds no tensors as far as the library can see: neither pointers and views
/// (Tensor*, TensorList) nor classes that were not made known are looked into.
namespace fsdp {

/// How to find the tensors of a T: `contains`, and if that is true `collect(T&, TensorRefs&)`.
template <class T>
struct TensorTraits {
  static constexpr bool contains = false;
};

/// Whether collect_tensors() may find tensors in a T, or in what a T refers to.
template <class T>
inline constexpr bool contains_tensors = TensorTraits<std::remove_cvref_t<T>>::contains;

/// Appends to `refs` the tensors in `value` that are defined, in the order of its elements.
template <class T>
void collect_tensors(T& value, TensorRefs& refs) {
  if constexpr (contains_tensors<T>) {
    static_assert(!std::is_const_v<T>,
                  "fsdp: a const tensor inside a value cannot be replaced; make the element "
                  "non-const");
    TensorTraits<T>::collect(value, refs);
  }
}

/// TensorTraits of a class whose tensors lie in these fields.
template <auto... kFields>
struct TensorFields {
  static constexpr bool contains = true;

  template <class T>
  static void collect(T& value, TensorRefs& refs) {
    static_assert((contains_tensors<decltype(value.*kFields)> && ...),
                  "fsdp: a field named in TensorFields holds no tensors");
    (collect_tensors(value.*kFields, refs), ...);
  }
};

/// A value that owns the tensors of a T. References to tensors become tensors, also within tuples
/// and pairs: what std::tie() made becomes a tuple of its own.
template <class T>
struct OwnedTensors {
  using type = std::remove_cvref_t<T>;
};
template <class T>
using OwnedTensorsOf = typename OwnedTensors<std::remove_cvref_t<T>>::type;
template <class T>
using OwnedElement = std::conditional_t<contains_tensors<T>, OwnedTensorsOf<T>, T>;

template <class... T>
struct OwnedTensors<std::tuple<T...>> {
  using type = std::tuple<OwnedElement<T>...>;
};
template <class A, class B>
struct OwnedTensors<std::pair<A, B>> {
  using type = std::pair<OwnedElement<A>, OwnedElement<B>>;
};

template <>
struct TensorTraits<at::Tensor> {
  static constexpr bool contains = true;
  static void collect(at::Tensor& tensor, TensorRefs& refs) {
    if (tensor.defined()) refs.push_back(&tensor);
  }
};

template <class T>
struct TensorTraits<std::optional<T>> {
  static constexpr bool contains = contains_tensors<T>;
  static void collect(std::optional<T>& value, TensorRefs& refs) {
    if (value) collect_tensors(*value, refs);
  }
};

template <class... T>
struct TensorTraits<std::tuple<T...>> {
  static constexpr bool contains = (contains_tensors<T> || ...);
  static void collect(std::tuple<T...>& value, TensorRefs& refs) {
    std::apply([&refs](auto&... elements) { (collect_tensors(elements, refs), ...); }, value);
  }
};

template <class A, class B>
struct TensorTraits<std::pair<A, B>> {
  static constexpr bool contains = contains_tensors<A> || contains_tensors<B>;
  static void collect(std::pair<A, B>& value, TensorRefs& refs) {
    collect_tensors(value.first, refs);
    collect_tensors(value.second, refs);
  }
};

/// TensorTraits of a container whose elements are all tensors or hold them.
template <class Container, class T>
struct TensorElements {
  static constexpr bool contains = contains_tensors<T>;
  static void collect(Container& container, TensorRefs& refs) {
    for (T& element : container) collect_tensors(element, refs);
  }
};
template <class T, class Allocator>
struct TensorTraits<std::vector<T, Allocator>> : TensorElements<std::vector<T, Allocator>, T> {};
template <class T, std::size_t kSize>
struct TensorTraits<std::array<T, kSize>> : TensorElements<std::array<T, kSize>, T> {};

/// TensorTraits of a map whose values are tensors or hold them. Keys are not looked into.
template <class Map, class T>
struct TensorMappedValues {
  static constexpr bool contains = contains_tensors<T>;
  static void collect(Map& map, TensorRefs& refs) {
    for (auto& [key, value] : map) collect_tensors(value, refs);
  }
};
template <class K, class T, class... Rest>
struct TensorTraits<std::map<K, T, Rest...>> : TensorMappedValues<std::map<K, T, Rest...>, T> {};
template <class K, class T, class... Rest>
struct TensorTraits<std::unordered_map<K, T, Rest...>>
    : TensorMappedValues<std::unordered_map<K, T, Rest...>, T> {};

template <class K, class T>
struct TensorTraits<torch::OrderedDict<K, T>> {
  static constexpr bool contains = contains_tensors<T>;
  static void collect(torch::OrderedDict<K, T>& dictionary, TensorRefs& refs) {
    for (auto& item : dictionary) collect_tensors(item.value(), refs);
  }
};

}  // namespace fsdp
