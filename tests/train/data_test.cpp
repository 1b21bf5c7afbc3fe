#include "train/data.h"

#include <chrono>
#include <cmath>
#include <map>
#include <numeric>
#include <set>

#include <gtest/gtest.h>

#include "fsdp/error.h"
#include "temporary_directory.h"
#include "train/tokenizer.h"

// B sequences, T tokens.
namespace fsdp::train {
namespace {

std::vector<uint16_t> counting(size_t count) {
  std::vector<uint16_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), uint16_t{0});
  return tokens;
}

std::vector<uint16_t> tokens_of(const TokenFile& file) {
  return {file.tokens().begin(), file.tokens().end()};
}

std::string refusal(const std::filesystem::path& path) {
  try {
    static_cast<void>(open_tokens(path));
  } catch (const CheckpointError& error) {
    return message_of(error);
  }
  return "accepted";
}

void expect_has(const std::string& message, const std::string& fragment) {
  EXPECT_NE(message.find(fragment), std::string::npos) << fragment << "\nnot in: " << message;
}

// Promise: a token file gives back what was written, up to the ends of its range.
TEST(TokenFileTest, RoundTrip) {
  const testing::TemporaryDirectory directory;
  for (const std::vector<uint16_t>& tokens :
       {std::vector<uint16_t>{}, std::vector<uint16_t>{65534}, counting(1000)}) {
    write_token_file(directory / "a.bin", tokens, 65535);
    const TokenFile file(directory / "a.bin");
    EXPECT_EQ(tokens_of(file), tokens);
    EXPECT_EQ(file.vocab_size(), 65535);
  }
}

// Promise: a damaged file is refused, whichever byte of it is wrong; the message names the file.
TEST(TokenFileTest, RefusesDamage) {
  const testing::TemporaryDirectory directory;
  const auto path = directory / "a.bin";
  write_token_file(path, counting(100), 100);
  const std::string good = testing::read_file(path);
  ASSERT_EQ(good.size(), 32u + 200u);

  for (size_t at = 0; at < good.size(); ++at) {
    if (at >= 12 && at < 16) continue;  // the vocabulary may be larger than the tokens need
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 0x40);
    testing::write_file(path, bad);
    expect_has(refusal(path), "a.bin");
  }
  const std::vector<std::pair<std::string, std::string>> table = {
      {"", "has 0 bytes, fewer than the 32 of a header"},
      {good.substr(0, 31), "has 31 bytes"},
      {good.substr(0, 230), "truncated or damaged"},
      {good.substr(0, 231), "truncated or damaged"},
      {good + "ab", "truncated or damaged"},
      {"text, not tokens, of more than 32 bytes", "is not a token file"}};
  for (const auto& [bytes, fragment] : table) {
    testing::write_file(path, bytes);
    expect_has(refusal(path), fragment);
  }
  std::string bad = good;
  bad[40] ^= 1;
  testing::write_file(path, bad);
  expect_has(refusal(path), "checksum");
  bad = good;
  bad[8] = 2;
  testing::write_file(path, bad);
  expect_has(refusal(path), "has version 2, this program reads 1");
  bad = good;
  bad[12] = 99;  // the vocabulary; token 99 is there
  testing::write_file(path, bad);
  expect_has(refusal(path), "a token beyond its vocabulary of 99");
  // 100 + 2^63 tokens take as many bytes as 100, modulo 2^64.
  bad = good;
  bad[23] = static_cast<char>(0x80);
  testing::write_file(path, bad);
  expect_has(refusal(path), "truncated or damaged");
  expect_has(refusal(directory / "missing.bin"), "cannot open");
}

// Promise: the file of a text is made when it is missing, and again when the text is newer.
TEST(OpenTokensTest, FollowsTheText) {
  const testing::TemporaryDirectory directory;
  const auto text = directory / "play.txt", bin = directory / "play.bin";
  testing::write_file(text, "To be\xff");
  EXPECT_EQ(tokens_of(open_tokens(text)), (std::vector<uint16_t>{'T', 'o', ' ', 'b', 'e', 0xff}));
  EXPECT_EQ(tokens_of(open_tokens(bin)).size(), 6u);

  testing::write_file(text, "or not");
  const auto now = std::filesystem::last_write_time(text);
  std::filesystem::last_write_time(bin, now + std::chrono::seconds(1));
  EXPECT_EQ(decode(tokens_of(open_tokens(text))), "To be\\xff");
  std::filesystem::last_write_time(bin, now - std::chrono::seconds(1));
  EXPECT_EQ(decode(tokens_of(open_tokens(text))), "or not");

  expect_has(refusal(directory / "none.txt"), "there is no text");
  expect_has(refusal(directory / "none.txt"), "tools/fetch_text");
  testing::write_file(directory / "empty.txt", "");
  expect_has(refusal(directory / "empty.txt"), "empty");
}

