#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace fsdp::train {

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Writes tensors in the given order as one safetensors file, which appears whole or not at all.
///
/// Errors:  ConfigError for a repeated name, or a dtype that the format has no name for;
///          CheckpointError if the file cannot be written.
/// Source:  safetensors 0.6, README: 8 bytes of header length, JSON header, bytes. The header is
///          padded with spaces so that the data begins at a multiple of 8 bytes.
void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors);

/// Writes a text file, which appears whole or not at all.
/// Errors:  CheckpointError if it cannot be written.
void write_text(const std::filesystem::path& path, const std::string& text);

}  // namespace fsdp::train
