"""Tests of the rules of model names: their syntax, which rule applies, and which are refused."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config.extras import NameSettings
from router.names.rules import NameRule, NameRules, Pattern, alias_of, lines_of, weighted_of


def rules(*aliases: str, targets: tuple[str, ...] = ()) -> NameRules:
    return NameRules(NameSettings(aliases=aliases, targets=targets))


@pytest.mark.parametrize(
    ("line", "model", "revision"),
    [
        ("gpt-4o=llama", "llama", None),
        ("x=llama3:8b", "llama3:8b", None),
        ("x=org/llama@v1", "org/llama", "v1"),
        ("x=@cf/meta/llama", "@cf/meta/llama", None),
        ("x=claude@2024@", "claude@2024", None),
        ("x = base:adapter@r ", "base:adapter", "r"),
    ],
)
def test_an_alias_has_a_model_and_an_optional_revision(line, model, revision) -> None:
    (target,) = alias_of(line).targets
    assert (target.model, target.revision, target.weight) == (model, revision, 1.0)
    (again,) = alias_of(f"y={target}").targets
    assert again == target


def test_weighted_targets_are_parsed() -> None:
    rule = weighted_of("chat=llama@v1:90, llama3:8b:9.5,other@:0")
    assert [(t.model, t.revision, t.weight) for t in rule.targets] == [
        ("llama", "v1", 90.0),
        ("llama3:8b", None, 9.5),
        ("other", None, 0.0),
    ]


@pytest.mark.parametrize(
    "line", ["", "=", "a", "a=", "=m", "a=@", "a=m*", "a=m@v*", "a=\n", f"{'a' * 1025}=m"]
)
def test_malformed_aliases_are_refused(line) -> None:
    with pytest.raises(ValueError, match=r"is not NAME=|a target is one model|characters"):
        alias_of(line)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("a=m", "has no weight"),
        ("a=m@v1", "has no weight"),
        ("a=m:1,", "has no weight"),
        ("a=m:-1,n:1", "a weight must be 0..1000000, is '-1'"),
        ("a=m:nan", "a weight must be"),
        ("a=m:inf", "a weight must be"),
        ("a=m:1000001", "a weight must be"),
        ("a=m:x", "a weight must be"),
        ("a=m:0", "all weights are 0"),
        ("a=m:0,n:0", "all weights are 0"),
        ("a=m@v:1,m@v:2", "is there twice"),
        ("a=m@v:1,*:2", "a target is one model"),
        ("a=" + ",".join(f"m{n}:1" for n in range(65)), "at most 64"),
    ],
)
def test_malformed_weights_are_refused(line, why) -> None:
    with pytest.raises(ValueError, match=why):
        weighted_of(line)


def test_a_file_may_have_rules_as_mappings() -> None:
    assert lines_of({"gpt-4o": "llama", "b": "m@v"}) == ["gpt-4o=llama", "b=m@v"]
    assert lines_of({"chat": {"llama@v1": 90, "llama@v2": 10.5}}) == [
        "chat=llama@v1:90,llama@v2:10.5"
    ]
    assert lines_of(["a=b"]) == ["a=b"]
    for wrong in ({"a": 1}, {"a": None}, {1: "m"}, {"a=b": "m"}):
        with pytest.raises(ValueError, match=r"expected a model|has no ="):
            lines_of(wrong)


def test_weights_in_aliases_are_refused() -> None:
    for line in ("chat=llama@v1:90,llama@v2:10", "chat=a,b"):
        with pytest.raises(ValueError, match=r"an alias is one model; .*use names\.targets"):
            alias_of(line)
    with pytest.raises(ValueError, match=r"'chat': an alias is one model; .*use names\.targets"):
        lines_of({"chat": {"llama": 90}}, weights=False)
    assert lines_of({"chat": "llama"}, weights=False) == ["chat=llama"]


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="'a' is given twice"):
        rules("a=m", "a=n")
    with pytest.raises(ValueError, match="'a' is given twice"):
        rules("a=m", targets=("a=m:1",))


@pytest.mark.parametrize(
    "aliases",
    [("a=b", "b=a"), ("a=b", "b=c", "c=d", "d=b"), ("x=a", "a=b", "b=a")],
)
def test_cycles_of_names_are_refused(aliases) -> None:
    with pytest.raises(ValueError, match=r"names lead in a circle: '.' -> "):
        rules(*aliases)


def test_a_cycle_through_weights_is_refused_and_a_split_by_revision_is_not() -> None:
    with pytest.raises(ValueError, match="circle: 'a' -> 'b' -> 'a'"):
        rules("a=b", targets=("b=a:1,c:9",))
    found = rules("a=llama", targets=("llama=llama@v1:9,llama:1",))
    rule = found.exact_rule("a")
    assert rule is not None
    llama = found.follows(rule, rule.targets[0])
    assert llama is found.exact_rule("llama")
    assert llama is not None
    assert llama.splits_itself
    assert [found.follows(llama, target) for target in llama.targets] == [None, None]


def test_a_target_with_a_revision_is_not_resolved_further() -> None:
    found = rules("a=llama@v1", "llama=other")
    rule = found.exact_rule("a")
    assert rule is not None
    assert found.follows(rule, rule.targets[0]) is None


def test_a_chain_of_more_than_8_names_is_refused() -> None:
    rules(*(f"n{i}=n{i + 1}" for i in range(8)))
    with pytest.raises(ValueError, match="by more than 8 names"):
        rules(*(f"n{i}=n{i + 1}" for i in range(9)))
    with pytest.raises(ValueError, match="by more than 8 names"):
        rules(*(f"n{i}=n{i + 1}" for i in reversed(range(9_999))))


def test_the_most_specific_pattern_wins_then_the_first() -> None:
    found = rules("*=any", "claude-*=llama", "claude-*haiku*=small", "claude-*opus*b=x", "gpt*=g")

    def model(name: str) -> str:
        rule = found.pattern_rule(name)
        assert rule is not None
        return rule.targets[0].model

    assert model("claude-3-haiku-2024") == "small"
    assert model("claude-sonnet") == "llama"
    assert model("gpt-4o") == "g"
    assert model("else") == "any"
    assert model("else") == "any"
    first = rules("a*=one", "*a=two")
    found_rules = map(first.pattern_rule, ("a", "ab", "ba"))
    assert [r and r.targets[0].model for r in found_rules] == ["one", "one", "two"]


def test_the_numbers_of_patterns_and_of_remembered_matches_are_bounded() -> None:
    found = rules(*(f"name-{n}=model-{n % 7}" for n in range(10_000)))
    assert len(found.exact) == 10_000
    assert found.pattern_rule("x") is None
    many = rules(*(f"p{n}*=m" for n in range(1_000)))
    for n in range(10_000):
        many.pattern_rule(f"unknown-{n}")
    assert len(many._memo) <= 4_096
    with pytest.raises(ValueError, match="at most 1000 may"):
        rules(*(f"p{n}*=m" for n in range(1_001)))


@given(st.text("ab*", min_size=1, max_size=9).filter(lambda p: "*" in p), st.text("ab", max_size=9))
def test_patterns_match_like_file_name_patterns(pattern, name) -> None:
    one = Pattern(NameRule(pattern, alias_of("x=m").targets))
    assert one.matches(name) == fnmatchcase(name, pattern)
