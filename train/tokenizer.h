#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fsdp::train {

/// Number of tokens: one for each value of a byte.
inline constexpr int64_t kVocabSize = 256;

/// The tokens of a text: its bytes.
[[nodiscard]] std::vector<uint16_t> encode(std::string_view text);

/// The text of tokens, for a reader: bytes that are neither printable ASCII nor line ends are shown
/// as \xNN, because half a UTF-8 character, which a young model writes, upsets terminals.
[[nodiscard]] std::string decode(std::span<const uint16_t> tokens);

}  // namespace fsdp::train
