#include "train/data.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <ATen/ops/empty.h>

#include "fsdp/error.h"
#include "train/tokenizer.h"

namespace fsdp::train {
namespace {

// Little-endian, as every machine that libtorch runs on. The tokens follow, two bytes each.
struct Header {
  char magic[8] = {'F', 'S', 'D', 'P', 'T', 'O', 'K', 'S'};
  uint32_t version = 1;
  uint32_t vocab_size = 0;
  uint64_t num_tokens = 0;
  uint64_t checksum = 0;
};
static_assert(sizeof(Header) == 32);

/// FNV-1a over tokens, 64 bits.
uint64_t checksum_of(std::span<const uint16_t> tokens) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const uint16_t token : tokens) hash = (hash ^ token) * 0x100000001b3u;
  return hash;
}

/// The finaliser of SplitMix64: neighbouring numbers come out unrelated.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

class FileDescriptor {
 public:
  explicit FileDescriptor(const std::filesystem::path& path)
      : fd_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {}
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  [[nodiscard]] int get() const { return fd_; }

 private:
  int fd_;
};

constexpr const char* kCure = " Remove it; it is made anew from the text.";

}  // namespace

void TokenFile::Unmap::operator()(std::byte* address) const { ::munmap(address, bytes); }

TokenFile::TokenFile(const std::filesystem::path& path) {
  const FileDescriptor file(path);
  FSDP_CHECK(CheckpointError, file.get() >= 0, "TokenFile: cannot open '", path.string(),
             "': ", std::strerror(errno), ".");
  const auto bytes = static_cast<size_t>(std::filesystem::file_size(path));
  FSDP_CHECK(CheckpointError, bytes >= sizeof(Header), "TokenFile: '", path.string(), "' has ",
             bytes, " bytes, fewer than the ", sizeof(Header), " of a header.", kCure);
  void* const address = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED, file.get(), 0);
  FSDP_CHECK(CheckpointError, address != MAP_FAILED, "TokenFile: cannot map '", path.string(),
             "': ", std::strerror(errno), ".");
  mapping_ = {static_cast<std::byte*>(address), Unmap{bytes}};

  Header header;
  std::memcpy(&header, address, sizeof(header));
  FSDP_CHECK(CheckpointError, std::memcmp(header.magic, Header().magic, sizeof(header.magic)) == 0,
             "TokenFile: '", path.string(), "' is not a token file: it does not begin with '",
             std::string(Header().magic, sizeof(header.magic)), "'.");
  FSDP_CHECK(CheckpointError, header.version == Header().version, "TokenFile: '", path.string(),
             "' has version ", header.version, ", this program reads ", Header().version, ".",
             kCure);
  const size_t data_bytes = bytes - sizeof(Header);
  FSDP_CHECK(
      CheckpointError,
      data_bytes % sizeof(uint16_t) == 0 && data_bytes / sizeof(uint16_t) == header.num_tokens,
      "TokenFile: '", path.string(), "' has ", data_bytes,
      " bytes of tokens, but its header "
      "says ",
      header.num_tokens, " tokens of 2 bytes: it is truncated or damaged.", kCure);
  vocab_size_ = header.vocab_size;
  tokens_ = {reinterpret_cast<const uint16_t*>(mapping_.get() + sizeof(Header)),
             static_cast<size_t>(header.num_tokens)};
  const uint64_t checksum = checksum_of(tokens_);
  FSDP_CHECK(CheckpointError, checksum == header.checksum, "TokenFile: '", path.string(),
             "' is damaged: its checksum is ", checksum, ", its header says ", header.checksum, ".",
             kCure);
  const bool in_vocab = std::all_of(tokens_.begin(), tokens_.end(),
                                    [&](uint16_t token) { return token < header.vocab_size; });
  FSDP_CHECK(CheckpointError, in_vocab, "TokenFile: '", path.string(), "' has a token beyond its ",
             "vocabulary of ", header.vocab_size, ".", kCure);
}

void write_token_file(const std::filesystem::path& path, std::span<const uint16_t> tokens,
                      int64_t vocab_size) {
  const Header header{.vocab_size = static_cast<uint32_t>(vocab_size),
                      .num_tokens = tokens.size(),
                      .checksum = checksum_of(tokens)};
  // A name of its own: several processes may make the same file at once.
  const std::string part = path.string() + ".part" + std::to_string(::getpid());
  std::ofstream out(part, std::ios::binary);
  out.write(reinterpret_cast<const char*>(&header), sizeof(header));
  out.write(reinterpret_cast<const char*>(tokens.data()),
            static_cast<std::streamsize>(tokens.size_bytes()));
  out.close();
  FSDP_CHECK(CheckpointError, out.good(), "write_token_file: cannot write '", part,
             "': ", std::strerror(errno), ".");
  std::filesystem::rename(part, path);
}

