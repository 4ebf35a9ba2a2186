"""What the lab says about a template, against a naive reading of the same ids."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from tests.tags.templates import CHATML, QWEN3, TEMPLATES, tokenizer_of

from kvtrie import lab

# With 8 templates a thousand in all if KVTRIE_LAB says 125.
CONVERSATIONS = int(os.environ.get("KVTRIE_LAB", "25"))
WORDS = "note harbour blue seven where answer place rooms built early there late what so it".split()


# The agent with its reasoning, and one result that goes after the first turn.
PRUNED = lab.BUILT_IN["pruned"]


def text(source: random.Random, most: int = 40) -> str:
    return " ".join(source.choice(WORDS) for _ in range(source.randint(1, most)))


def chat_of(seed: int) -> lab.Chat:
    """A client that appends, and now and then changes a message or takes some away."""
    source = random.Random(seed)
    history: list[dict[str, Any]] = [{"role": "system", "content": text(source)}]
    requests = []
    for _ in range(source.randint(2, 5)):
        history.append({"role": "user", "content": text(source)})
        reply = {"role": "assistant", "content": text(source)}
        if source.random() < 0.5:
            reply["reasoning_content"] = text(source)
        requests.append(lab.ClientRequest(tuple(history), reply))
        history.append(reply)
        if source.random() < 0.3:
            at = source.randrange(len(history))
            history[at] = {**history[at], "content": text(source)}
        if source.random() < 0.2 and len(history) > 3:
            del history[1:3]
    return lab.Chat(str(seed), tuple(requests))


def common(one: list[int], other: list[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def check(template: lab.Template, chat: lab.Chat, block: int) -> int:
    """Compare every turn with the ids alone; the number of prompts that diverge."""
    cached: list[list[int]] = []
    diverged = 0
    found = lab.measure(template, chat, block_size=block, min_run=8)
    for request, turn in zip(chat.requests, found.turns, strict=True):
        one = template.render(chat, request)
        whole = [common(one.ids, old[: len(old) // block * block]) for old in cached]
        hit = max(whole, default=0) // block * block
        assert turn.prefix == min(hit, (len(one.ids) - 1) // block * block)
        lengths = [common(one.ids, old) for old in cached]
        at = max(lengths, default=0)
        ends = {len(one.ids), *(len(old) for old in cached if common(one.ids, old) == at)}
        if cached and at not in ends:
            assert turn.divergence is not None
            assert turn.divergence.position == at
            diverged += 1
        elif turn.divergence is not None:
            assert turn.divergence.position == at
        assert turn.prompt == len(one.ids)
        assert turn.prefix <= turn.reused + block
        assert sum(end - start for start, end, what in turn.segments if what != "computed") == (
            turn.reused
        )
        cached.append([*one.ids, *one.sampled[:-1]])
    return diverged


@pytest.mark.parametrize("name", TEMPLATES)
def test_prefix_hits_and_divergences_are_those_of_the_ids(name: str) -> None:
    template = lab.Template(tokenizer_of(name, TEMPLATES[name]))
    diverged = sum(check(template, chat_of(seed), 4 + seed % 13) for seed in range(CONVERSATIONS))
    assert diverged > CONVERSATIONS // 2


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_built_in_conversation_renders(name: str) -> None:
    report = lab.study(tokenizer_of(name, TEMPLATES[name]), list(lab.BUILT_IN.values()))
    default = [row for row in report.rows if not row.switch]
    assert [row.chat for row in default] == list(lab.BUILT_IN)
    assert not [row.error for row in default if row.error]
    assert report.format == name


def test_dropped_reasoning_is_named_and_kvtrie_moves_what_follows() -> None:
    report = lab.study(tokenizer_of("qwen3", QWEN3), [lab.BUILT_IN["reasoning"]])
    assert report.drops == "next user message"
    measured = report.rows[0].measured
    assert measured is not None
    # The reasoning of the second reply goes when the third question comes, and so on.
    causes = [turn.divergence and turn.divergence.cause for turn in measured.turns]
    assert causes == [None, "reasoning", "reasoning", "reasoning"]
    assert all(
        turn.divergence.kind == "reasoning" and turn.divergence.movable_after > 0
        for turn in measured.turns[1:]
        if turn.divergence
    )
    assert measured.computed < measured.computed_by_prefix


def test_a_template_that_writes_no_reasoning_drops_it_at_the_end_of_the_reply() -> None:
    """It was said to drop reasoning never, above rows in which it drops all."""
    # Qwen2.5's template has the format's marks for tools, and no field for reasoning.
    no_field = QWEN3.replace("m.reasoning_content and", "false and")
    report = lab.study(tokenizer_of("qwen3", no_field), [lab.BUILT_IN["reasoning"]])
    measured = report.rows[0].measured
    assert measured is not None
    assert [turn.divergence and turn.divergence.cause for turn in measured.turns] == [
        None,
        *["reasoning"] * 3,
    ]
    assert (report.format, report.drops) == ("qwen3", "end of the reply")
    kept = QWEN3.replace("preserve or", "true or")
    assert lab.study(tokenizer_of("qwen3", kept), [lab.BUILT_IN["reasoning"]]).drops == "never"


def test_switches_are_those_that_change_a_prompt() -> None:
    template = lab.Template(tokenizer_of("qwen3", QWEN3))
    assert list(template.switches(list(lab.BUILT_IN.values()))) == [{"preserve": True}]
    assert not list(template.switches([lab.BUILT_IN["chat"]]))


def test_keeping_reasoning_and_moving_the_date_are_priced() -> None:
    report = lab.study(tokenizer_of("qwen3", QWEN3), list(lab.BUILT_IN.values()))
    saved = {(one.chat, one.change): one for one in report.savings}
    kept = saved["reasoning", "preserve=True"]
    rows = {(row.chat, bool(row.switch)): row.measured for row in report.rows if not row.when}
    default, switched = rows["reasoning", False], rows["reasoning", True]
    assert default is not None
    assert switched is not None
    assert (kept.before, kept.after) == (default.computed_by_prefix, switched.computed_by_prefix)
    assert kept.prompt_after > kept.prompt_before
    assert ("date", "the time at the end of the question") in saved
    assert all(one.after < one.before for one in report.savings)


@pytest.mark.parametrize("name", ["reasoning", "agent"])
def test_keeping_reasoning_is_priced_without_a_switch(name: str) -> None:
    """What a template without the switch would save is what the switch of another one saves."""
    chat = lab.BUILT_IN[name]
    switched = lab.study(tokenizer_of("qwen3", QWEN3), [chat])
    (by_switch,) = switched.savings
    assert by_switch.change == "preserve=True"
    without = QWEN3.replace("preserve or ", "")
    assert "preserve" not in without
    (kept,) = lab.study(tokenizer_of("qwen3", without), [chat]).savings
    assert kept.change == "all reasoning kept in the history"
    assert (kept.before, kept.prompt_before) == (by_switch.before, by_switch.prompt_before)
    assert (kept.after, kept.prompt_after) == (by_switch.after, by_switch.prompt_after)


def test_a_client_that_changes_its_history_has_no_price_for_kept_reasoning() -> None:
    report = lab.study(tokenizer_of("qwen3", QWEN3.replace("preserve or ", "")), [PRUNED])
    measured = report.rows[0].measured
    assert measured is not None
    assert "reasoning" in [turn.divergence.cause for turn in measured.turns if turn.divergence]
    assert not report.savings


# --- switches and what else a template reads --------------------------------------------------


def reads(text: str) -> str:
    """A template that writes something before the messages."""
    return text + CHATML


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("{{ 'A' if mode == 'deep' else 'B' if 'flat' == mode else '' }}", ["deep", "flat"]),
        ("{{ mode if mode in ['deep', 'flat'] else '' }}", ["deep", "flat"]),
        ("{{ 'A' if mode | lower == 'deep' else '' }}", ["deep"]),
        ("{% if mode is not defined %}{% set mode = 'deep' %}{% endif %}{{ mode ~ '!' }}", []),
        ("{{ mode | default('deep') }}{{ 'x' if mode == 'flat' else '' }}", ["flat"]),
        ("{{ 'A' if mode == 2 else '' }}", [2]),
        ("{{ 'A' if mode else '' }}", [True]),
        ("{{ 'A' if mode is defined and not mode else '' }}", [False]),
        (
            "{% for one in mode or [] %}{{ one if one == 'a' or one == 'b' else '' }}{% endfor %}",
            [["a", "b"]],
        ),
    ],
)
def test_values_of_switches_are_those_that_a_template_knows(text: str, values: list[Any]) -> None:
    template = lab.Template(tokenizer_of("qwen3", reads(text)))
    found = list(template.switches([lab.BUILT_IN["chat"]]))
    assert found == [{"mode": value} for value in values]


def test_a_name_whose_values_are_not_known_is_named_and_not_tried() -> None:
    text = "{{ 'You are ' + name }}{{ '!' if loud else '' }}"
    text = text.replace(
        "{{ 'You", "{% if name is not defined %}{% set name = '' %}{% endif %}{{ 'You"
    )
    report = lab.study(tokenizer_of("qwen3", reads(text)), [lab.BUILT_IN["chat"]])
    assert report.unvaried == ("name",)
    assert [row.switch for row in report.rows if not row.when] == [{}, {"loud": True}]
    given = lab.study(
        tokenizer_of("qwen3", reads(text)), [lab.BUILT_IN["chat"]], arguments={"name": "x"}
    )
    assert not given.unvaried


def test_switches_after_the_fourth_are_named_and_not_tried() -> None:
    names = [f"mode_{letter}" for letter in "abcdef"]
    text = "".join(f"{{{{ '{name}!' if {name} else '' }}}}" for name in names)
    report = lab.study(tokenizer_of("qwen3", reads(text)), [lab.BUILT_IN["chat"]])
    tried = {name for row in report.rows for name in row.switch if not row.when}
    assert tried == set(names[:4])
    assert report.untried == ("mode_e", "mode_f")
    assert not report.unvaried


def changed(text: str, name: str) -> dict[str, list[int]]:
    """Of each value and time of a name, the positions where a prompt of `chat` diverges."""
    report = lab.study(tokenizer_of("qwen3", reads(text)), [lab.BUILT_IN["chat"]])
    assert not [row.error for row in report.rows if row.error]
    return {
        f"{row.switch[name]} {row.when}": [
            turn.divergence.position if turn.divergence else -1 for turn in row.measured.turns
        ]
        for row in report.rows
        if name in row.switch and row.measured
    }


def test_a_switch_that_changes_halfway_costs_what_follows_it() -> None:
    found = changed("{{ 'The answer' if mode == 'deep' else 'then' }}", "mode")
    assert found["deep "] == [-1, -1, -1, -1]
    assert found["deep halfway"] == [-1, -1, 0, -1]


def test_tools_documents_and_dates_are_varied_where_a_template_reads_them() -> None:
    tools = changed("{{ 'Tools:' }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}", "tools")
    assert tools["one "] == [-1, -1, -1, -1]
    at = tools["one more halfway"]
    assert at[2] > 0
    assert (at[0], at[1], at[3]) == (-1, -1, -1)
    text = "{% for d in documents or [] %}{{ d.title ~ d.text }}{% endfor %}"
    documents = changed(text, "documents")
    assert documents["four "] == [-1, -1, -1, -1]
    assert [one >= 0 for one in documents["reordered each turn"]] == [False, True, True, True]
    for text, name in (
        ("{{ strftime_now('%d') }}", "strftime_now"),
        ("{% if date_string is defined %}{{ date_string }}{% endif %}", "date_string"),
    ):
        (days,) = changed(text, name).values()
        assert [one >= 0 for one in days] == [False, True, True, True], name
    assert not lab.study(tokenizer_of("qwen3", CHATML), [lab.BUILT_IN["chat"]]).rows[1:]


def test_what_the_caller_passes_is_not_varied() -> None:
    text = "{{ strftime_now('%d') }}{{ 'A' if mode == 'deep' else '' }}"
    given = {"strftime_now": lambda _form: "1", "mode": "x"}
    chats = [lab.BUILT_IN["chat"]]
    report = lab.study(tokenizer_of("qwen3", reads(text)), chats, arguments=given)
    assert len(report.rows) == 1


def test_text_that_encodes_to_other_ids_than_were_sampled() -> None:
    """The reply begins with what merges with the end of the prompt when both are one text."""
    # The prompt ends in the middle of a word that is one token when it is encoded as a whole.
    opened = "'<|im_start|>assistant\nus'"
    template = CHATML.replace("'<|im_start|>assistant\n'", opened).replace(
        "m.role ~ '\n'", "m.role ~ ('\nus' if m.role == 'assistant' else '\n')"
    )
    tokenizer = tokenizer_of("qwen3", template)
    reply = {"role": "assistant", "content": "er asks"}
    asked = ({"role": "user", "content": "what is it"},)
    requests = (lab.ClientRequest(asked, reply), lab.ClientRequest((*asked, reply, *asked), reply))
    chat = lab.Chat("merged", requests)
    first, second = lab.measure(lab.Template(tokenizer), chat, block_size=1, min_run=8).turns
    rendered = lab.Template(tokenizer).render(chat, chat.requests[0])
    again = tokenizer.encode(rendered.prompt + rendered.text, add_special_tokens=False)
    assert again != [*rendered.ids, *rendered.sampled]
    assert first.reencoded == common(again, [*rendered.ids, *rendered.sampled])
    assert second.divergence is not None
    assert second.divergence.position == first.reencoded
    assert second.divergence.cause == "encoding"


def test_ids_that_an_engine_returned_are_compared_with_those_of_the_text() -> None:
    """The model spells a reply token by token where the encoder has longer tokens."""
    tokenizer = tokenizer_of("qwen3", CHATML)
    template = lab.Template(tokenizer)
    asked: tuple[dict[str, Any], ...] = ({"role": "user", "content": "what is it"},)
    reply = {"role": "assistant", "content": "the harbour"}
    plain = (lab.ClientRequest(asked, reply), lab.ClientRequest((*asked, reply, *asked), reply))
    usual = template.render(lab.Chat("usual", plain), plain[0])
    spelled = [one for letter in reply["content"] for one in template.encode(letter)]
    end = usual.sampled[len(template.encode(reply["content"])) :]
    ids = [*spelled, *end]
    sampled = {**reply, "token_ids": ids}
    assert tokenizer.decode(ids) == usual.text
    requests = (
        lab.ClientRequest(asked, sampled),
        lab.ClientRequest((*asked, sampled, *asked), reply),
    )
    chat = lab.Chat("spelled", requests)
    first, second = lab.measure(template, chat, block_size=1, min_run=8).turns
    assert first.reencoded is not None
    assert first.reencoded >= len(usual.ids)
    assert first.reply == len(ids)
    assert second.divergence is not None
    assert (second.divergence.position, second.divergence.cause) == (first.reencoded, "encoding")
    without = lab.measure(template, lab.Chat("usual", plain), block_size=1, min_run=8).turns
    assert without[0].reencoded is None
    assert second.prefix < without[1].prefix


def test_an_id_beyond_the_tokenizer_is_refused() -> None:
    tokenizer = tokenizer_of("qwen3", CHATML)
    reply = {"role": "assistant", "content": "it", "token_ids": [len(tokenizer)]}
    chat = lab.Chat("talk", (lab.ClientRequest(({"role": "user", "content": "it"},), reply),))
    with pytest.raises(lab.TemplateError, match=f"token id {len(tokenizer)}; the tokenizer has"):
        lab.study(tokenizer, [chat])


@pytest.mark.parametrize("opening", ["[assistant]", "[assistant 0]"])
def test_the_reply_is_found_where_a_template_counts_messages_from_the_last(opening: str) -> None:
    """Regression: all from the first number that changed was taken as sampled, or its first line.

    The opening of a reply may be the one that the template writes into the history, or not.
    """
    heads = "[{{ m.role }} {{ loop.revindex }}]" + opening * (opening == "[assistant]")
    counting = (
        f"{{% for m in messages %}}{heads}{{{{ m.content }}}}{{% for c in m.tool_calls or [] %}}"
        f"!{{{{ c.function.name }}}}{{% endfor %}}<|im_end|>{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{opening}{{% endif %}}"
    )
    template = lab.Template(tokenizer_of("qwen3", counting))
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {}}}
    asked = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "what"})
    for reply, sampled in (
        ({"role": "assistant", "content": "what"}, "what<|im_end|>"),
        ({"role": "assistant", "content": "", "tool_calls": [call]}, "!look<|im_end|>"),
    ):
        request = lab.ClientRequest(asked, reply)
        one = template.render(lab.Chat("counted", (request,)), request)
        assert one.prompt.endswith(opening)
        assert one.text.startswith(sampled)
        assert one.text.count("<|im_end|>") == 1


def test_a_template_that_refuses_a_conversation_is_quoted() -> None:
    template = "{%- if tools -%}{{ raise_exception('no tools here') }}{%- endif -%}" + CHATML
    report = lab.study(tokenizer_of("qwen3", template), list(lab.BUILT_IN.values()))
    errors = {row.chat: row.error for row in report.rows if not row.switch}
    assert (
        errors["agent"]
        == "the template does not render 'agent': line 1 of the template: no tools here"
    )
    assert not errors["chat"]
    with pytest.raises(lab.TemplateError, match="'agent': line 1 of the template: no tools here"):
        lab.study(tokenizer_of("qwen3", template), [lab.BUILT_IN["agent"]])


def test_a_tokenizer_without_a_template() -> None:
    with pytest.raises(lab.TemplateError, match="has no chat template"):
        lab.Template(tokenizer_of("qwen3", None))