// Promise: the last tenth validates, nothing is in both parts, and short texts are refused.
TEST(SplitTest, LastTenthValidates) {
  const std::vector<uint16_t> tokens = counting(1005);
  const Split parts = split(tokens, 16);
  EXPECT_EQ(parts.train.size(), 905u);
  EXPECT_EQ(parts.validation.size(), 100u);
  EXPECT_EQ(parts.validation.front(), 905);
  EXPECT_EQ(split(tokens, 99).validation.size(), 100u);
  try {
    static_cast<void>(split(tokens, 100));
    FAIL() << "accepted";
  } catch (const ConfigError& error) {
    expect_has(message_of(error), "a validation split of 100 tokens");
    expect_has(message_of(error), "--seq-len");
  }
}

// Promise: the global batch does not depend on how many ranks and micro-batches share it.
TEST(BatchTest, AnyDivisionTrainsOnTheSameSequences) {
  const std::vector<uint16_t> tokens = counting(5000);
  const std::vector<int64_t> whole = train_offsets(tokens, 8, /*seed=*/1, /*step=*/7, 0, 12);
  for (const int64_t parts : {1, 2, 3, 4, 6, 12}) {
    std::vector<int64_t> joined;
    for (int64_t part = 0; part < parts; ++part) {
      const auto some = train_offsets(tokens, 8, 1, 7, part * 12 / parts, 12 / parts);
      joined.insert(joined.end(), some.begin(), some.end());
    }
    EXPECT_EQ(joined, whole) << parts;
  }
  EXPECT_NE(train_offsets(tokens, 8, 2, 7, 0, 12), whole) << "the seed counts";
  EXPECT_NE(train_offsets(tokens, 8, 1, 8, 0, 12), whole) << "the step counts";
  EXPECT_TRUE(train_offsets(tokens, 8, 1, 7, 0, 0).empty());
}

// Promise: every place is drawn, about equally often, and none that would read past the end.
TEST(BatchTest, DrawsEveryPlaceOfTheTrainingPart) {
  const std::vector<uint16_t> tokens = counting(20);
  std::map<int64_t, int> times;
  for (int64_t step = 0; step < 400; ++step) {
    for (const int64_t offset : train_offsets(tokens, 15, 1, step, 0, 5)) ++times[offset];
  }
  ASSERT_EQ(times.size(), 5u);  // 0 to 4: 15 tokens and the one after them end at 20
  EXPECT_EQ(times.begin()->first, 0);
  EXPECT_EQ(times.rbegin()->first, 4);
  // 2000 draws, 400 each; the standard deviation is sqrt(2000 x 0.2 x 0.8) = 18.
  for (const auto& [offset, count] : times) EXPECT_NEAR(count, 400, 5 * 18) << offset;
}

// Promise: validation reads evenly spread places, first and last included, none twice.
TEST(BatchTest, ValidationIsSpread) {
  const std::vector<uint16_t> tokens = counting(108);
  EXPECT_EQ(spread_offsets(tokens, 8, 4, 0, 4), (std::vector<int64_t>{0, 25, 50, 75}));
  EXPECT_EQ(spread_offsets(tokens, 8, 4, 2, 2), (std::vector<int64_t>{50, 75}));
  const auto all = spread_offsets(tokens, 8, 100, 0, 100);
  EXPECT_EQ(std::set<int64_t>(all.begin(), all.end()).size(), 100u);
  EXPECT_EQ(all.back(), 99);
}

// Promise: what is to be predicted stands one token later.
TEST(BatchTest, TargetsAreOneTokenLater) {
  const Batch batch = batch_at(counting(20), {0, 16}, 3);
  EXPECT_TRUE(at::equal(batch.inputs_BT, torch::tensor({{0, 1, 2}, {16, 17, 18}}, at::kLong)));
  EXPECT_TRUE(at::equal(batch.targets_BT, torch::tensor({{1, 2, 3}, {17, 18, 19}}, at::kLong)));
}

// Promise: the entropy of the next token given the last, as its definition says.
TEST(BigramEntropyTest, KnownTexts) {
  EXPECT_DOUBLE_EQ(bigram_entropy(encode("abababab"), 256), 0.0);
  // After a: b, c, b, c. After b and c: a.  4 of 7 pairs carry ln 2.
  EXPECT_NEAR(bigram_entropy(encode("abacabac"), 256), 4.0 / 7 * std::log(2.0), 1e-15);
  // Every pair of four letters once: ln 4.
  EXPECT_NEAR(bigram_entropy(encode("aabacadbbcbdccdda"), 256), std::log(4.0), 1e-15);
}

// Promise: decode shows text as it is and nothing that upsets a terminal.
TEST(TokenizerTest, Decodes) {
  EXPECT_EQ(decode(encode("To be,\n\tor not ~")), "To be,\n\tor not ~");
  EXPECT_EQ(decode(encode("\x1b[2J\r\xc3")), "\\x1b[2J\\x0d\\xc3");
}

}  // namespace
}  // namespace fsdp::train
