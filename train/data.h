#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

namespace fsdp::train {

/// A file of tokens, mapped into memory; many ranks may read one.
class TokenFile {
 public:
  /// Maps `path`, and checks all of it.
  /// Errors:  CheckpointError if it is missing, not a token file, of another version, truncated, or
  ///          its tokens are not those that were written.
  explicit TokenFile(const std::filesystem::path& path);

  [[nodiscard]] std::span<const uint16_t> tokens() const { return tokens_; }
  [[nodiscard]] int64_t vocab_size() const { return vocab_size_; }

 private:
  struct Unmap {
    size_t bytes;
    void operator()(std::byte* address) const;
  };

  std::unique_ptr<std::byte, Unmap> mapping_;
  std::span<const uint16_t> tokens_;
  int64_t vocab_size_ = 0;
};

/// Writes a token file; it appears whole or not at all.
/// Errors:  CheckpointError if it cannot be written.
void write_token_file(const std::filesystem::path& path, std::span<const uint16_t> tokens,
                      int64_t vocab_size);

/// Opens a token file, or that of a text (the same name with .bin), made anew if missing or older.
/// Errors:  as TokenFile; CheckpointError if the text is missing or empty.
[[nodiscard]] TokenFile open_tokens(const std::filesystem::path& text_or_bin);

/// The two parts of the data: the last tenth validates.
struct Split {
  std::span<const uint16_t> train;
  std::span<const uint16_t> validation;
};

/// Errors:  ConfigError if a part has no room for one sequence and the token after it.
[[nodiscard]] Split split(std::span<const uint16_t> tokens, int64_t seq_len);

/// Sequences and, one token later, what is to be predicted. B sequences, T tokens; int64.
struct Batch {
  at::Tensor inputs_BT;
  at::Tensor targets_BT;
};

/// Where in the training part the sequences [first, first + count) of a step begin.
///
/// Ranks:   a sequence depends on the seed, the step and its number in the global batch alone, so
///          any division of the batch among ranks and micro-batches trains on the same sequences.
[[nodiscard]] std::vector<int64_t> train_offsets(std::span<const uint16_t> train, int64_t seq_len,
                                                 uint64_t seed, int64_t step, int64_t first,
                                                 int64_t count);

/// Where the sequences [first, first + count) of `total` evenly spread ones begin.
[[nodiscard]] std::vector<int64_t> spread_offsets(std::span<const uint16_t> tokens, int64_t seq_len,
                                                  int64_t total, int64_t first, int64_t count);

/// The sequences that begin at `offsets`.
[[nodiscard]] Batch batch_at(std::span<const uint16_t> tokens, const std::vector<int64_t>& offsets,
                             int64_t seq_len);

/// H(next | token) in nats, of the pairs of `tokens` themselves: no table of next tokens by the
/// last one predicts this text better, also one that was fitted to it.
[[nodiscard]] double bigram_entropy(std::span<const uint16_t> tokens, int64_t vocab_size);

}  // namespace fsdp::train
