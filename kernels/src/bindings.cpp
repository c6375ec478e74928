// What Python sees of the C++ core: a table of contents. Arguments are checked in arguments.h,
// the work is done elsewhere, with the GIL released. `kvkernels/_native.pyi` says the same in
// Python's words, `tests/oracles` does the same in plain Python; tests compare all three.
#include "bindings.h"

#include "arguments.h"
#include "base/chain.h"
#include "base/chain_media.h"
#include "results.h"

namespace nb = nanobind;
using kv::arguments::AnyTokens;
using kv::arguments::Tokens;
using kv::arguments::WideTokens;
using kv::arguments::integer;
using Unlocked = nb::gil_scoped_release;

namespace {

// None reaches our own checks, which name the argument; nanobind would list signatures instead.
auto arg(const char* name) { return nb::arg(name).none(); }

}  // namespace

// What nanobind calls: arguments in, GIL released, work, result out.
namespace calls {

auto chain_hashes(nb::handle tokens, nb::handle block_size, nb::handle seed) {
  const std::int64_t size = integer(block_size, "block_size");
  const std::uint64_t parent = kv::arguments::uint64(seed, "seed");
  const Tokens buffer(tokens, "tokens");
  const std::size_t blocks = kv::arguments::full_blocks(buffer.span().size(), size);
  kv::Result<std::uint64_t> chain(blocks);
  {
    const Unlocked unlocked;
    kv::chain_hashes(buffer.span().data(), static_cast<std::size_t>(size), blocks, parent,
                     chain.data());
  }
  return chain.give();
}

auto wide_chain_hashes(nb::handle tokens, nb::handle block_size, nb::handle seed) {
  const std::int64_t size = integer(block_size, "block_size");
  const std::uint64_t parent = kv::arguments::uint64(seed, "seed");
  const WideTokens buffer(tokens, "tokens");
  const std::size_t blocks = kv::arguments::full_blocks(buffer.span().size(), size);
  kv::Result<std::uint64_t> chain(blocks);
  {
    const Unlocked unlocked;
    std::vector<std::uint8_t> scratch;
    kv::chain_hashes(buffer.span().data(), static_cast<std::size_t>(size), blocks, parent,
                     chain.data(), scratch);
  }
  return chain.give();
}

auto media_chain_hashes(nb::handle tokens, nb::handle block_size, nb::handle seed,
                        nb::handle media) {
  const std::int64_t size = integer(block_size, "block_size");
  const std::uint64_t parent = kv::arguments::uint64(seed, "seed");
  const AnyTokens buffer(tokens, "tokens");
  const std::size_t blocks = kv::arguments::full_blocks(buffer.size(), size);
  const kv::arguments::Media among(media, "media");
  kv::Result<std::uint64_t> chain(blocks);
  const auto step = static_cast<std::size_t>(size);
  {
    const Unlocked unlocked;
    if (buffer.is_wide()) {
      kv::media_chain_hashes(buffer.wide(), step, parent, among.span(), chain.data());
    } else {
      kv::media_chain_hashes(buffer.narrow(), step, parent, among.span(), chain.data());
    }
  }
  return chain.give();
}

}  // namespace calls

NB_MODULE(_native, module) {
  module.doc() = "Native chain hashes, prefix index, virtual worker; the stub says where to read.";

  module.def("chain_hashes", calls::chain_hashes, arg("tokens"), arg("block_size"), arg("seed") = 0,
             nb::sig("def chain_hashes(tokens: Buffer, block_size: int, seed: int = 0) -> Hashes"),
             "Chain hashes of the full blocks of `tokens` (int32), first block first.");
  module.def("wide_chain_hashes", calls::wide_chain_hashes, arg("tokens"), arg("block_size"),
             arg("seed") = 0,
             nb::sig("def wide_chain_hashes(tokens: Buffer, block_size: int, seed: int = 0) "
                     "-> Hashes"),
             "The same of int64 ids: a block with one beyond int32 is hashed as 8 bytes an id.");
  module.def("media_chain_hashes", calls::media_chain_hashes, arg("tokens"), arg("block_size"),
             arg("seed"), arg("media"),
             nb::sig("def media_chain_hashes(tokens: Buffer, block_size: int, seed: int, "
                     "media: Sequence[tuple[str, int, int]]) -> Hashes"),
             "The same of int32 or int64 ids; blocks with tokens of media are hashed with these.");

  kv::bind_answers(module);
  kv::bind_columns(module);
  kv::bind_prefix_index(module);
  kv::bind_events(module);
  kv::bind_hybrids(module);
  kv::bind_mirror(module);
  kv::bind_prefix_owners(module);
  kv::bind_session_weights(module);
  kv::bind_trunks(module);
  kv::bind_virtual_worker(module);
  kv::bind_warmset(module);
  kv::bind_request_scan(module);
  kv::bind_reply_head(module);
  kv::bind_request_head(module);
#ifdef KV_RELAY
  kv::bind_relay(module);
#endif
}
