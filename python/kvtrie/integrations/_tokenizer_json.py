"""The tokenizer and the chat template of a model directory, without importing transformers.

Transformers takes two seconds of processor time to import, the libraries that it uses a tenth. What
is read here is what `transformers.PreTrainedTokenizerFast` makes of the same directory: the same
ids and the same rendered text. Where it might make something else of it, nothing is read.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer

_SPECIAL: Final = (
    *("bos_token", "eos_token", "unk_token", "sep_token"),
    *("pad_token", "cls_token", "mask_token"),
)
# Files and settings that change what transformers makes of the rest.
_OTHER_FILES: Final = ("special_tokens_map.json", "added_tokens.json", "additional_chat_templates")
_OTHER_KEYS: Final = (
    *("split_special_tokens", "fast_tokenizer_files", "fix_mistral_regex"),
    *("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", "init_inputs"),
    *("model_specific_special_tokens", "tokenizer_object", "gguf_file", "post_processor"),
)
_EXTRA: Final = ("extra_special_tokens", "additional_special_tokens")

OWN_ARGUMENTS: Final = frozenset(
    (
        *("conversation", "continue_final_message", "tokenize", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        "return_assistant_tokens_mask",
    )
)
"""Arguments that transformers' ``apply_chat_template`` takes itself, so that no template has them.

`JsonTokenizer` has none of them.
"""


class JsonTokenizer:
    """As much of transformers' tokenizers as finds out a chat format.

    Attributes:
        chat_template: A text, texts by name, or None.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        special: Mapping[str, str],
        chat_template: str | dict[str, str] | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self.chat_template = chat_template
        self._environment: ImmutableSandboxedEnvironment | None = None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text."""
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return found

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids, with special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool,  # noqa: ARG002 - it is text in each case
        add_generation_prompt: bool = False,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **arguments: object,
    ) -> str:
        """The text of a conversation.

        Raises:
            ValueError: There is no template.
            Exception: What a template may raise.
        """
        if self._environment is None:
            self._environment = _environment()
        text = self._template(chat_template, has_tools=tools is not None)
        return self._environment.from_string(text).render(
            {"documents": None, **self._special, **arguments},
            messages=conversation,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
        )

    def _template(self, given: str | None, *, has_tools: bool) -> str:
        known = self.chat_template
        if isinstance(known, dict):
            name = "tool_use" if has_tools and "tool_use" in known else "default"
            found = known.get(name) if given is None else known.get(given, given)
        else:
            found = known if given is None else given
        if found is None:
            msg = "there is no chat template"
            raise ValueError(msg)
        return found


def read(directory: Path) -> JsonTokenizer | None:
    """The tokenizer of a directory; None where transformers itself has to read it.

    Raises:
        Exception: Its files are broken.
    """
    path = directory / "tokenizer_config.json"
    if not path.is_file() or any((directory / one).exists() for one in _OTHER_FILES):
        return None
    config = json.loads(path.read_bytes())
    if not isinstance(config, dict) or any(config.get(one) for one in _OTHER_KEYS):
        return None
    try:
        from tokenizers import Tokenizer  # noqa: PLC0415 - for this alone
    except ImportError:
        return None
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    cleans = config.get("clean_up_tokenization_spaces")
    if cleans and type(tokenizer.model).__name__ != "BPE":
        return None
    special = _special(config)
    if special is None or not _has_all(tokenizer, config, special.values()):
        return None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return JsonTokenizer(tokenizer, special, _template_of(directory, config))


def _special(config: Mapping[str, Any]) -> dict[str, str] | None:
    """The named special tokens, which templates can read; None for names of a model's own."""
    found = {}
    for name, value in config.items():
        if not name.endswith("_token") or value is None or isinstance(value, bool):
            continue
        text = _text(value)
        if name not in _SPECIAL or text is None:
            return None
        found[name] = text
    return found


def _text(value: object) -> str | None:
    """A token as configs have it."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else None


def _has_all(
    tokenizer: Tokenizer, config: Mapping[str, Any], special: Iterable[str | None]
) -> bool:
    """Whether no token of the config is added to the tokenizer, or changed in it."""
    known = tokenizer.get_added_tokens_decoder()
    names = {one.content for one in known.values()}
    for key in _EXTRA:
        extra = config.get(key) or []
        if not isinstance(extra, list):
            return False
        special = [*special, *map(_text, extra)]
    if not names.issuperset(special):
        return False
    added = config.get("added_tokens_decoder") or {}
    return isinstance(added, dict) and all(_is_same(known, *one) for one in added.items())


def _is_same(known: Mapping[int, Any], number: str, given: object) -> bool:
    one = known.get(int(number))
    if one is None or not isinstance(given, dict):
        return False
    return all(
        getattr(one, name) == given.get(name)
        for name in ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    )


def _template_of(directory: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        return {one["name"]: one["template"] for one in found}
    return found


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja with what chat templates are given by transformers."""
    from jinja2 import TemplateError, nodes  # noqa: PLC0415 - not needed to serve
    from jinja2.ext import Extension  # noqa: PLC0415 - likewise
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415 - likewise

    class Generation(Extension):
        """``{% generation %}`` marks what a model says, for training."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 has it

        def parse(self, parser: Any) -> Any:  # noqa: ANN401 - jinja2's own
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("_said")
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def _said(self, caller: Any) -> Any:  # noqa: ANN401 - likewise
            return caller()

    # As transformers has it: what is rendered is no HTML.
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
    )

    def refuse(message: str) -> NoReturn:
        raise TemplateError(message)

    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = _now
    return made


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - the server's own time
