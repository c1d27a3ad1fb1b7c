"""The call formats that are known, how each is recognised, and how a user adds one.

A format has a scanner (finds calls in growing text) and styles (literal text around the parts of a call, for writing).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ooospec.chat.formats import harmony
from ooospec.chat.formats.headed import Head, HeadedScanner
from ooospec.chat.formats.pythonic import PythonScanner
from ooospec.chat.formats.tagged import Tags, TagScanner
from ooospec.chat.scanner import CallScanner, Scanner
from ooospec.chat.style import CallStyle, default_styles, object_style
from ooospec.core import Tool
from ooospec.errors import UsageError


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write calls."""

    name: str
    about: str
    signs: tuple[tuple[str, ...], ...]
    """Groups of texts; the format is meant where a chat template or system prompt holds all of any group."""
    scanner: Callable[[Sequence[Tool]], Scanner]
    styles: Callable[[str], list[CallStyle]]
    """Prompt -> styles it may be answered in, likeliest first."""
    openers: tuple[str, ...] = ()
    """Text before a call that is no content."""
    closers: tuple[str, ...] = ()
    """Text after a call that is no content, separators included."""
    reasoning: tuple[str, str] | None = None
    """What opens and ends a reasoning block, where the format itself has one."""
    headers: Callable[[Sequence[Tool]], harmony.HeaderFilter] | None = None
    """Takes out what stands around messages, where the format has that."""


FORMATS: dict[str, CallFormat] = {}


def register_format(call_format: CallFormat) -> CallFormat:
    """Make a format known; formats registered later are recognised first."""
    FORMATS[call_format.name] = call_format
    return call_format


def format_named(name: str) -> CallFormat:
    """Look a format up; raises UsageError listing them."""
    if name not in FORMATS:
        raise UsageError(f"Unknown call format {name!r}; choose one of {', '.join(sorted(FORMATS))}.")
    return FORMATS[name]


NO_SIGN = "nothing tells another one"


def detect_format(instructions: str) -> tuple[CallFormat, str]:
    """Return the format that a chat template, or a system prompt with tools in prose, asks for; and why."""
    for call_format in reversed(FORMATS.values()):
        for signs in call_format.signs:
            if all(sign in instructions for sign in signs):
                return call_format, f"it holds {' and '.join(map(repr, signs))}"
    return FORMATS["json"], NO_SIGN


def _objects(tools: Sequence[Tool]) -> Scanner:
    return CallScanner()


OPENERS = ("```json", "```tool_call", "```<tool_call>", "```", "<tool_call>", "{", "[")
CLOSERS = ("</tool_call>", "```", "}", "]", ",")
"""With the braces of models that write `{{"name": ..}}`, as Qwen2.5-Coder's template shows it, and of lists."""

register_format(CallFormat("json", "one JSON object, bare or fenced", (), _objects, default_styles, OPENERS, CLOSERS))
register_format(
    CallFormat(
        "hermes",
        "JSON in <tool_call> tags: Qwen2.5, Qwen3, Hermes; and API-Bank's prompted form",
        (("<tool_call>", '"arguments"'), ("<tool_call>", '"parameters"'), ("<tool_call>", "tool_calls")),
        _objects,
        default_styles,
        OPENERS,
        CLOSERS,
    )
)
register_format(
    CallFormat(
        "llama3_json",
        "JSON with `parameters`, calls separated by `;`: Llama 3.x",
        (("<|python_tag|>",), ('"parameters": dictionary of argument name and its value',)),
        _objects,
        lambda prompt: [
            object_style("", "", "; ", "parameters"),
            object_style("<|python_tag|>", "", "; ", "parameters"),
            *default_styles(prompt),
        ],
        ("<|python_tag|>", *OPENERS),
        (";", "<|eom_id|>", "<|eot_id|>", *CLOSERS),
    )
)
register_format(
    CallFormat(
        "mistral",
        "a JSON list after [TOOL_CALLS]: Mistral up to 2024",
        (("[TOOL_CALLS]",),),
        _objects,
        lambda prompt: [object_style("[TOOL_CALLS] [", "]", ", ", "arguments"),
                        object_style("[TOOL_CALLS][", "]", ", ", "arguments")],
        ("[TOOL_CALLS]", *OPENERS),
        CLOSERS,
    )
)  # fmt: skip
register_format(
    CallFormat(
        "granite",
        "a JSON list after <|tool_call|>: Granite 3",
        (("<|tool_call|>",), ("<tool_call>[",)),
        _objects,
        lambda prompt: [object_style("<|tool_call|>[", "]", ", ", "arguments"),
                        object_style("<tool_call>[", "]", ", ", "arguments")],
        ("<|tool_call|>", *OPENERS),
        CLOSERS,
    )
)  # fmt: skip
register_format(
    CallFormat(
        "phi",
        "a JSON list in <|tool_call|> tags or after functools: Phi-4-mini",
        (("<|/tool_call|>",), ("<|tool_call|>", "<|/tool|>")),
        _objects,
        lambda prompt: [object_style("<|tool_call|>[", "]<|/tool_call|>", ", ", "arguments"),
                        object_style("functools[", "]", ", ", "arguments")],
        ("<|tool_call|>", "functools", *OPENERS),
        ("<|/tool_call|>", *CLOSERS),
    )
)  # fmt: skip


