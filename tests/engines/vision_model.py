"""A small model that reads images, for real vLLM on a CPU: Qwen2-VL with random weights.

It imports torchvision, which `torchvision_hook` makes possible without CUDA.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.engines.hybrid_models import HEAD_DIM, SHARED
from tests.engines.model import SPECIALS, TEMPLATE, write_tokenizer

PATCH = 14
MERGED = 2  # patches in each direction that make one token
IMAGE_SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
START, END, IMAGE, VIDEO = range(len(SPECIALS), len(SPECIALS) + len(IMAGE_SPECIALS))

_CONTENT = "(message.content or '')"
_PARTS = """\
{%- if message.content is string %}{{- message.content }}{%- else %}
    {%- for part in message.content %}
        {%- if part.type == 'text' %}{{- part.text }}
        {%- else %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}{%- endif %}
    {%- endfor %}
{%- endif %}"""
VISION_TEMPLATE = TEMPLATE.replace(
    f"{{{{- '<|im_start|>' + message.role + '\\n' + {_CONTENT} + '<|im_end|>\\n' }}}}",
    "{{- '<|im_start|>' + message.role + '\\n' }}" + _PARTS + "{{- '<|im_end|>\\n' }}",
)

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "model_type": "qwen2_vl",
    **SHARED,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "vision_token_id": IMAGE,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
    "vision_config": {
        "depth": 1,
        "embed_dim": HEAD_DIM,
        "hidden_size": SHARED["hidden_size"],
        "num_heads": 1,
        "mlp_ratio": 2,
        "in_channels": 3,
        "in_chans": 3,
        "patch_size": PATCH,
        "spatial_patch_size": PATCH,
        "spatial_merge_size": MERGED,
        "temporal_patch_size": 2,
    },
}
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
    "min_pixels": 784,
    "max_pixels": 200_704,
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": MERGED,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}

VISION_BLOCKS = 96  # of the pool: prompts' blocks are evicted throughout
VISION_TOKENS = 1024  # of a prompt and its answer
IMAGE_DIGEST = "sha256"  # vLLM's default, blake3, is not in Python's hashlib
# The second --max-model-len counts. Videos would take a processor of their own.
VISION_FLAGS = (
    *("--load-format", "dummy", "--enable-scale-out", "--mm-hasher-algorithm", IMAGE_DIGEST),
    *("--max-model-len", str(VISION_TOKENS), "--max-num-batched-tokens", "1024"),
    *("--limit-mm-per-prompt", json.dumps({"video": 0})),
)


def make_vision_model(directory: Path) -> Path:
    """Write the model's configuration and tokenizer into `directory`; return it."""
    directory.mkdir(parents=True, exist_ok=True)
    assert VISION_TEMPLATE != TEMPLATE
    write_tokenizer(directory, VISION_TEMPLATE, IMAGE_SPECIALS)
    files = {"config.json": CONFIG, "preprocessor_config.json": PROCESSOR}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=1) + "\n")
    return directory
