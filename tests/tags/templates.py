"""Chat templates in jinja, each in a few lines with the rules of a published one."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvtrie import tags

_LAST_USER = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}"
    "{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)
_LAST_FINAL = (
    "{%- set ns = namespace(last=-1) -%}{%- for m in messages -%}"
    "{%- if m.role == 'assistant' and not m.tool_calls -%}"
    "{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}"
)

QWEN3 = (
    _LAST_USER
    + """{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{ '<|im_start|>user\n<tool_response>\n' ~ m.content ~ '\n</tool_response><|im_end|>\n' }}
{%- else -%}
{{ '<|im_start|>' ~ m.role ~ '\n' }}
{%- if m.reasoning_content and (preserve or loop.index0 > ns.last) -%}
{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}
{%- endif -%}
{{ m.content or '' }}
{%- for call in m.tool_calls or [] -%}
{{ '\n<tool_call>\n' ~ (call.function | tojson) ~ '\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
)

QWQ = """{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{ '<|im_start|>user\n<tool_response>\n' ~ m.content ~ '\n</tool_response><|im_end|>\n' }}
{%- else -%}
{{ '<|im_start|>' ~ m.role ~ '\n' ~ (m.content or '').split('</think>')[-1].lstrip('\n') }}
{%- for call in m.tool_calls or [] -%}
{{ '\n<tool_call>\n' ~ (call.function | tojson) ~ '\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n<think>\n' }}{%- endif -%}"""

CHATML = """{%- for m in messages -%}
{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""

_DEEPSEEK = """{{ '<｜begin▁of▁sentence｜>' }}
{%- for m in messages -%}
{%- if m.role == 'system' -%}{{ m.content }}
{%- elif m.role == 'user' -%}{{ '<｜User｜>' ~ m.content }}
{%- elif m.role == 'tool' -%}TOOL
{%- else -%}
{%- if messages[loop.index0 - 1].role != 'tool' -%}{{ '<｜Assistant｜>STUB' }}{%- endif -%}
{{ (m.content or '').split('</think>')[-1] }}
{%- if m.tool_calls -%}
{{ '<｜tool▁calls▁begin｜>' }}
{%- for call in m.tool_calls -%}
{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' ~ call.function.name ~ '\n' }}
{{- call.function.arguments + '<｜tool▁call▁end｜>' }}
{%- endfor -%}
{{ '<｜tool▁calls▁end｜>' }}
{%- endif -%}
{{ '<｜end▁of▁sentence｜>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<｜Assistant｜><think>' }}{%- endif -%}"""

_OUTPUT = "'<｜tool▁output▁begin｜>' ~ m.content ~ '<｜tool▁output▁end｜>'"
DEEPSEEK_R1 = _DEEPSEEK.replace("STUB", "").replace(
    "TOOL", "{{ '<｜tool▁outputs▁begin｜>' ~ " + _OUTPUT + " ~ '<｜tool▁outputs▁end｜>' }}"
)
DEEPSEEK_V31 = _DEEPSEEK.replace("STUB", "</think>").replace("TOOL", "{{ " + _OUTPUT + " }}")

DEEPSEEK_V32 = (
    _LAST_USER
    + """{{ '<｜begin▁of▁sentence｜>' }}
{%- for m in messages -%}
{%- set think = '<think>' if loop.index0 >= ns.last else '</think>' -%}
{%- if m.role == 'system' -%}{{ m.content }}
{%- elif m.role == 'user' -%}{{ '<｜User｜>' ~ m.content ~ '<｜Assistant｜>' ~ think }}
{%- elif m.role == 'tool' -%}
{{ '\n\n<function_results>\n<result>' ~ m.content ~ '</result>\n</function_results>\n\n' ~ think }}
{%- else -%}
{%- if loop.index0 > ns.last -%}{{ (m.reasoning_content or '') ~ '</think>' }}{%- endif -%}
{{ m.content or '' }}
{%- if m.tool_calls -%}
{{ '\n\n<｜DSML｜function_calls>\n' }}
{%- for call in m.tool_calls -%}
{{ '<｜DSML｜invoke name="' ~ call.function.name ~ '">' ~ (call.function.arguments | tojson) }}
{{- '</｜DSML｜invoke>\n' }}
{%- endfor -%}
{{ '</｜DSML｜function_calls>' }}
{%- endif -%}
{{ '<｜end▁of▁sentence｜>' }}
{%- endif -%}
{%- endfor -%}"""
)

GLM = (
    _LAST_USER
    + """{{ '[gMASK]<sop>' }}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
{{ '<|observation|>\n<tool_response>\n' ~ m.content ~ '\n</tool_response>' }}
{%- elif m.role == 'assistant' -%}
{%- set keep = clear_thinking is false or loop.index0 > ns.last -%}
{{ '<|assistant|>\n<think>' ~ ((m.reasoning_content or '') if keep else '') ~ '</think>' }}
{%- if m.content -%}{{ '\n' ~ m.content.strip() }}{%- endif -%}
{%- for call in m.tool_calls or [] -%}
{{ '\n<tool_call>' ~ call.function.name ~ '\n' }}
{%- for key, value in call.function.arguments.items() -%}
{{ '<arg_key>' ~ key ~ '</arg_key>\n<arg_value>' ~ value ~ '</arg_value>\n' }}
{%- endfor -%}
{{ '</tool_call>' }}
{%- endfor -%}
{%- else -%}
{{ '<|' ~ m.role ~ '|>\n' ~ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"""
)

KIMI_K2 = (
    _LAST_FINAL
    + """{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ '<|im_user|>user<|im_middle|>' ~ m.content }}
{%- elif m.role == 'assistant' -%}
{{ '<|im_assistant|>assistant<|im_middle|>' }}
{{- '<think>' ~ (m.reasoning_content or '' if loop.index0 > ns.last else '') ~ '</think>' }}
{{- m.content or '' }}
{%- if m.tool_calls -%}
{{ '<|tool_calls_section_begin|>' }}
{%- for call in m.tool_calls -%}
{{ '<|tool_call_begin|>' ~ call.id ~ '<|tool_call_argument_begin|>' }}
{{- (call.function.arguments | tojson) ~ '<|tool_call_end|>' }}
{%- endfor -%}
{{ '<|tool_calls_section_end|>' }}
{%- endif -%}
{%- else -%}{{ '<|im_system|>' ~ (m.name or m.role) ~ '<|im_middle|>' ~ m.content }}
{%- endif -%}
{{ '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_assistant|>assistant<|im_middle|>' }}{%- endif -%}"""
)

MINIMAX_M2 = (
    _LAST_USER
    + """{{ ']~!b[' }}
{%- for m in messages -%}
{%- set role = 'ai' if m.role == 'assistant' else m.role -%}
{{ ']~b]' ~ role ~ '\n' }}
{%- if m.reasoning_content and loop.index0 > ns.last -%}
{{ '<think>\n' ~ m.reasoning_content ~ '\n</think>\n\n' }}
{%- endif -%}
{{ '<response>' ~ m.content ~ '</response>' if role == 'tool' else m.content or '' }}
{%- if m.tool_calls -%}
{{ '<minimax:tool_call>\n' }}
{%- for call in m.tool_calls -%}
{{ '<invoke name="' ~ call.function.name ~ '">' ~ (call.function.arguments | tojson) }}
{{- '</invoke>\n' }}
{%- endfor -%}
{{ '</minimax:tool_call>' }}
{%- endif -%}
{{ '[e~[\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ ']~b]ai\n<think>\n' }}{%- endif -%}"""
)

GPT_OSS = (
    _LAST_FINAL
    + """{{ '<|start|>system<|message|>Reasoning: medium<|end|>' }}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if m.tool_calls and m.content and m.thinking -%}
{{ raise_exception('one of them') }}
{%- endif -%}
{%- if m.thinking and loop.index0 > ns.last -%}
{{ '<|start|>assistant<|channel|>analysis<|message|>' ~ m.thinking ~ '<|end|>' }}
{%- endif -%}
{%- if m.tool_calls -%}
{%- set call = m.tool_calls[0].function -%}
{{ '<|start|>assistant to=functions.' ~ call.name ~ '<|channel|>commentary json<|message|>' }}
{{- (call.arguments | tojson) ~ '<|call|>' }}
{%- else -%}
{{ '<|start|>assistant<|channel|>final<|message|>' ~ m.content ~ '<|end|>' }}
{%- endif -%}
{%- elif m.role == 'tool' -%}
{{ '<|start|>functions.' ~ m.name ~ ' to=assistant<|channel|>commentary<|message|>' }}
{{- m.content ~ '<|end|>' }}
{%- else -%}
{%- set role = 'developer' if m.role == 'system' else m.role -%}
{{ '<|start|>' ~ role ~ '<|message|>' ~ m.content ~ '<|end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}"""
)

TEMPLATES = {
    "qwen3": QWEN3,
    "deepseek-r1": DEEPSEEK_R1,
    "deepseek-v3.1": DEEPSEEK_V31,
    "deepseek-v3.2": DEEPSEEK_V32,
    "glm": GLM,
    "kimi-k2": KIMI_K2,
    "minimax-m2": MINIMAX_M2,
    "gpt-oss": GPT_OSS,
}

_CORPUS = [
    "the user asks a question and the assistant looks it up with a tool, then answers it",
    "<function_results>\n<result>system developer</result>\n</function_results>\n\n<think>",
    "</function_results></think>analysis commentary final to=functions.lookup",
] * 20


@cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    words = r"\s*[\r\n]+|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    return tokenizer.to_str()


def tokenizer_of(name: str, template: str | None, *lacking: str) -> PreTrainedTokenizerBase:
    form = tags.preset(name)
    texts = {text for text, _ in form.delimiters()}
    texts = {text for text in texts if "function" not in text} | {"｜DSML｜"}
    texts |= {"<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "<|constrain|>"}
    backend = Tokenizer.from_str(_trained())
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in sorted(texts - {*lacking})]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = template
    return tokenizer
