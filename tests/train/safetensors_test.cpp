#include "train/safetensors.h"

#include <cstring>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "fsdp/error.h"
#include "temporary_directory.h"

namespace fsdp::train {
namespace {

struct ReadTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

/// A reader of its own, from the format's description alone.
std::map<std::string, ReadTensor> read_safetensors(const std::filesystem::path& path) {
  const std::string file = testing::read_file(path);
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length * 256 + static_cast<uint8_t>(file.at(i));
  EXPECT_EQ(file.at(8), '{');
  EXPECT_EQ((8 + length) % 8, 0u) << "data is not aligned";
  const std::string data = file.substr(8 + length);
  std::map<std::string, ReadTensor> tensors;
  size_t covered = 0;
  const auto header = nlohmann::json::parse(file.substr(8, length));
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const size_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
    tensors[name] = {entry["dtype"], entry["shape"], data.substr(begin, end - begin)};
    covered += end - begin;
  }
  EXPECT_EQ(covered, data.size()) << "the format allows no holes";
  return tensors;
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

// Promise: names, dtypes, shapes and bytes come back through a reader that knows the format alone.
TEST(SafetensorsTest, RoundTrip) {
  const testing::TemporaryDirectory directory;
  const at::Tensor matrix = torch::arange(6, at::kFloat).view({2, 3});
  const NamedTensors tensors = {
      {"z.first", matrix},
      {"a \"quoted\" name", matrix.t()},  // not contiguous: written as it looks
      {"empty", torch::empty({0, 3})},
      {"scalar", torch::scalar_tensor(7, at::kLong)},
      {"odd", torch::tensor({1, 2, 3}, at::kByte)},
      {"bf16", torch::tensor({1.0f, -2.0f}).to(at::kBFloat16)},
      {"parameter", torch::ones({2}).requires_grad_()}};
  write_safetensors(directory / "a.safetensors", tensors);
  auto read = read_safetensors(directory / "a.safetensors");

  ASSERT_EQ(read.size(), tensors.size());
  const auto expect = [&](const std::string& name, const std::string& dtype,
                          const std::vector<int64_t>& shape, const std::string& bytes) {
    EXPECT_EQ(read[name].dtype, dtype) << name;
    EXPECT_EQ(read[name].shape, shape) << name;
    EXPECT_EQ(read[name].bytes, bytes) << name;
  };
  expect("z.first", "F32", {2, 3}, bytes_of<float>({0, 1, 2, 3, 4, 5}));
  expect("a \"quoted\" name", "F32", {3, 2}, bytes_of<float>({0, 3, 1, 4, 2, 5}));
  expect("empty", "F32", {0, 3}, "");
  expect("scalar", "I64", {}, bytes_of<int64_t>({7}));
  expect("odd", "U8", {3}, bytes_of<uint8_t>({1, 2, 3}));
  expect("bf16", "BF16", {2}, bytes_of<uint16_t>({0x3f80, 0xc000}));
  expect("parameter", "F32", {2}, bytes_of<float>({1, 1}));
}

// Promise: what the format cannot hold is refused before a file is there.
TEST(SafetensorsTest, Refuses) {
  const testing::TemporaryDirectory directory;
  const auto path = directory / "a.safetensors";
  const auto refusal = [](const auto& write) -> std::string {
    try {
      write();
    } catch (const c10::Error& error) {
      return message_of(error);
    }
    return "accepted";
  };
  const at::Tensor x = torch::ones({1});
  EXPECT_NE(refusal([&] {
              write_safetensors(path, {{"x", x}, {"x", x}});
            }).find("two tensors are named 'x'"),
            std::string::npos);
  EXPECT_NE(refusal([&] {
              write_safetensors(path, {{"x", x.to(at::kComplexFloat)}});
            }).find("no dtype ComplexFloat, that of 'x'"),
            std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_NE(refusal([&] {
              write_safetensors(directory / "none" / "a", {{"x", x}});
            }).find("cannot write"),
            std::string::npos);
}

}  // namespace
}  // namespace fsdp::train
