"""Tests of tokenizers: whole words for simulated workers, and tokenizer.json with chat templates
for models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire.hf import HfTokenizer
from engine.wire.template import ChatTemplate
from engine.wire.tokens import Chat, PromptError, WordTokenizer

VOCAB = 32_000
NOW_S = 1_700_000_000.0
CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def user(content: Any) -> Chat:
    return Chat(messages=[{"role": "user", "content": content}])


# --- words ---------------------------------------------------------------------------------


@given(st.lists(st.integers(0, VOCAB - 1), max_size=20))
def test_decoded_tokens_encode_to_themselves(ids: list[int]) -> None:
    words = WordTokenizer(VOCAB)
    assert words.encode(words.decode(ids)) == ids
    decoder = words.stream()
    assert "".join(map(decoder.step, ids)) + decoder.end() == words.decode(ids)


@given(st.text(max_size=60))
def test_any_text_gives_ids_in_range(text: str) -> None:
    ids = WordTokenizer(VOCAB).encode(text)
    assert all(0 <= token < VOCAB for token in ids)


@given(st.text(max_size=30), st.text(max_size=30))
def test_a_longer_text_keeps_the_tokens_before_a_space(left: str, right: str) -> None:
    words = WordTokenizer(VOCAB)
    assert words.encode(f"{left} {right}") == words.encode(left) + words.encode(right)


def test_words_that_only_resemble_tokens_get_other_ids() -> None:
    words = WordTokenizer(100)
    assert words.encode("t7 t99") == [7, 99]
    for odd in ("t07", "t100", "t٣", "t", "T7", "t\ud800"):
        assert len(words.encode(odd)) >= 1
    assert words.encode("t07") != [7]
    with pytest.raises(ValueError, match="vocab"):
        WordTokenizer(1)


def test_the_next_turn_of_a_chat_starts_with_the_previous_tokens() -> None:
    words = WordTokenizer(VOCAB)
    first = [{"role": "user", "content": "how are you"}]
    prompt = words.encode_chat(Chat(messages=first), NOW_S)
    answer = [5, 77, 31_999]
    turns = [*first, {"role": "assistant", "content": words.decode(answer)}]
    turns.append({"role": "user", "content": "and now"})
    again = words.encode_chat(Chat(messages=turns), NOW_S)
    assert again[: len(prompt) + 3] == prompt + answer


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (Chat(messages=[]), "empty"),
        (Chat(messages=[{"content": "x"}]), r"messages\[0\].role"),
        (user(5), r"messages\[0\].content"),
        (user([5]), "object with a type"),
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "image_url"),
        (user([{"type": "text", "text": 5}]), "string"),
        (
            Chat(messages=[{"role": "user", "content": "x"}], continue_final_message=True),
            "exclude",
        ),
    ],
)
def test_messages_that_cannot_be_tokenized_are_rejected(chat: Chat, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        WordTokenizer(VOCAB).encode_chat(chat, NOW_S)
    with pytest.raises(PromptError, match=message):
        ChatTemplate(CHATML, {}).render(chat, NOW_S)


# --- templates -----------------------------------------------------------------------------


def test_template_blocks_are_trimmed_and_html_is_not_escaped() -> None:
    source = "{% if true %}\n  {% set x = 1 %}\nA{{ messages | tojson }}\n{% endif %}\nB\n"
    text = ChatTemplate(source, {}).render(user("<b> & 'ä'"), NOW_S)
    assert text == 'A[{"role": "user", "content": "<b> & \'ä\'"}]\nB'


def test_content_parts_are_joined_unless_the_template_loops_over_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "a\nb" in ChatTemplate(CHATML, {}).render(user(parts), NOW_S)
    loops = "{% for m in messages %}{% for p in m['content'] %}[{{ p.text }}]"
    loops += "{% endfor %}{% endfor %}"
    assert ChatTemplate(loops, {}).render(user(parts), NOW_S) == "[a][b]"
    assert ChatTemplate(loops, {}).render(user("ab"), NOW_S) == "[ab]"


def test_templates_can_use_loop_controls_time_and_special_tokens() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% break %}{% endfor %}{{ strftime_now('%Y') }}{{ effort_is }}{{ missing }}"
    )
    chat = Chat(
        messages=[{"role": "user", "content": "x"}] * 2,
        chat_template_kwargs={"effort_is": "!", "messages": []},
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(chat, NOW_S) == "<s>x2023!"


def test_tool_arguments_are_parsed() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    chat = Chat(messages=[{"role": "assistant", "tool_calls": [call]}])
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.a }}{% endfor %}"
    assert ChatTemplate(source, {}).render(chat, NOW_S) == "1"
    for calls in (5, [5], [{"function": 5}]):
        broken = Chat(messages=[{"role": "assistant", "tool_calls": calls}])
        with pytest.raises(PromptError, match="tool"):
            ChatTemplate(source, {}).render(broken, NOW_S)
    call["function"]["arguments"] = '{"a": [' + "[]," * 100_000 + "[]]}"
    with pytest.raises(PromptError, match="too many parts"):
        ChatTemplate(source, {}).render(chat, NOW_S)


def test_the_final_message_can_be_continued() -> None:
    chat = Chat(
        messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well "}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    source = CHATML.replace("m.content", "m.content | trim")
    assert ChatTemplate(source, {}).render(chat, NOW_S).endswith("<|assistant|>well")


def test_developer_becomes_system_if_the_template_lacks_that_role() -> None:
    chat = Chat(
        messages=[
            {"role": "system", "content": "a"},
            {"role": "user", "content": "x"},
            {"role": "developer", "content": "b"},
        ]
    )
    text = ChatTemplate(CHATML, {}).render(chat, NOW_S)
    assert text.startswith("<|system|>a\n\nb\n<|user|>x\n")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}", "exceeds"),
    ],
)
def test_a_template_failure_is_a_client_error(source: str, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        ChatTemplate(source, {}).render(user("x"), NOW_S)


def test_a_broken_template_is_rejected_at_start() -> None:
    with pytest.raises(ValueError, match="line 2"):
        ChatTemplate("a\n{% if %}", {})


# --- model directories ---------------------------------------------------------------------


def test_special_tokens_are_added_once_and_tools_select_their_template(model: Path) -> None:
    tokenizer = HfTokenizer(model)
    plain = tokenizer.encode("ab")
    assert plain[0] == 0
    assert tokenizer.encode("ab", add_special_tokens=False) == plain[1:]
    chat = tokenizer.encode_chat(user("ab"), NOW_S)
    assert chat == [0, *tokenizer.encode("Dab", add_special_tokens=False)]
    with_tools = Chat(messages=[{"role": "user", "content": "ab"}], tools=[{"type": "function"}])
    assert tokenizer.render(with_tools, NOW_S) == "T"
    assert tokenizer.vocab == 258


def test_the_template_file_overrides_the_configuration(model: Path) -> None:
    (model / "chat_template.jinja").write_text("F{{ messages[0].content }}")
    assert HfTokenizer(model).render(user("ab"), NOW_S) == "Fab"


def test_split_characters_are_held_back_in_a_stream(model: Path) -> None:
    tokenizer = HfTokenizer(model)
    ids = tokenizer.encode("aäb", add_special_tokens=False)
    decoder = tokenizer.stream()
    assert [*map(decoder.step, ids)] == ["a", "", "ä", "b"]
    assert decoder.end() == ""
    assert tokenizer.decode(ids) == "aäb"


def test_an_incomplete_character_is_sent_at_the_end_of_a_stream(model: Path) -> None:
    tokenizer = HfTokenizer(model)
    ids = tokenizer.encode("aä", add_special_tokens=False)[:-1]
    decoder = tokenizer.stream()
    assert [*map(decoder.step, ids)] == ["a", ""]
    assert decoder.end() == "\ufffd"
    assert tokenizer.decode(ids) == "a\ufffd"


def test_ids_that_never_form_a_character_are_not_held_forever(model: Path) -> None:
    tokenizer = HfTokenizer(model)
    lead_byte = tokenizer.encode("ä", add_special_tokens=False)[0]
    step = tokenizer.stream().step
    text = "".join(step(lead_byte) for _ in range(100))
    assert len(text) >= 90
    assert set(text) == {"\ufffd"}
    assert step(tokenizer.encode("a", add_special_tokens=False)[0]).endswith("a")


def test_unusable_model_folders_are_rejected(model: Path) -> None:
    with pytest.raises(PromptError, match="Unicode"):
        HfTokenizer(model).encode("\ud800")
    (model / "tokenizer_config.json").write_text("{}")
    with pytest.raises(PromptError, match="no chat template"):
        HfTokenizer(model).encode_chat(user("x"), NOW_S)
    (model / "tokenizer_config.json").write_text("[")
    with pytest.raises(ValueError, match="tokenizer_config"):
        HfTokenizer(model)
    (model / "tokenizer_config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        HfTokenizer(model)
    (model / "tokenizer.json").unlink()
    with pytest.raises(OSError, match=r"tokenizer\.json"):
        HfTokenizer(model)
