"""Parse rules against the recorded results of the functions whose behavior they have."""

from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from outrider.environments.parse_rules import (
    NUM_NUMBERED,
    PARSE_RULES,
    Parsed,
    ParseRuleName,
    parse,
)
from tests.vectors import load_vectors

VECTORS = load_vectors("parse_rules")
ADMITTED = tuple(VECTORS["admitted"])
REPLIES = VECTORS["replies"]

COLUMNS = {
    "verl-agent-30": ("verl-agent-alfworld", "opid-scienceworld"),
    "verl-agent-20": ("verl-agent-webshop",),
    "verl-agent-think-optional": ("ucob-alfworld",),
    "one-pair": ("skillzero-alfworld",),
    "tag-only": ("lamer-alfworld",),
    "verl-agent-search": ("verl-agent-search",),
}
TEXTS = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "<action>", "</action>", "<ACTION>", "< action >", "<search>", "</search>",
         "<answer>", "</answer>", "</Answer>", "### ACTION: ", "1", " ###", "look", "İ", "看", "\n", " ", "'"]
    )
    | st.text(max_size=5),
    max_size=12,
).map("".join)  # fmt: skip


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize(
    ("rule", "column"), [(rule, column) for rule, columns in COLUMNS.items() for column in columns]
)
def test_a_rule_reads_what_the_recorded_function_read(rule: str, column: str, name: str) -> None:
    command, valid = REPLIES[name]["rules"][column]
    parsed = parse(rule, REPLIES[name]["reply"], ADMITTED)
    assert (parsed.command, parsed.valid) == (command, valid)
    assert parsed.executed == (command != "")


@pytest.mark.parametrize("name", REPLIES)
def test_strict_admissible_asks_for_the_form_and_for_the_command(name: str) -> None:
    command, valid, has_form = REPLIES[name]["rules"]["t2po-alfworld"]
    reply = REPLIES[name]["reply"]
    parsed = parse("strict-admissible", reply, ADMITTED)
    assert (parsed.command, parsed.valid) == (command, bool(valid))
    # If every command is possible, only the form is left of the condition.
    assert parse("strict-admissible", reply, [command.upper()]).valid == bool(has_form)


def test_the_vectors_are_complete() -> None:
    columns = {column for columns in COLUMNS.values() for column in columns} | {"t2po-alfworld"}
    assert len(REPLIES) == 28
    assert all(set(case["rules"]) == columns for case in REPLIES.values())
    assert set(PARSE_RULES) == set(get_args(ParseRuleName))


@pytest.mark.parametrize(
    ("reply", "parsed"),
    [
        ("I think. <action>Look  around</action>", Parsed("look around", True, True)),
        ("look around", Parsed("", False, False)),
        ("<action>look</action><action>inventory</action>", Parsed("", False, False)),
        ("<action> </action>", Parsed("", False, False)),
    ],
)
def test_strict_executes_valid_replies_only(reply: str, parsed: Parsed) -> None:
    assert parse("strict", reply, ADMITTED) == parsed


@pytest.mark.parametrize(
    ("reply", "number", "valid"),
    [
        ("### ACTION: 2 ###", 2, True),
        ("\n###ACTION:0###  ", 0, True),
        ("### ACTION: 49 ###", 49, True),
        ("### ACTION: 50 ###", 0, False),
        ("### ACTION: -1 ###", 0, False),
        ("I choose ### ACTION: 2 ###", 0, False),
        ("### action: 2 ###", 0, False),
        ("2", 0, False),
        ("", 0, False),
        (f"### ACTION: {'9' * 5000} ###", 0, False),
    ],
)
def test_index_plays_number_0_for_a_bad_answer(reply: str, number: int, valid: bool) -> None:
    commands = [f"command {number}" for number in range(NUM_NUMBERED + 10)]
    assert parse("index", reply, commands) == Parsed(f"command {number}", valid, True)
    assert parse("index", "### ACTION: 5 ###", commands[:5]) == Parsed("command 0", False, True)
    assert parse("index", reply, []) == Parsed("", False, False)


@pytest.mark.parametrize(
    ("reply", "parsed"),
    [
        ("<Search> Who? </SEARCH>", Parsed("<search>Who?</search>", True, True)),
        ("<answer>Paris</answer> <search>late</search>", Parsed("<search>late</search>", False, True)),
        ("</search><search>a</search>", Parsed("", False, False)),
        ("<search>a", Parsed("", False, False)),
        ("<search></search>", Parsed("<search></search>", True, True)),
    ],
)
def test_search(reply: str, parsed: Parsed) -> None:
    assert parse("verl-agent-search", reply, ()) == parsed


@pytest.mark.parametrize("rule", PARSE_RULES)
@given(reply=TEXTS, admitted=st.lists(st.sampled_from(["look", "Look", "", "open"]), max_size=3))
@example(reply="<action>" * 2000 + "<search>" * 2000, admitted=[])
def test_no_text_raises_and_what_is_executed_has_a_command(
    rule: str, reply: str, admitted: list[str]
) -> None:
    parsed = parse(rule, reply, admitted)
    assert not parsed.executed or parsed.command.strip()
