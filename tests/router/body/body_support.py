"""Makes request bodies for tests of the readers of bodies: of every kind, and common ones."""

from __future__ import annotations

from hypothesis import strategies as st

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**20), 10**20)
    | st.floats()
    | st.text(max_size=12)
    | st.sampled_from(["user", "text", "input_text", "image_url"])
)
KEYS = st.sampled_from(["role", "content", "type", "text", "name", "a", "\u00e9\n", '"']) | st.text(
    max_size=3
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=10,
)
PARTS = st.lists(
    st.text(max_size=6)
    | st.fixed_dictionaries(
        {"type": st.sampled_from(["text", "refusal", "image_url"])},
        optional={"text": st.text(max_size=20), "more": JSON},
    ),
    max_size=3,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"])},
        optional={"content": st.none() | st.text(max_size=60) | PARTS, "more": JSON},
    ),
    max_size=5,
)
IDS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
NAMES = st.none() | st.text(max_size=5)
BODIES = st.fixed_dictionaries(
    {},
    optional={
        "model": NAMES,
        "user": NAMES,
        "session_id": NAMES,
        "prompt_cache_key": NAMES,
        "cache_salt": NAMES,
        "metadata": JSON,
        "nvext": JSON,
        "conversation": JSON,
        "safety_identifier": JSON,
        "stream": st.none() | st.booleans(),
        "prompt": st.text(max_size=90) | IDS | st.lists(st.text(max_size=30), max_size=4),
        "messages": st.none() | MESSAGES,
        "tools": st.none() | st.lists(JSON, max_size=3),
        "priority": st.none() | st.integers(-(2**32), 2**32),
        "max_tokens": st.none() | st.integers(-1, 2**32),
        "max_completion_tokens": st.none() | st.integers(-1, 2**32),
        "n": st.none() | st.integers(0, 4),
        "chat_template_kwargs": JSON,
        "add_generation_prompt": st.none() | st.booleans(),
        "truncate_prompt_tokens": st.none() | st.integers(-1, 9),
        "unknown": JSON,
    },
)

# What clients send day by day: none of it may take the long way.
SOUND = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
DAILY = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**17), 10**17) | SOUND,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=10,
)
SHORT = st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=2)
TALK = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant"])},
        optional={
            "content": st.none()
            | SOUND
            | st.lists(SOUND | st.fixed_dictionaries({"type": st.just("text"), "text": SOUND})),
            "more": DAILY,
        },
    ),
    min_size=1,
    max_size=4,
)
ASKED = (
    st.fixed_dictionaries({"messages": TALK})
    | st.fixed_dictionaries({"prompt": SOUND.filter(bool)})
    | st.fixed_dictionaries({"prompt": IDS.filter(bool)})
    | st.fixed_dictionaries({"prompt": st.lists(SOUND.filter(bool), min_size=1, max_size=3)})
)
BESIDES = st.fixed_dictionaries(
    {},
    optional={
        "model": SHORT,
        "user": SHORT,
        "cache_salt": SHORT,
        "metadata": DAILY,
        "service_tier": SHORT,
        "stream": st.none() | st.booleans(),
        "tools": st.none() | st.lists(DAILY, max_size=3),
        "priority": st.none() | st.integers(-(2**31), 2**31 - 1),
        "max_tokens": st.none() | st.integers(0, 2**31 - 1),
        "max_completion_tokens": st.none() | st.integers(0, 2**31 - 1),
        "n": st.none() | st.integers(1, 3),
        "chat_template_kwargs": st.dictionaries(KEYS, DAILY, max_size=3),
        "temperature": st.sampled_from([0, 0.7, 1e-5, -1.5e10]),
        "unknown": DAILY,
    },
)
