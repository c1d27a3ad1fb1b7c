"""Request bodies: what is read, what is refused, and what the decoder is told."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    StrictBool,
    StrictInt,
    StrictStr,
    model_validator,
)

from ooospec.methods import served_methods
from ooospec.server.errors import ApiError

MAX_TOOLS = 1024
MAX_SCHEMA_DEPTH = 64
MAX_CHOICES = 8
SAMPLING_FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
)  # fmt: skip


Stop = Annotated[StrictStr, Field(min_length=1, max_length=256)]
Number = Annotated[float, Strict()]
"""Also a whole one; neither true nor text."""


def _listed(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("must be text or a list of texts")
    return [value] if isinstance(value, str) else value


class StreamOptions(BaseModel):
    """Options of a streamed answer."""

    include_usage: StrictBool = False


class Prediction(BaseModel):
    """A draft that the client gives: text the answer will probably contain."""

    type: Literal["content"] = "content"
    content: StrictStr | list[dict[str, Any]]

    def text(self) -> str:
        """Join the parts."""
        if isinstance(self.content, str):
            return self.content
        return "".join(str(part.get("text", "")) for part in self.content)


class Body(BaseModel):
    """What both kinds of request have in common. Unknown fields are ignored, as most servers do."""

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def whole_characters(cls, value: Any) -> Any:
        """Refuse what is no JSON object, and half surrogate pairs: no answer could repeat them. null = left out."""
        if isinstance(value, bytes):
            raise ValueError("the body must be sent as JSON, with the header Content-Type: application/json")
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("the text holds half of a surrogate pair, which is no character") from None
        except RecursionError:
            raise ValueError("the body is nested too deeply") from None
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value

    model: StrictStr
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    max_tokens: StrictInt | None = Field(None, ge=1)
    n: StrictInt = Field(1, ge=1, le=MAX_CHOICES)
    stop: Annotated[list[Stop] | None, Field(max_length=16), BeforeValidator(_listed)] = None
    include_stop_str_in_output: StrictBool = False
    skip_special_tokens: StrictBool = True
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    seed: StrictInt | None = None
    prediction: Prediction | None = None
    cache_salt: Annotated[StrictStr, Field(max_length=1024)] | None = None
    speculative: StrictBool | dict[str, Any] | None = None

    def decoder_options(self) -> dict[str, Any]:
        """Return the options of `Decoder.request` that both kinds share."""
        options: dict[str, Any] = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        options = {name: value for name, value in options.items() if value is not None}
        if self.logit_bias:
            options["logit_bias"] = {_token(key): value for key, value in self.logit_bias.items()}
        if self.stop:
            options["stop"] = self.stop
        if not self.skip_special_tokens:
            options["skip_special_tokens"] = False
        return {**options, **speculation(self.speculative)}


class ChatBody(Body):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = Field(None, min_length=1, max_length=MAX_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: StrictBool = True
    response_format: Any = None
    max_completion_tokens: StrictInt | None = Field(None, ge=1)
    logprobs: StrictBool = False
    top_logprobs: StrictInt | None = Field(None, ge=0, le=20)
    functions: Any = None
    function_call: Any = None

    def options(self) -> dict[str, Any]:
        """Return the options of `Decoder.request`."""
        if self.functions or self.function_call not in (None, "none", "auto"):
            given = "functions" if self.functions else "function_call"
            text = f"{given} is OpenAI's older form and not supported; use tools and tool_choice."
            raise ApiError(400, text, param=given)
        check_tools(self.tools)
        options = self.decoder_options()
        for name in ("tool_choice", "parallel_tool_calls", "response_format"):
            options[name] = getattr(self, name)
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
        if self.logprobs:
            options["logprobs"] = self.top_logprobs or 0
        limit = self.max_completion_tokens or self.max_tokens
        return {**options, **({"max_new_tokens": limit} if limit else {})}


class CompletionBody(Body):
    """POST /v1/completions."""

    prompt: StrictStr | list[Any]
    echo: StrictBool = False
    logprobs: StrictInt | None = Field(None, ge=0, le=20)
    suffix: StrictStr | None = None
    best_of: StrictInt | None = None

    def options(self) -> dict[str, Any]:
        """Return the options of `Decoder.request`."""
        if self.suffix:
            raise ApiError(400, "suffix is not supported; leave it out.", param="suffix")
        if self.best_of not in (None, self.n):
            raise ApiError(400, f"best_of other than n is not supported; got {self.best_of}.", param="best_of")
        options = self.decoder_options()
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
        return {**options, "max_new_tokens": self.max_tokens or 16}

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(isinstance(part, int) and not isinstance(part, bool) for part in self.prompt):
            return [list(self.prompt)]
        parts: list[str | list[int]] = []
        for index, part in enumerate(self.prompt):
            ids = isinstance(part, list) and part and all(isinstance(t, int) for t in part)
            if not (isinstance(part, str) or ids):
                raise ApiError(400, f"prompt[{index}] must be text or a list of token ids.", param="prompt")
            parts.append(part)
        if not parts or len(parts) > MAX_CHOICES:
            raise ApiError(400, f"prompt must hold 1 to {MAX_CHOICES} prompts; got {len(parts)}.", param="prompt")
        return parts


def _token(key: str) -> int:
    if not key.isdecimal() or len(key) > 9:
        raise ApiError(400, f"logit_bias must map token ids to numbers; got the key {key[:50]!r}.", param="logit_bias")
    return int(key)


def speculation(value: Any) -> dict[str, Any]:
    """Read `speculative`: false = plain decoding; {"method": NAME, "max_nodes": N} = a method and its bound."""
    if value is None or value is True:
        return {}
    if value is False:
        return {"method": "ar"}
    known = {"method": str, "max_nodes": int}
    wrong = [key for key in value if key not in known or not isinstance(value[key], known[key])]
    allowed = served_methods()
    if wrong or value.get("method", "ooo") not in allowed or not 1 <= value.get("max_nodes", 1) <= 512:
        raise ApiError(
            400,
            f'speculative must be false, or an object with "method" (one of {", ".join(allowed)}) and "max_nodes" '
            f"(1 to 512); got {str(value)[:200]}.",
            param="speculative",
        )
    return dict(value)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a fault in a tool list is."""

    index: int

    def error(self, text: str, part: str) -> ApiError:
        return ApiError(400, f"Tool {self.index}: {text}", param=f"tools[{self.index}].{part}")


