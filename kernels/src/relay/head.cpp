#include "relay/head.h"

#include <algorithm>
#include <array>

namespace kv::relay {

namespace {

constexpr std::size_t kMaxLengthDigits = 15;  // a petabyte; longer numbers are an attack or a fault

constexpr std::array<std::string_view, 8> kHopByHop = {
    "connection",       "keep-alive", "proxy-authenticate", "proxy-authorization",
    "proxy-connection", "te",         "transfer-encoding",  "upgrade"};

char lowered(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; }

bool same(std::string_view text, std::string_view lower) {
  return text.size() == lower.size() &&
         std::equal(text.begin(), text.end(), lower.begin(),
                    [](char a, char b) { return lowered(a) == b; });
}

bool same_letters(std::string_view a, std::string_view b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](char x, char y) {
           return lowered(x) == lowered(y);
         });
}

std::string_view stripped(std::string_view text) {
  const std::size_t first = text.find_first_not_of(" \t");
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

bool all_values(std::string_view text) {
  return std::all_of(text.begin(), text.end(),
                     [](char c) { return is_value_byte(static_cast<unsigned char>(c)); });
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

// Calls `use` with each option of all `Connection` fields.
template <class Use>
void each_option(const ReplyHead& head, Use use) {
  for (const Field& field : head.fields) {
    if (!same(field.name, "connection")) continue;
    for (std::string_view left = field.value;;) {
      const std::size_t comma = left.find(',');
      use(stripped(left.substr(0, comma)));
      if (comma == std::string_view::npos) break;
      left.remove_prefix(comma + 1);
    }
  }
}

Broken no_head() { return garbage("the worker's reply does not begin with an HTTP/1.x head"); }

// The line at the beginning of `text`, which loses it and its CRLF.
std::string_view next_line(std::string_view& text) {
  const std::size_t stop = text.find("\r\n");
  if (stop == std::string_view::npos) throw no_head();
  const std::string_view line = text.substr(0, stop);
  text.remove_prefix(stop + 2);
  return line;
}

// `HTTP/1.x NNN` and perhaps a reason; returns x.
char read_status(std::string_view line, ReplyHead& head) {
  if (line.size() < 12 || line.substr(0, 7) != "HTTP/1." || (line[7] != '0' && line[7] != '1') ||
      line[8] != ' ' || line[9] < '1' || line[9] > '5' || !is_digit(line[10]) ||
      !is_digit(line[11])) {
    throw no_head();
  }
  head.status = (line[9] - '0') * 100 + (line[10] - '0') * 10 + (line[11] - '0');
  if (line.size() > 12) {
    if (line[12] != ' ' || !all_values(line.substr(13))) throw no_head();
    head.reason = line.substr(13);
  }
  return line[7];
}

Field read_field(std::string_view line) {
  const std::size_t colon = line.find(':');
  if (colon == std::string_view::npos || colon == 0) throw no_head();
  const std::string_view name = line.substr(0, colon);
  const bool fits = std::all_of(name.begin(), name.end(), [](char c) {
    return is_token_byte(static_cast<unsigned char>(c));
  });
  if (!fits || !all_values(line.substr(colon + 1))) throw no_head();
  return {name, stripped(line.substr(colon + 1))};
}

// What the fields say of a body's end.
struct Lengths {
  bool given = false, coded = false, chunked = false;
  std::string_view digits;

  void note(const Field& field) {
    if (same(field.name, "content-length")) {
      if (given && field.value != digits) throw garbage("the worker's reply has several lengths");
      given = true;
      digits = field.value;
    } else if (same(field.name, "transfer-encoding")) {
      chunked = !coded && same(field.value, "chunked");
      coded = true;
    }
  }
};

std::uint64_t length_of(std::string_view digits) {
  if (digits.empty() || digits.size() > kMaxLengthDigits ||
      !std::all_of(digits.begin(), digits.end(), is_digit)) {
    throw garbage("the worker's reply has a length that is no number");
  }
  std::uint64_t length = 0;
  for (const char c : digits) length = length * 10 + static_cast<std::uint64_t>(c - '0');
  return length;
}

void frame(ReplyHead& head, const Lengths& lengths, bool head_request, char minor) {
  if (lengths.coded && (!lengths.chunked || lengths.given || minor == '0')) {
    throw garbage("the worker's reply can be framed in more than one way");
  }
  const std::uint64_t length = lengths.given ? length_of(lengths.digits) : 0;
  if (head_request || head.status < 200 || head.status == 204 || head.status == 304) {
    head.framing = Framing::none;
  } else if (lengths.coded) {
    head.framing = Framing::chunked;
  } else {
    head.framing = lengths.given ? Framing::length : Framing::close;
    head.length = length;
  }
}

}  // namespace

bool is_ours(std::string_view name) {
  constexpr std::string_view kOurs = "x-warmroute-";
  return name.size() >= kOurs.size() && same(name.substr(0, kOurs.size()), kOurs);
}

bool is_value_byte(unsigned char byte) { return byte == '\t' || (byte >= 0x20 && byte != 0x7f); }

bool is_token_byte(unsigned char byte) {
  const bool letter = (byte >= 'a' && byte <= 'z') || (byte >= 'A' && byte <= 'Z');
  return letter || (byte >= '0' && byte <= '9') ||
         (byte != 0 && std::string_view("!#$%&'*+-.^_`|~").find(static_cast<char>(byte)) !=
                           std::string_view::npos);
}

ReplyHead parse_head(std::string_view text, bool head_request) {
  ReplyHead head;
  const char minor = read_status(next_line(text), head);
  Lengths lengths;
  while (!text.empty()) {
    const Field field = read_field(next_line(text));
    head.fields.push_back(field);
    if (same(field.name, "content-type")) {
      constexpr std::string_view kEvents = "text/event-stream";
      head.event_stream = same(field.value.substr(0, kEvents.size()), kEvents);
    } else if (same(field.name, "retry-after") || same(field.name, "retry-after-ms")) {
      head.retry_after = true;
    } else if (same(field.name, "content-encoding")) {
      head.coded = true;
    }
  }
  if (head.status == 101) throw garbage("the worker switched protocols without being asked");
  for (const Field& field : head.fields) lengths.note(field);
  frame(head, lengths, head_request, minor);
  bool close = false, keep = minor == '1';
  each_option(head, [&](std::string_view option) {
    close = close || same(option, "close");
    keep = keep || same(option, "keep-alive");
  });
  head.reusable = keep && !close && head.framing != Framing::close;
  return head;
}

std::string client_head(const ReplyHead& head, const ClientTerms& client, bool persistent,
                        bool rechunked, std::size_t& ours_at) {
  std::vector<std::string_view> named;
  each_option(head, [&](std::string_view option) { named.push_back(option); });
  const auto stays = [&](const Field& field) {
    for (const std::string_view hop : kHopByHop) {
      if (same(field.name, hop)) return false;
    }
    for (const std::string_view hop : named) {
      if (same_letters(field.name, hop)) return false;
    }
    if (is_ours(field.name) || (rechunked && same(field.name, "trailer"))) return false;
    return (head.status != 204 && !rechunked) || !same(field.name, "content-length");
  };
  std::string text = "HTTP/1.1 " + std::to_string(head.status) + " ";
  text.append(head.reason).append("\r\n");
  for (const Field& field : head.fields) {
    if (stays(field)) text.append(field.name).append(": ").append(field.value).append("\r\n");
  }
  ours_at = text.size();
  text += client.extra_lines;
  if (rechunked || head.framing == Framing::chunked) text += "Transfer-Encoding: chunked\r\n";
  if (!persistent) text += "Connection: close\r\n";
  return text += "\r\n";
}

}  // namespace kv::relay
