"""A handful of everyday requests with e-mail, calendar, weather and search tools."""

from __future__ import annotations

from typing import Any

from ooospec.bench.datasets import BenchRequest


def _tool(name: str, description: str, required: tuple[str, ...], **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


TOOLS = [
    _tool(
        "send_email", "Send an e-mail.", ("to", "subject", "body"),
        to=_text("Recipient's address"), subject=_text("Subject line"), body=_text("Text of the message"),
    ),
    _tool(
        "create_event", "Put an event into the calendar.", ("title", "date", "start_time", "duration_minutes"),
        title=_text("Title of the event"), date=_text("Date, YYYY-MM-DD"), start_time=_text("Start, HH:MM, 24 hours"),
        duration_minutes={"type": "integer", "description": "Length in minutes"},
        location=_text("Where it takes place"),
    ),
    _tool(
        "get_weather", "Get the weather forecast of a place.", ("city",),
        city=_text("City"), unit={"type": "string", "enum": ["celsius", "fahrenheit"], "description": "Unit"},
        days={"type": "integer", "description": "Number of days"},
    ),
    _tool(
        "web_search", "Search the web.", ("query",),
        query=_text("What to search for"), max_results={"type": "integer", "description": "Number of results"},
    ),
]  # fmt: skip

_QUESTIONS = {
    "weather": "What will the weather be like in Reykjavik over the next 3 days, in celsius?",
    "calendar": 'Schedule "Quarterly budget review" on 2026-03-17 at 14:30 for 45 minutes in room Neptune.',
    "email": (
        "Send an e-mail to maria.lopez@example.com with the subject 'Contract renewal' saying "
        "'The signed contract is attached. Please confirm by Friday.'"
    ),
    "search": 'Search the web for "lossless speculative decoding with tree attention" and give me 5 results.',
}


def examples() -> list[BenchRequest]:
    """Return the requests that need no data folder."""
    return [
        BenchRequest(f"example-{name}", ({"role": "user", "content": question},), TOOLS)
        for name, question in _QUESTIONS.items()
    ]
