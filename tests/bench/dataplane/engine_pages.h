// What a dummy engine says of itself: as a vLLM does, so that routers take it for one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

struct Engine {
  int port = 0;
  long requests = 0, running = 0, most = 0, given_up = 0;
};

inline std::string reply(const std::string& type, const std::string& body) {
  return "HTTP/1.1 200 OK\r\nContent-Type: " + type +
         "\r\nContent-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

inline std::string json(const std::string& body) { return reply("application/json", body); }

// Names as in vLLM 0.33, `v1/metrics/loggers.py`.
inline std::string metrics(const Engine& engine, const std::string& model,
                           const std::string& block_size) {
  const std::string labels = "{engine=\"0\",model_name=\"" + model + "\"} ";
  return "vllm:num_requests_running" + labels + std::to_string(engine.running) +
         "\nvllm:num_requests_waiting" + labels + "0\nvllm:kv_cache_usage_perc" + labels +
         "0.25\nvllm:cache_config_info{engine=\"0\",block_size=\"" + block_size +
         "\",num_gpu_blocks=\"65536\"} 1\n";
}

inline std::string counts(const std::vector<Engine>& engines) {
  std::string text = "[";
  for (const Engine& engine : engines)
    text += (text.size() > 1 ? "," : "") + ("{\"requests\":" + std::to_string(engine.requests)) +
            ",\"running\":" + std::to_string(engine.running) +
            ",\"most\":" + std::to_string(engine.most) +
            ",\"given_up\":" + std::to_string(engine.given_up) + "}";
  return text + "]";
}

// The answer to `GET path`.
inline std::string page(std::string_view path, const Engine& engine,
                        const std::vector<Engine>& engines, const std::string& model,
                        const std::string& block_size) {
  if (path == "/metrics")
    return reply("text/plain; version=0.0.4; charset=utf-8", metrics(engine, model, block_size));
  if (path == "/v1/models")
    return json("{\"object\":\"list\",\"data\":[{\"id\":\"" + model +
                "\",\"object\":\"model\",\"created\":1,\"owned_by\":\"vllm\",\"root\":\"" + model +
                "\",\"parent\":null,\"max_model_len\":131072}]}");
  if (path == "/bench") return json(counts(engines));
  if (path == "/health" || path == "/ping") return json("");
  if (path == "/version") return json("{\"version\":\"0.33.0\"}");
  return "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n";
}
