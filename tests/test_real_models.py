"""The embedded models, for real: fetched, converted, decoded with a live sidecar."""

from __future__ import annotations

import os
import signal
import time

import pytest

from ooospec.bench.compare import compare
from ooospec.bench.datasets import BenchRequest
from ooospec.config import DEFAULT_SIDECAR, DEFAULT_TARGET
from ooospec.demo.examples import TOOLS, examples
from ooospec.runtime import Decoder

pytestmark = pytest.mark.models


@pytest.fixture(scope="module")
def small():
    """SmolLM2-135M in float32, where outputs must be equal to the last token, beside the default sidecar."""
    with Decoder("smollm2-135m-instruct", DEFAULT_SIDECAR, dtype="float32", device="cpu") as decoder:
        yield decoder


def test_all_methods_are_identical_in_float32(small):
    for request in examples():
        compared = compare(small, request, ["ar", "lookup", "toolspec", "ooo"], max_new_tokens=48)
        assert compared.divergences == {}
    assert small.warnings == {}


def test_sampling_is_identical_for_one_seed(small):
    request = examples()[0]
    outputs = {
        small.generate(
            list(request.messages), request.tools, method=m, temperature=0.8, seed=5, max_new_tokens=40
        ).output_ids
        for m in ("ar", "toolspec", "ooo")
    }
    assert len(outputs) == 1


def test_killing_the_sidecar_in_mid_wave_costs_speed_only(small):
    request = examples()[1]
    options = {"max_new_tokens": 40}
    expected = small.generate(list(request.messages), request.tools, method="ar", **options).output_ids
    commits = small.stream(list(request.messages), request.tools, **options)
    tokens = list(next(commits).tokens)
    os.kill(small._client._process.pid, signal.SIGKILL)
    tokens += [token for commit in commits for token in commit.tokens]
    assert tuple(tokens) == expected
    assert small.generate(list(request.messages), request.tools, **options).output_ids == expected
    assert small.warnings["restarted"] >= 1


def test_the_default_pair_answers_with_the_right_call():
    """The default target in bfloat16: a difference must be a rounding tie, and the hint must save rounds."""
    email = next(r for r in examples() if "email" in r.id)
    with Decoder(DEFAULT_TARGET, DEFAULT_SIDECAR, device="cpu") as decoder:
        warm_up = BenchRequest("warm", ({"role": "user", "content": "Search the web for ferries."},), TOOLS)
        for method in ("toolspec", "ooo"):
            decoder.generate(list(warm_up.messages), TOOLS, method=method, max_new_tokens=40)
        compared = compare(decoder, email, ["ar", "toolspec", "ooo"], max_new_tokens=100, prefix="warm")
        ooo = compared.results["ooo"]
        assert all(d.is_tie for d in compared.divergences.values())
        assert ooo.calls[0].name == "send_email"
        assert ooo.calls[0].arguments["to"] == "maria.lopez@example.com"
        assert ooo.num_rounds < compared.results["toolspec"].num_rounds < compared.results["ar"].num_rounds
        assert ooo.hint is not None
        assert ooo.hint.slots["to"] == "maria.lopez@example.com"
        pid = decoder._client._process.pid
    time.sleep(0.2)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
