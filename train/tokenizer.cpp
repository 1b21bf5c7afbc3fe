#include "train/tokenizer.h"

namespace fsdp::train {

std::vector<uint16_t> encode(std::string_view text) {
  std::vector<uint16_t> tokens;
  tokens.reserve(text.size());
  for (const char c : text) tokens.push_back(static_cast<uint8_t>(c));
  return tokens;
}

std::string decode(std::span<const uint16_t> tokens) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const uint16_t token : tokens) {
    if ((token >= ' ' && token <= '~') || token == '\n' || token == '\t') {
      text += static_cast<char>(token);
    } else {
      text += {'\\', 'x', kDigits[(token >> 4) & 15], kDigits[token & 15]};
    }
  }
  return text;
}

}  // namespace fsdp::train