TokenFile open_tokens(const std::filesystem::path& text_or_bin) {
  namespace fs = std::filesystem;
  if (text_or_bin.extension() == ".bin") return TokenFile(text_or_bin);
  FSDP_CHECK(CheckpointError, fs::is_regular_file(text_or_bin), "open_tokens: there is no text '",
             text_or_bin.string(),
             "'. Run tools/fetch_text, which makes data/shakespeare.txt, or give one with --data.");
  fs::path bin = text_or_bin;
  bin.replace_extension(".bin");
  if (!fs::exists(bin) || fs::last_write_time(bin) < fs::last_write_time(text_or_bin)) {
    std::ifstream in(text_or_bin, std::ios::binary);
    const std::string text{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
    FSDP_CHECK(CheckpointError, in.good() && !text.empty(), "open_tokens: '", text_or_bin.string(),
               "' is empty or cannot be read.");
    write_token_file(bin, encode(text), kVocabSize);
  }
  return TokenFile(bin);
}

Split split(std::span<const uint16_t> tokens, int64_t seq_len) {
  const size_t num_validation = tokens.size() / 10;
  const size_t num_train = tokens.size() - num_validation;
  FSDP_CHECK(ConfigError, static_cast<int64_t>(num_validation) > seq_len,
             "split: a validation split of ", num_validation, " tokens, a tenth of the ",
             tokens.size(), ", has no room for a sequence of ", seq_len,
             " and the token after it. Use a longer text or a smaller --seq-len.");
  return {.train = tokens.first(num_train), .validation = tokens.subspan(num_train)};
}

std::vector<int64_t> train_offsets(std::span<const uint16_t> train, int64_t seq_len, uint64_t seed,
                                   int64_t step, int64_t first, int64_t count) {
  const uint64_t num_places = train.size() - static_cast<size_t>(seq_len);
  const uint64_t key = mix(mix(seed) ^ static_cast<uint64_t>(step));
  std::vector<int64_t> offsets;
  for (int64_t sample = first; sample < first + count; ++sample) {
    offsets.push_back(static_cast<int64_t>(mix(key ^ static_cast<uint64_t>(sample)) % num_places));
  }
  return offsets;
}

std::vector<int64_t> spread_offsets(std::span<const uint16_t> tokens, int64_t seq_len,
                                    int64_t total, int64_t first, int64_t count) {
  const int64_t num_places = static_cast<int64_t>(tokens.size()) - seq_len;
  std::vector<int64_t> offsets;
  for (int64_t sample = first; sample < first + count; ++sample) {
    offsets.push_back(sample * num_places / total);
  }
  return offsets;
}

Batch batch_at(std::span<const uint16_t> tokens, const std::vector<int64_t>& offsets,
               int64_t seq_len) {
  const auto num_sequences = static_cast<int64_t>(offsets.size());
  const at::Tensor windows = at::empty({num_sequences, seq_len + 1}, at::kLong);
  int64_t* out = windows.mutable_data_ptr<int64_t>();
  for (const int64_t offset : offsets) {
    const auto window =
        tokens.subspan(static_cast<size_t>(offset), static_cast<size_t>(seq_len) + 1);
    out = std::copy(window.begin(), window.end(), out);
  }
  return {.inputs_BT = windows.narrow(1, 0, seq_len), .targets_BT = windows.narrow(1, 1, seq_len)};
}

double bigram_entropy(std::span<const uint16_t> tokens, int64_t vocab_size) {
  const auto vocab = static_cast<size_t>(vocab_size);
  std::vector<int64_t> pairs(vocab * vocab), firsts(vocab);
  for (size_t i = 0; i + 1 < tokens.size(); ++i) {
    ++pairs[tokens[i] * vocab + tokens[i + 1]];
    ++firsts[tokens[i]];
  }
  double nats = 0;
  for (size_t i = 0; i < pairs.size(); ++i) {
    if (pairs[i] == 0) continue;
    const auto count = static_cast<double>(pairs[i]);
    nats -= count * std::log(count / static_cast<double>(firsts[i / vocab]));
  }
  return nats / static_cast<double>(tokens.size() - 1);
}

}  // namespace fsdp::train
