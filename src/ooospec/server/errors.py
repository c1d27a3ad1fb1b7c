"""Errors in OpenAI's shape."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ooospec.errors import ContextLengthError, ToolsError, UsageError

MAX_MESSAGE = 2000
_MESSAGE = re.compile(r"^Message (\d+):")
_FIRST_WORD = re.compile(r"^([a-z_]+)\b")
_FIELDS = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
        "logit_bias", "seed", "logprobs", "tool_choice", "response_format", "max_tokens", "stop", "messages",
    }
)  # fmt: skip


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", param: str | None = None,
        code: str | None = None, headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.message = message if len(message) <= MAX_MESSAGE else message[: MAX_MESSAGE - 1] + "…"
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """Give the error as OpenAI writes it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def as_api_error(error: Exception, param: str = "messages") -> ApiError:
    """Turn any exception into an answer; what nobody foresaw is a server error without its details.

    `param` = the field that holds the prompt.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), param=param, code="context_length_exceeded")
    if isinstance(error, ToolsError):
        return ApiError(400, str(error), param="tools")
    if isinstance(error, UsageError):
        if (message := _MESSAGE.match(str(error))) is not None:
            return ApiError(400, str(error), param=f"messages[{message[1]}]")
        found = _FIRST_WORD.match(str(error))
        field = found[1] if found is not None and found[1] in _FIELDS else None
        return ApiError(400, str(error), param=field)
    return ApiError(500, "The request failed inside the server; its log says why.", "server_error")


_WANTED = {
    "bool_type": "true or false", "int_type": "a whole number", "int_from_float": "a whole number",
    "float_type": "a number", "string_type": "text", "list_type": "a list", "dict_type": "an object",
    "model_attributes_type": "an object", "model_type": "an object",
}  # fmt: skip
"""What pydantic's kinds of wrong types ask for."""


def validation_error(problems: Sequence[dict[str, Any]], body: Any) -> ApiError:
    """Name the first place that is wrong, what was wanted, what came, and how many places there are."""
    if problems[0]["type"] == "json_invalid":
        why = problems[0].get("ctx", {}).get("error", problems[0]["msg"])
        return ApiError(400, f"The body is not JSON: {why}.")
    if body is None:
        return ApiError(400, "The body is empty; send a JSON object.")
    places: dict[str, list[dict[str, Any]]] = {}
    for problem in problems:
        places.setdefault(_place(problem, body), []).append(problem)
    first = next(iter(places))
    place = max((each for each in places if each.startswith(first)), key=len)  # of a union's branches the closest
    here = places[place]
    wanted = list(dict.fromkeys(_WANTED.get(problem["type"], "") for problem in here))
    if all(wanted):
        text = f"must be {' or '.join(wanted)}"
    else:
        other = next(problem for problem in here if problem["type"] not in _WANTED)
        text = str(other["msg"]).removeprefix("Value error, ").replace("Input should", "should").rstrip(".")
    came = here[0]["input"]
    shown = "" if here[0]["type"] == "missing" or isinstance(came, dict | list | bytes) else f"; got {_shown(came)}"
    kind = (
        f"; got {'an object' if isinstance(came, dict) else 'a list'}"
        if isinstance(came, dict | list) and all(wanted)
        else ""
    )
    more = f" ({len(places)} places are wrong in all)" if len(places) > 1 else ""
    return ApiError(400, f"{place or 'The body'}: {text}{shown}{kind}.{more}", param=place or None)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _place(problem: dict[str, Any], body: Any) -> str:
    """Write where a problem is, without pydantic's names for the branches of unions."""
    place, at = "", body
    for part in problem["loc"][1:]:
        inside = isinstance(at, dict) and (part in at or problem["type"] == "missing")
        if isinstance(part, int) and isinstance(at, list) and part < len(at):
            place, at = f"{place}[{part}]", at[part]
        elif inside:
            place, at = f"{place}.{part}" if place else str(part), at.get(part)
    return place
