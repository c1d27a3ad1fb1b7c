"""Calls through real kinds of tokenizers: written, tokenized, streamed and drafted, they stay the same calls."""

from __future__ import annotations

import json
import re
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ooospec.chat.answer import AnswerStream
from ooospec.chat.codec import TextCodec
from ooospec.chat.formats.registry import FORMATS
from ooospec.core import Commit, FunctionHint, Hint, SlotHint
from ooospec.models.resolver import resolve_model
from ooospec.server.answers import source_runs
from scripted import write
from test_formats import ARGUMENTS, SAMPLES, TOOLS, TYPES, scan, written


def plain(text: str) -> str:
    """Make a text one that every tokenizer gives back as it was: normal form C, characters in use, none for a space."""
    known = "".join("?" if unicodedata.category(c) in ("Cc", "Cn", "Co", "Cs") and c != "\n" else c for c in text)
    return unicodedata.normalize("NFC", known).replace("▁", "_")


def representable(value):
    return json.loads(plain(json.dumps(value, ensure_ascii=False)))


SAID = ARGUMENTS.map(representable)
CALLS = st.lists(st.tuples(st.sampled_from(["get_weather", "other"]), SAID), min_size=1, max_size=2)
FAMILIES = [
    "sentencepiece, old",
    "sentencepiece",
    pytest.param("qwen2.5-coder-0.5b-instruct", marks=pytest.mark.models),
    pytest.param("smollm2-135m-instruct", marks=pytest.mark.models),
]
MARKERS = sorted({marker for text in SAMPLES.values() for marker in re.findall(r"<｜.*?｜>|<\|.*?\|>", text)})
SLOW_START = {"suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


def sentencepiece(old: bool) -> Tokenizer:
    """Train a tokenizer of the kind of Llama 2, Mistral, Gemma and Phi-3: "▁" for a space, one more at the start of a
    text (`old` = by the normalizer), bytes for what is not in the vocabulary."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    prepend = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.normalizer = prepend
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("▁", "merged_with_next"), pre_tokenizers.Punctuation(), pre_tokenizers.Digits(True)]
    )
    texts = [text.replace("\n", " ") for text in SAMPLES.values() if "▁" not in text] * 3
    made.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1200, special_tokens=special, show_progress=False))
    made.pre_tokenizer = None
    if not old:
        made.normalizer = None
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        made.add_special_tokens(MARKERS)
    return made


@pytest.fixture(scope="module", params=FAMILIES)
def real_codec(request) -> TextCodec:
    if request.param.startswith("sentencepiece"):
        return TextCodec(sentencepiece(old=request.param.endswith("old")), [2])
    made = Tokenizer.from_file(str(resolve_model(request.param) / "tokenizer.json"))
    return TextCodec(made, [made.token_to_id("<|im_end|>")])


@pytest.mark.models
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b-instruct", "smollm2-135m-instruct"])
def test_control_tokens_are_told_from_words(name):
    codec = TextCodec(Tokenizer.from_file(str(resolve_model(name) / "tokenizer.json")), [0])
    control = codec.control_ids(())
    assert {codec.encode("<|im_start|>")[0], codec.encode("<|im_end|>")[0]} <= control
    assert codec.control_ids(("<|im_end|>",)) == control - set(codec.encode("<|im_end|>"))
    assert not control & set(codec.encode('Weather in Oslo <b>now</b> {"name": "get_weather"}'))


def skip_unless_in(codec: TextCodec, text: str) -> None:
    """Skip what is never written in this vocabulary: "▁" where it stands for a space, harmony's markers in pieces."""
    if ("▁" in text and codec.decode(codec.encode(text)) != text) or (
        text.startswith("<|channel|>") and len(codec.encode("x<|channel|>")) > 4
    ):
        pytest.skip("the markers of this format are no tokens of this vocabulary")


def streamed(codec: TextCodec, ids, cuts) -> list[str]:
    """Decode ids in the groups that `cuts` make."""
    stream, bounds = codec.stream(), [0, *sorted(cuts), len(ids)]
    return [*(stream.push(ids[a:b]) for a, b in pairwise(bounds)), stream.flush()]


@pytest.mark.parametrize("name", list(FORMATS))
@settings(max_examples=25, **SLOW_START)
@given(data=st.data())
def test_a_call_is_the_same_behind_a_tokenizer_under_every_division(real_codec, name, data):
    call_format = FORMATS[name]
    calls = data.draw(CALLS)
    text = written(call_format, data.draw(st.sampled_from(call_format.styles(""))), calls)
    skip_unless_in(real_codec, text)
    ids = real_codec.encode(text)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=5))
    for division in ((), cuts, range(len(ids))):
        pieces = streamed(real_codec, ids, division)
        assert "".join(pieces) == text
        scanner, answer = call_format.scanner(TOOLS), AnswerStream(call_format, TOOLS, thinking=False, reasons=False)
        for piece in pieces:
            scanner.feed(piece)
            list(answer.push(piece))
        list(answer.close())
        assert [found[:2] for found in scanner.finished()] == calls == scan(call_format, text)
        assert [found[0] for found in answer.calls] == [called for called, _ in calls]


@pytest.mark.parametrize("name", list(FORMATS))
@settings(max_examples=8, **SLOW_START)
@given(arguments=SAID)
def test_a_right_hint_is_taken_over_whole(real_codec, name, arguments):
    """Drafts tokenize as the target does from wherever it stands, so a known call takes one round or two."""
    style = FORMATS[name].styles("")[0]
    text = written(FORMATS[name], style, [("get_weather", arguments)])
    skip_unless_in(real_codec, text)
    slots = {
        ("get_weather", slot): SlotHint("get_weather", slot, arguments.get(slot), slot in arguments, 0.99)
        for slot in TYPES
    }
    hint = Hint(FunctionHint(("get_weather",), (0.99,)), slots, complete=True)
    out, commits = write(real_codec, text, TOOLS, hint=hint, form=name, nodes=256)
    assert out == text
    # one round that opens the call, one for each stretch of as many tokens as a draft may have, one that ends it
    assert len(commits) <= 3 + len(real_codec.encode(text)) // 40


@settings(max_examples=200, **SLOW_START)
@given(st.text(max_size=20).map(plain), st.text(min_size=1, max_size=20).map(plain))
def test_continuations_read_on_from_any_text(real_codec, before, after):
    committed = real_codec.encode("x" + before)
    ids, starts = real_codec.continue_with(committed, after)
    assert len(ids) == len(starts)
    assert (
        real_codec.decode([*committed, *ids])
        == real_codec.decode(committed) + after.encode("utf-8", "replace").decode()
    )


def test_tokens_keep_their_space_inside_a_text(real_codec):
    text = "x Oslo in the north"
    ids = real_codec.encode(text)
    assert "".join(real_codec.decode_inside([token]) for token in ids).removeprefix(" ") == text
    texts = real_codec.token_texts()
    assert "".join(texts[token] for token in ids).removeprefix(" ") == text
    whole = "x São José 😀 漢字 ᚠ"
    assert b"".join(map(real_codec.token_bytes, real_codec.encode(whole))).decode().removeprefix(" ") == whole
    commit = Commit(tuple(ids), ("hint",) * len(ids), 0, 0.0, 0.0, 0.0, 0)
    assert source_runs(real_codec, commit)[0]["text"].removeprefix(" ") == text
