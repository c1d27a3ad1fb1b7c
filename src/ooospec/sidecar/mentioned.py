"""Whether a value stands in the dialogue: what an untrained sidecar is believed about optional slots."""

from __future__ import annotations

import json
import re
from typing import Any

_PIECE = re.compile(r'[^"\[\]{},:\s][^"\[\]{},]{2,}')
"""Runs of three or more characters between the punctuation of JSON."""


def is_mentioned(value: Any, dialogue: str) -> bool:
    """Tell whether a value stands in the dialogue, letters' case aside."""
    if isinstance(value, bool) or value is None:
        return False
    if isinstance(value, list):
        return bool(value) and all(is_mentioned(part, dialogue) for part in value)
    if isinstance(value, dict):
        return bool(value) and all(is_mentioned(part, dialogue) for part in value.values())
    text = value if isinstance(value, str) else json.dumps(value)
    return bool(text) and re.search(rf"(?<!\w){re.escape(text)}(?!\w)", dialogue, re.IGNORECASE) is not None


def may_be_mentioned(partial: str, dialogue: str) -> bool:
    """Tell whether the pieces of an unfinished answer all stand in the dialogue, so that the whole still may."""
    return all(piece.lower() in dialogue.lower() for piece in _PIECE.findall(partial))
