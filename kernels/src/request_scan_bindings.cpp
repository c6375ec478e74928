#include "request_scan_bindings.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "arguments.h"
#include "chain_seed.h"
#include "json_reader.h"
#include "request_scan.h"
#include "results.h"

namespace nb = nanobind;
using kv::arguments::in_range;

namespace {

constexpr std::size_t kLongBytes = 1 << 14;  // less takes no longer than giving the GIL away

// The scan of a body, and the body with it. Immutable. Lifetime: request.
struct PromptText {
  nb::bytes body;
  kv::RequestScan scan;
};

nb::object text_or_none(std::string_view text) {
  return text.empty() ? nb::none() : nb::object(nb::str(text.data(), text.size()));
}

std::string_view view(nb::handle text, const char* name) {
  Py_ssize_t size = 0;
  const char* utf8 = PyUnicode_Check(text.ptr()) ? PyUnicode_AsUTF8AndSize(text.ptr(), &size)
                                                 : nullptr;
  if (utf8 != nullptr) return {utf8, static_cast<std::size_t>(size)};
  PyErr_Clear();
  throw nb::type_error((std::string(name) + " must be a text without lone surrogates").c_str());
}

// Of a model's or adapter's chains: token ids count by themselves, text as a kind of its own.
std::uint64_t seed_of(const kv::RequestScan& scan, nb::handle model, nb::handle adapter,
                      nb::handle salt) {
  const std::string_view base = view(model, "model");
  const std::string_view lora = adapter.is_none() ? "" : view(adapter, "adapter");
  const std::string_view salted = salt.is_none() ? "" : view(salt, "salt");
  if (scan.has_ids) return kv::chain_seed(base, lora, salted);
  return kv::chain_seed(lora.empty() ? base : lora, "text", salted);
}

}  // namespace

// Any fault of the body, and much that is rare, is None: the caller reads it in another way.
namespace calls {

nb::object scan_request(nb::handle body, nb::handle messages, nb::handle prompts,
                        nb::handle choices, nb::handle key_bytes) {
  if (!PyBytes_Check(body.ptr())) throw nb::type_error("body must be bytes");
  const auto bytes = nb::borrow<nb::bytes>(body);
  const auto limit = [](nb::handle value, const char* name) {
    return in_range(value, name, 0, (std::int64_t{1} << 31) - 1);
  };
  const kv::RequestLimits limits{limit(messages, "messages"), limit(prompts, "prompts"),
                                 limit(choices, "choices"), limit(key_bytes, "key_bytes")};
  const std::span text{static_cast<const std::uint8_t*>(bytes.data()), bytes.size()};
  std::optional<PromptText> prompt;
  try {
    std::optional<nb::gil_scoped_release> unlocked;
    if (text.size() >= kLongBytes) unlocked.emplace();
    kv::RequestScan scan(text, limits);
    unlocked.reset();
    prompt.emplace(bytes, std::move(scan));
  } catch (const kv::Unusual&) {
    return nb::none();
  }
  const kv::RequestScan& scan = prompt->scan;
  const auto& model = scan.model;
  const auto& most = scan.max_output_tokens;
  const nb::tuple fields = nb::make_tuple(
      model ? nb::object(nb::str(model->data(), model->size())) : nb::none(), scan.stream,
      text_or_none(scan.session), text_or_none(scan.cache_salt), scan.priority,
      most ? nb::object(nb::int_(*most)) : nb::none(), scan.prompts, scan.messages, scan.tokens,
      scan.longest_tokens, scan.has_ids);
  return nb::make_tuple(std::move(*prompt), fields);
}

nb::dict chains(const PromptText& prompt, nb::handle block_sizes, nb::handle model,
                nb::handle adapter, nb::handle salt) {
  const std::uint64_t seed = seed_of(prompt.scan, model, adapter, salt);
  std::vector<std::int64_t> sizes;
  for (nb::handle size : nb::iter(block_sizes)) {
    sizes.push_back(in_range(size, "a block size", 1, std::int64_t{1} << 31));
  }
  std::sort(sizes.begin(), sizes.end());
  nb::dict chains;
  for (const std::int64_t size : sizes) {
    const auto block_size = static_cast<std::size_t>(size);
    kv::Result<std::uint64_t> chain(prompt.scan.blocks(block_size));
    {
      std::optional<nb::gil_scoped_release> unlocked;
      if (prompt.scan.first().size() >= kLongBytes) unlocked.emplace();
      prompt.scan.chain(block_size, seed, chain.data());
    }
    chains[nb::int_(size)] = chain.give();
  }
  return chains;
}

nb::bytes first(const PromptText& prompt) {
  const auto bytes = prompt.scan.first();
  return nb::bytes(bytes.data(), bytes.size());
}

}  // namespace calls

namespace kv {

void bind_request_scan(nb::module_& module) {
  const auto arg = [](const char* name) { return nb::arg(name).none(); };
  nb::class_<PromptText>(module, "PromptText")
      .def("chains", calls::chains, arg("block_sizes"), arg("model"), arg("adapter"),
           arg("salt"),
           nb::sig("def chains(self, block_sizes: Iterable[int], model: str, "
                   "adapter: str | None, salt: str | None) -> dict[int, Hashes]"),
           "Chain hashes of the first prompt, or the conversation, for each block size.")
      .def("first", calls::first, nb::sig("def first(self) -> bytes"),
           "The bytes that stand for the first prompt's tokens, or for the conversation's.");
  module.def("scan_request", calls::scan_request, arg("body"), arg("messages"), arg("prompts"),
             arg("choices"), arg("key_bytes"),
             nb::sig("def scan_request(body: bytes, messages: int, prompts: int, choices: int, "
                     "key_bytes: int) -> tuple[PromptText, RequestFields] | None"),
             "What routing needs of a plain body; None: read it in another way.");
}

}  // namespace kv
