"""Errors in OpenAI's shape."""

from __future__ import annotations

import re
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


def as_api_error(error: Exception) -> ApiError:
    """Turn any exception into an answer; what nobody foresaw is a server error without its details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return ApiError(400, str(error), param="messages", code="context_length_exceeded")
    if isinstance(error, ToolsError):
        return ApiError(400, str(error), param="tools")
    if isinstance(error, UsageError):
        if (message := _MESSAGE.match(str(error))) is not None:
            return ApiError(400, str(error), param=f"messages[{message[1]}]")
        found = _FIRST_WORD.match(str(error))
        param = found[1] if found is not None and found[1] in _FIELDS else None
        return ApiError(400, str(error), param=param)
    return ApiError(500, "The request failed inside the server; its log says why.", "server_error")