def _headed_style(opening: str, head: str, gap: str, end: str, closing: str) -> CallStyle:
    """Style of `head name gap {arguments} end`; between two calls come `end` and no more."""
    return CallStyle(
        opening=opening, head=head, middle=f'{gap}{{"', colon='": ', comma=', "', tail="}", empty=f"{gap}{{}}",
        between=end, closing=end + closing,
    )  # fmt: skip


def _headed(
    name: str,
    about: str,
    head: Head,
    signs: Sequence[tuple[str, ...]],
    opening: str = "",
    end: str = "",
    closing: str = "",
    openers: Sequence[str] = (),
    closers: Sequence[str] = (),
    reasoning: tuple[str, str] | None = None,
    headers: Callable[[Sequence[Tool]], harmony.HeaderFilter] | None = None,
) -> None:
    register_format(
        CallFormat(
            name,
            about,
            tuple(signs),
            lambda tools: HeadedScanner(head, tools),
            lambda prompt: [_headed_style(opening, head.marker, head.gap, end, closing)],
            tuple(marker for marker in (opening, *openers) if marker),
            tuple(marker.strip() for marker in (end, closing, *closers) if marker.strip()),
            reasoning,
            headers,
        )
    )


_headed(
    "mistral_named",
    "[TOOL_CALLS]name[ARGS]{..}: Mistral since 2025",
    Head("[TOOL_CALLS]", "[ARGS]"),
    [("[ARGS]",)],
    openers=("[TOOL_CALLS]",),
)
_headed(
    "deepseek_v3", "name and fenced JSON between tool-call tokens: DeepSeek V3, R1",
    Head("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n"),
    [("<｜tool▁call▁begin｜>", "```json")],
    "<｜tool▁calls▁begin｜>", "\n```<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>", (), ("```", "<｜tool▁call▁end｜>"),
)  # fmt: skip
_headed(
    "kimi_k2", "functions.name:index between tool-call tokens: Kimi K2",
    Head("<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>"), [("<|tool_call_argument_begin|>",)],
    "<|tool_calls_section_begin|>", "<|tool_call_end|>", "<|tool_calls_section_end|>",
)  # fmt: skip
_headed(
    "harmony", "a message to functions.name on the commentary channel: gpt-oss",
    Head(harmony.CALL, harmony.CONSTRAINT), [("<|channel|>", "<|constrain|>")],
    "", "<|call|>", "",
    ("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>", "<|channel|>",
     "<|message|>"),
    ("<|start|>assistant", "<|end|>", "<|return|>"), ("<|channel|>analysis<|message|>", "<|end|>"),
    harmony.HeaderFilter,
)  # fmt: skip
_headed(
    "function_tag", "<function=name>{..}</function>: Llama 3.1's custom tools",
    Head("<function=", ">"), [("<function=", '{"'), ("<function=example_function_name>{",)],
    "", "</function>",
)  # fmt: skip


_headed(
    "deepseek_v31", "name and JSON between tool-call tokens: DeepSeek V3.1",
    Head("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    [("<｜tool▁call▁begin｜>' + tool['function']['name']",), ("<｜tool▁call▁begin｜>tool_call_name",)],
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>",
)  # fmt: skip


def _tagged(name: str, about: str, tags: Tags, signs: Sequence[tuple[str, ...]], opening: str, closing: str) -> None:
    style = CallStyle(
        opening=opening, head=tags.call, middle=tags.name_end + tags.key, colon=tags.value,
        comma=f"{tags.value_end}\n{tags.key}", tail=f"{tags.value_end}\n{tags.end}", empty=tags.name_end + tags.end,
        between=f"{closing}\n{opening}", closing=closing, values="raw",
    )  # fmt: skip
    register_format(
        CallFormat(
            name, about, tuple(signs), lambda tools: TagScanner(tags, tools), lambda prompt: [style],
            (opening.strip(),) if opening.strip() else (), (closing.strip(),) if closing.strip() else (),
        )
    )  # fmt: skip


_tagged(
    "qwen3_coder", "tags with one element an argument: Qwen3-Coder",
    Tags("<function=", ">\n", "<parameter=", ">\n", "\n</parameter>", "</function>"),
    [("<function=", "<parameter=")], "<tool_call>\n", "\n</tool_call>",
)  # fmt: skip
_tagged(
    "glm", "<arg_key> and <arg_value> pairs: GLM-4.5",
    Tags("<tool_call>", "\n", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "</tool_call>"),
    [("<arg_key>", "<arg_value>")], "", "",
)  # fmt: skip
register_format(
    CallFormat(
        "pythonic",
        "a list of Python calls: Llama 3.2 and 4",
        (("[func_name1(params_name1=params_value1",), ("<|python_start|>",)),
        PythonScanner,
        lambda prompt: [
            CallStyle(
                opening=opening, head="", middle="(", colon="=", comma=", ", tail=")", empty="()", between=", ",
                closing=closing, values="python",
            )
            for opening, closing in (("[", "]"), ("<|python_start|>[", "]<|python_end|>"), ("", ""))
        ],
        ("<|python_start|>", "["),
        ("<|python_end|>", "]", ","),
    )
)  # fmt: skip
