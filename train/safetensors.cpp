#include "train/safetensors.h"

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <functional>

#include <c10/core/ScalarType.h>
#include <nlohmann/json.hpp>

#include "fsdp/error.h"

namespace fsdp::train {
namespace {

const char* name_of(at::ScalarType dtype) {
  switch (dtype) {
    case at::kDouble:
      return "F64";
    case at::kFloat:
      return "F32";
    case at::kHalf:
      return "F16";
    case at::kBFloat16:
      return "BF16";
    case at::kLong:
      return "I64";
    case at::kInt:
      return "I32";
    case at::kShort:
      return "I16";
    case at::kChar:
      return "I8";
    case at::kByte:
      return "U8";
    case at::kBool:
      return "BOOL";
    default:
      return nullptr;
  }
}

void write_file(const std::filesystem::path& path,
                const std::function<void(std::ofstream&)>& fill) {
  const std::string part = path.string() + ".part";
  std::ofstream out(part, std::ios::binary);
  fill(out);
  out.close();
  FSDP_CHECK(CheckpointError, out.good(), "cannot write '", part, "': ", std::strerror(errno), ".");
  std::filesystem::rename(part, path);
}

}  // namespace

void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors) {
  nlohmann::ordered_json header;
  header["__metadata__"] = {{"format", "pt"}};
  size_t end = 0;
  for (const auto& [name, tensor] : tensors) {
    const char* const dtype = name_of(tensor.scalar_type());
    FSDP_CHECK(ConfigError, dtype != nullptr, "write_safetensors: the format has no dtype ",
               tensor.scalar_type(), ", that of '", name, "'.");
    FSDP_CHECK(ConfigError, !header.contains(name), "write_safetensors: two tensors are named '",
               name, "'.");
    const size_t begin = end;
    end += tensor.nbytes();
    header[name] = {
        {"dtype", dtype}, {"shape", tensor.sizes().vec()}, {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');

  write_file(path, [&](std::ofstream& out) {
    const uint64_t length = text.size();
    out.write(reinterpret_cast<const char*>(&length), sizeof(length));
    out.write(text.data(), static_cast<std::streamsize>(text.size()));
    for (const auto& [name, tensor] : tensors) {
      const at::Tensor bytes = tensor.detach().cpu().contiguous();
      out.write(static_cast<const char*>(bytes.const_data_ptr()),
                static_cast<std::streamsize>(bytes.nbytes()));
    }
  });
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  write_file(path, [&](std::ofstream& out) { out << text; });
}

}  // namespace fsdp::train