def check_tools(tools: list[dict[str, Any]] | None) -> None:
    """Refuse what is no function or no object schema, naming the first place and how many there are."""
    faults = [fault for index, tool in enumerate(tools or []) if (fault := _tool_fault(_Place(index), tool))]
    if faults:
        if len(faults) > 1:
            faults[0].message += f" ({len(faults)} tools are wrong in all)"
        raise faults[0]
    names = [tool["function"]["name"] for tool in tools or []]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ApiError(400, f"Two tools are named {twice!r}; give each a name of its own.", param="tools")


def _tool_fault(place: _Place, tool: dict[str, Any]) -> ApiError | None:
    """Say what is wrong with a tool, if anything."""
    if tool.get("type") != "function":
        return place.error(f'type must be "function"; got {str(tool.get("type"))[:50]!r}.', "type")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return place.error("function must be an object with a name.", "function")
    name = function.get("name")
    if not isinstance(name, str) or not name or len(name) > 256:
        return place.error("name must be text of 1 to 256 characters.", "function.name")
    parameters = function.get("parameters")
    fault = _schema_fault(parameters) if parameters is not None else ""
    return place.error(fault, "function.parameters") if fault else None


def _schema_fault(parameters: Any) -> str:
    """Say why this is no schema of a function's parameters; "" if it is one."""
    if not isinstance(parameters, Mapping):
        return f"parameters must be a JSON Schema object; got {type(parameters).__name__}."
    kind = parameters.get("type", "object")
    if kind not in ("object", "dict"):
        return f'parameters must have type "object"; got {str(kind)[:50]!r}.'
    properties, required = parameters.get("properties"), parameters.get("required")
    if not isinstance(properties, Mapping | None):
        return f"properties must be an object; got {type(properties).__name__}."
    if not isinstance(required, list | bool | None):  # true and false: some write JSON Schema's draft 3
        return f"required must be a list of names; got {type(required).__name__}."
    wrong = next((name for name, schema in (properties or {}).items() if not isinstance(schema, Mapping | bool)), None)
    if wrong is not None:
        return f"property {str(wrong)[:50]!r} must have a schema; got {type((properties or {})[wrong]).__name__}."
    if _deeper_than(parameters, MAX_SCHEMA_DEPTH):
        return f"parameters are nested deeper than {MAX_SCHEMA_DEPTH} levels."
    return ""


def _deeper_than(value: Any, depth: int) -> bool:
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, Mapping) else outer if isinstance(outer, list) else ())
            if isinstance(inner, Mapping | list)
        ]
        if not level:
            return False
    return True
