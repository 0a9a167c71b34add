"""Hostile and broken chat templates: bounded in time and size, and only the request that needs them fails."""

from __future__ import annotations

import resource
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from slimserve.errors import RequestError
from slimserve.weights import chat_template
from slimserve.weights.chat_template import ChatTemplate
from slimserve.weights.tokenizer import Tokenizer, tokenizer_from_folder

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    rust = RustTokenizer(models.BPE(vocab={chr(code): code - 33 for code in range(33, 127)}, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    rust.save(str(folder / "tokenizer.json"))
    return tokenizer_from_folder(folder)


DOUBLING = (
    "{% set ns = namespace(x='" + "a" * 64 + "') %}"
    "{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x[:1] }}"
)
NESTING = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
BOMBS = {
    "endless output": "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "silent loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops in a condition": "{% for i in range(99999) if (range(99999) | sum) == 1 %}{% endfor %}",
    "macro recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "macro tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "repetition": "{{ 'a' * 10 ** 12 }}",
    "repetition of a list": "{{ ([1] * 10 ** 11) | length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "product": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x*ns.x %}{% endfor %}{{ ns.x }}",
    "plus": DOUBLING.replace("STEP", "ns.x + ns.x"),
    "tilde": DOUBLING.replace("STEP", "ns.x ~ ns.x"),
    "replace filter": DOUBLING.replace("STEP", "ns.x | replace('a', ns.x)"),
    "replace method": DOUBLING.replace("STEP", "ns.x.replace('a', ns.x)"),
    "replace nothing": DOUBLING.replace("STEP", "ns.x.replace('', ns.x)"),
    "join filter": DOUBLING.replace("STEP", "[ns.x, ns.x] | join(ns.x)"),
    "join method": DOUBLING.replace("STEP", "ns.x.join([ns.x, ns.x, ns.x])"),
    "format filter": DOUBLING.replace("STEP", "'%s%s' | format(ns.x, ns.x)"),
    "format method": DOUBLING.replace("STEP", "'{0}{0}'.format(ns.x)"),
    "percent": DOUBLING.replace("STEP", "'%s%s' % (ns.x, ns.x)"),
    "set block": "{% set ns = namespace(x='aaaa') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
    "{% set ns.x = y %}{% endfor %}",
    "nested lists": NESTING + "{{ ns.x }}",
    "nested lists as JSON": NESTING + "{{ ns.x | tojson }}",
    "nested lists as text": NESTING + "{{ (ns.x | string)[:1] }}",
    "kept texts": "{% set ns = namespace(x=[]) %}{% set big = 'a' * 1000000 %}{% for i in range(99999) %}"
    "{% set ns.x = ns.x + [big ~ i] %}{% endfor %}",
    "width filter": "{{ 'a' | center(10 ** 10) }}",
    "width method": "{{ 'a'.ljust(10 ** 10) }}",
    "indent": "{{ ('a\n' * 1000) | indent(10 ** 9) }}",
    "wide format": "{{ '%99999999999d' % 1 }}",
    "wide format method": "{{ '{:99999999999}'.format(1) }}",
    "computed width": "{{ '{:{}}'.format(1, 99999999999) }}",
    "star width": "{{ '%*d' % (99999999999, 1) }}",
    "wide indent": "{{ [1, [2]] | tojson(indent=10 ** 9) }}",
    "wide range": "{{ range(10 ** 12) | length }}",
    "long date": "{{ strftime_now('%Y' * 10 ** 6) }}",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_fail_within_bounds(name: str, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "_MAX_SECONDS", 0.5)
    template = ChatTemplate(BOMBS[name], tokenizer)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.thread_time()
    with pytest.raises(RequestError) as caught:
        template.render(MESSAGES)
    assert time.thread_time() - started < 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
    assert caught.value.param == "messages" and caught.value.code == "template_error"
    assert len(str(caught.value)) < 500


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ namespace.__init__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
    "{{ namespace(__class__=1) }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ ('{0.__class__}'.format)(1) }}",
    "{{ lipsum(n=9) }}",
    "{% include 'x' %}",
    "{% import 'x' as y %}{{ y }}",
    "{{ messages | attr('__class__') }}",
    "{{ messages | map(attribute='__class__') | list }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_no_way_out_of_the_sandbox(source: str, tokenizer: Tokenizer) -> None:
    messages = [dict(MESSAGES[0])]
    try:
        text = ChatTemplate(source, tokenizer).render(messages).text
    except RequestError as error:
        assert error.status == 400
    else:
        assert "class" not in text and "function" not in text
    assert messages == MESSAGES


BROKEN = [
    "{% for m in messages %}",
    "{{ messages[0 }}",
    "{{ x | no_such_filter }}",
    "{% unknown %}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "{% if a %}" * 400 + "{% endif %}" * 400,
    "{{ 1 " + "+ 1" * 200_000 + " }}",
    "x" * (1 << 21),
]


@pytest.mark.parametrize("source", BROKEN, ids=range(len(BROKEN)))
def test_a_template_that_does_not_compile_fails_only_its_requests(source: str, tokenizer: Tokenizer) -> None:
    template = ChatTemplate(source, tokenizer)
    assert template.problem is not None
    assert template.describe() == [f"chat: not available, {template.problem}; completions work"]
    with pytest.raises(RequestError, match="this model cannot chat") as caught:
        template.render(MESSAGES)
    assert caught.value.code == "no_chat"


def test_a_template_may_refuse(tokenizer: Tokenizer) -> None:
    refusal = "{{ raise_exception('needs a\nsystem message: ' ~ messages[0].content) }}"
    source = "{% if messages[0].role != 'system' %}" + refusal + "{% endif %}ok"
    template = ChatTemplate(source, tokenizer)
    with pytest.raises(RequestError, match=r"needs a system message: <\|im_end\|>") as caught:
        template.render([{"role": "user", "content": "<|im_end|>"}])
    assert "\ufdd0" not in str(caught.value)
    assert template.render([{"role": "system", "content": "x"}]).text == "ok"


@pytest.mark.parametrize(
    "source", ["{{ 1 / 0 }}", "{{ messages[0].content + none }}", "{{ messages.x.y }}", "{{ x() }}"]
)
def test_errors_while_rendering_fail_the_request(source: str, tokenizer: Tokenizer) -> None:
    template = ChatTemplate(source, tokenizer)
    with pytest.raises(RequestError) as caught:
        template.render(MESSAGES)
    assert caught.value.status == 400 and caught.value.code == "template_error"


def test_a_failed_render_leaves_nothing_behind(tokenizer: Tokenizer) -> None:
    source = "{% if messages[0].content == 'boom' %}{{ 'a' * 10 ** 12 }}{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(source, tokenizer)
    results: list[str] = []

    def work(content: str) -> None:
        for _ in range(50):
            try:
                results.append(template.render([{"role": "user", "content": content}]).text)
            except RequestError:
                results.append("failed")

    threads = [threading.Thread(target=work, args=(content,)) for content in ("boom", "fine", "<|im_end|>", "boom")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == ["<|im_end|>"] * 50 + ["failed"] * 100 + ["fine"] * 50


def test_long_conversations_are_within_the_bounds(tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim }}{% endfor %}"
    template = ChatTemplate(source, tokenizer)
    messages = [{"role": "user", "content": "word < [tag] " * 200}] * 2000
    assert len(template.render(messages).text) > 5_000_000
    huge = template.render([{"role": "user", "content": "a<b " * 2_500_000}])
    assert len(huge.text) > 9_999_999
