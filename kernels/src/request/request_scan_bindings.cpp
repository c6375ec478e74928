#include "bindings.h"

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "arguments.h"
#include "base/chain.h"
#include "base/json_reader.h"
#include "request/body_fields.h"
#include "request/request_scan.h"
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

// Empty values of the cache key and the user are none. None for a body without any.
nb::object agent_fields(const kv::RequestScan& scan) {
  if (scan.agent_fields.empty() && scan.cache_key.empty() && scan.user.empty()) return nb::none();
  nb::dict found;
  if (!scan.cache_key.empty()) found["prompt_cache_key"] = text_or_none(scan.cache_key);
  if (!scan.user.empty()) found["user"] = text_or_none(scan.user);
  for (const auto& [name, value] : scan.agent_fields) {
    found[nb::str(name.data(), name.size())] = nb::bytes(value.data(), value.size());
  }
  return found;
}

std::string_view view(nb::handle text, const char* name) {
  Py_ssize_t size = 0;
  const char* utf8 = PyUnicode_Check(text.ptr()) ? PyUnicode_AsUTF8AndSize(text.ptr(), &size)
                                                 : nullptr;
  if (utf8 != nullptr) return {utf8, static_cast<std::size_t>(size)};
  PyErr_Clear();
  throw nb::type_error((std::string(name) + " must be a text without lone surrogates").c_str());
}

template <class Id>
nb::object given(const std::vector<Id>& ids) {
  kv::Result<Id> result(ids.size());
  {
    const nb::gil_scoped_release unlocked;
    std::copy(ids.begin(), ids.end(), result.data());
  }
  return nb::cast(result.give());
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
      scan.longest_tokens, scan.has_ids, agent_fields(scan));
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

nb::object body_fields(nb::handle body, nb::handle names) {
  const kv::arguments::Bytes bytes(body, "body");
  std::vector<std::string> wanted;
  for (nb::handle name : nb::iter(names)) wanted.emplace_back(view(name, "a name"));
  std::optional<kv::BodyFields> found;
  {
    const nb::gil_scoped_release unlocked;
    found.emplace(bytes.span(), wanted);
  }
  constexpr std::array<const char*, 4> kFaults = {nullptr, "malformed", "too_deep", "no_object"};
  const char* fault = kFaults[static_cast<std::size_t>(found->fault)];
  nb::list fields;
  for (const kv::BodyField& field : found->fields) {
    if (field.begin < 0) {
      fields.append(nb::none());
    } else {
      fields.append(nb::make_tuple(field.begin, field.end, field.values, field.items,
                                   field.text_bytes));
    }
  }
  return nb::make_tuple(fault != nullptr ? nb::object(nb::str(fault)) : nb::none(), found->at,
                        fields);
}

nb::object json_items(nb::handle array, nb::handle most) {
  const kv::arguments::Bytes bytes(array, "array");
  const std::int64_t limit = in_range(most, "most", 0, std::int64_t{1} << 40);
  std::optional<std::vector<std::int64_t>> found;
  {
    const nb::gil_scoped_release unlocked;
    found = kv::json_items(bytes.span(), static_cast<std::size_t>(limit));
  }
  if (!found) return nb::none();
  nb::list items;
  for (std::size_t at = 0; at < found->size(); at += 2) {
    items.append(nb::make_tuple((*found)[at], (*found)[at + 1]));
  }
  return items;
}

nb::object token_ids(nb::handle array) {
  const kv::arguments::Bytes bytes(array, "array");
  kv::TokenIds found;
  {
    const nb::gil_scoped_release unlocked;
    found = kv::token_ids(bytes.span());
  }
  if (!found.all) return nb::make_tuple(found.at, found.wide.size());
  return found.wide.empty() ? given(found.ids) : given(found.wide);
}

nb::object json_text(nb::handle text) {
  const kv::arguments::Bytes bytes(text, "text");
  std::optional<std::string> found;
  {
    const nb::gil_scoped_release unlocked;
    found = kv::json_text(bytes.span());
  }
  return found ? nb::object(nb::bytes(found->data(), found->size())) : nb::none();
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
  module.def("body_fields", calls::body_fields, arg("body"), arg("names"),
             nb::sig("def body_fields(body: Buffer, names: Iterable[str]) -> tuple["
                     "str | None, int, list[tuple[int, int, int, int, int] | None]]"),
             "Where fields of a JSON object lie, and how much each holds.");
  module.def("json_items", calls::json_items, arg("array"), arg("most"),
             nb::sig("def json_items(array: Buffer, most: int) -> list[tuple[int, int]] | None"),
             "Where the items of a JSON array lie; None: it is none, or has more than `most`.");
  module.def("token_ids", calls::token_ids, arg("array"),
             nb::sig("def token_ids(array: Buffer) "
                     "-> npt.NDArray[np.int32] | npt.NDArray[np.int64] | tuple[int, int]"),
             "Token ids in a JSON array, int64 where one is beyond int32; else where the first "
             "item lies that is none.");
  module.def("json_text", calls::json_text, arg("text"),
             nb::sig("def json_text(text: Buffer) -> bytes | None"),
             "A JSON string as UTF-8; None: it is none.");
}

}  // namespace kv
