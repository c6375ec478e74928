// The virtual worker's options out of Python's arguments, each checked.
#pragma once

#include <nanobind/nanobind.h>

#include "virtual_worker/virtual_worker.h"

namespace kv {

struct WorkerOptions {  // as they came
  nanobind::handle blocks, block_size, step_time, max_num_tokens, max_batch_size, max_model_tokens,
      min_chunk_tokens, watermark, ageing_s, max_queue, prefix_wait_tokens, record_events, speed,
      host_blocks, load_block_s, cache_groups;
};

// TypeError or ValueError with the option's name and range.
engine::WorkerSettings worker_settings(const WorkerOptions& options);

// A finite float above 0.
double positive(nanobind::handle object, const char* name);

}  // namespace kv
