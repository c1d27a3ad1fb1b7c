"""Text to the target's token ids and back, on the `tokenizers` library alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence

from tokenizers import Encoding, Tokenizer

from ooospec.errors import UsageError

MAX_HELD_TOKENS = 8
"""Tokens that may wait for the rest of a character."""
TAIL_SIZES = ((8, 3), (3, 2), (1, 1))
"""Committed tokens re-encoded together with a continuation, how many of them must come out as they are; in order."""
ANCHOR = "\n"
"""Stands before a text that is encoded by itself: a tokenizer may put a space before what it takes for a start."""


def _byte_characters() -> dict[str, int]:
    """Map the characters that stand for bytes in byte-level vocabularies (GPT-2): printable ones for themselves."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTES = _byte_characters()


class TextCodec:
    """A tokenizer as drafting needs it: exact ids, no added specials, knowledge of where tokens start."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int]) -> None:
        if not eos_ids:
            raise UsageError("The model names no end-of-sequence id; set eos_token_id in its generation_config.json.")
        self._tokenizer = tokenizer
        self.eos_id = eos_ids[0]
        """The id that usually ends an answer."""
        self.eos_ids = frozenset(eos_ids)
        self.vocab_size = int(tokenizer.get_vocab_size(with_added_tokens=True))
        """Number of ids, added tokens included."""
        added = tokenizer.get_added_tokens_decoder()
        self._special = {index: str(token.content) for index, token in added.items() if token.special}
        self._anchor = self.encode(ANCHOR)[-1:]
        self._anchor_text = self.decode(self._anchor)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Encode text; special tokens in the text become their ids. `special` = add those the model begins with."""
        ids: list[int] = self._encode(text, special).ids
        return ids

    def _encode(self, text: str, special: bool = False) -> Encoding:
        clean = text.encode("utf-8", "replace").decode("utf-8")  # half a surrogate pair cannot be encoded
        return self._tokenizer.encode(clean, add_special_tokens=special)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; special tokens are kept as text."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    def control_ids(self, but: Collection[str]) -> frozenset[int]:
        """Return the ids of control tokens, but those of some texts."""
        return frozenset(index for index, text in self._special.items() if text not in but)

    def decode_inside(self, ids: Sequence[int]) -> str:
        """Decode ids as they read inside a text: some tokenizers drop a space with which a text begins."""
        return self.decode([*self._anchor, *ids])[len(self._anchor_text) :]

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character."""
        text = self.decode_inside([token])
        piece: str = self._tokenizer.id_to_token(token) or ""
        if "\ufffd" not in text:
            return text.encode()
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):
            return bytes([int(piece[3:5], 16)])
        return bytes(_BYTES[char] for char in piece) if _BYTES.keys() >= set(piece) else text.encode()

    def token_texts(self) -> list[str]:
        """Decode every id by itself, as it reads inside a text. [V]"""
        texts: list[str] = self._tokenizer.decode_batch(
            [[*self._anchor, i] for i in range(self.vocab_size)], skip_special_tokens=False
        )
        return [text[len(self._anchor_text) :] for text in texts]

    def stream(self) -> TextStream:
        """Start an incremental decoder."""
        return TextStream(self.decode)

    def continue_with(self, committed: Sequence[int], text: str) -> tuple[list[int], list[int]]:
        """Encode `text` as it would go on after the committed ids: (ids, index in `text` where each starts).

        The end of the committed text is encoded together with the continuation, so that the ids are those of the
        whole text wherever the boundary between the two is one between tokens too.
        """
        for size, same in TAIL_SIZES:
            tail = committed[-size:]
            found = self._encode_behind(self.decode(tail), list(tail[-same:]), text)
            if found is not None:
                return found
        found = self._encode_behind(ANCHOR, self._anchor, text)
        if found is not None:
            return found
        encoding = self._encode(text)
        return encoding.ids, [start for start, _ in encoding.offsets]

    def _encode_behind(self, before: str, last: list[int], text: str) -> tuple[list[int], list[int]] | None:
        """Encode `before + text` for the ids of `text`; None if no token starts there behind the ids `last`."""
        encoding = self._encode(before + text)
        starts = [start - len(before) for start, _ in encoding.offsets]
        at = next((i for i, start in enumerate(starts) if start >= 0), len(starts))
        if encoding.ids[max(0, at - len(last)) : at] != last:
            return None
        return encoding.ids[at:], starts[at:]


class TextStream:
    """Decode a growing output; text of an unfinished character is held back."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._before = 0  # ids decoded for context only
        self._read = 0  # ids whose text is out

    def push(self, ids: Iterable[int]) -> str:
        """Take more ids; return the new text."""
        return "".join(self._one(token) for token in ids)

    def flush(self) -> str:
        """Return the text of a character that was never finished."""
        known, text = self._decode(self._ids[self._before : self._read]), self._decode(self._ids[self._before :])
        self._before = self._read = len(self._ids)
        return text[len(known) :]

    def _one(self, token: int) -> str:
        self._ids.append(token)
        known = self._decode(self._ids[self._before : self._read])
        text = self._decode(self._ids[self._before :])
        if text.endswith("\ufffd") and len(self._ids) - self._read < MAX_HELD_TOKENS:
            return ""
        self._before, self._read = self._read, len(self._ids)
        return text[len(known) :]
