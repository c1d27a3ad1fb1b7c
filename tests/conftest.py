"""Tiny random models and a byte-level tokenizer; everything deterministic on the CPU."""

from __future__ import annotations

import json
import string

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from ooospec.chat.codec import TextCodec
from ooospec.target.loading import LoadedModel

settings.register_profile("untimed", deadline=None)  # what is slow on a busy machine is no fault
settings.load_profile("untimed")

FAMILIES = ("llama", "qwen2", "qwen3")
CHAT_TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}<|assistant|>"
)


def byte_tokenizer() -> Tokenizer:
    """All 256 bytes, some merges of call text, and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    merges = []
    for pair in ('"n', "am", 'e"', '":', 'Ġ"', '{"', '"}', "}}", "th", "er", "in", "on", "to", "ke"):
        left, right = pair[0], pair[1]
        merges.append((left, right))
        vocab[pair] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|eos|>", "<|end|>"])
    return tokenizer


def tiny_model(family: str, seed: int = 0, vocab: int | None = None, **extra: object) -> torch.nn.Module:
    """A random model of 2 layers and width 64 whose greedy output does not collapse into one token."""
    torch.manual_seed(seed)
    vocab = vocab or byte_tokenizer().get_vocab_size() + 6
    config = AutoConfig.for_model(
        family, vocab_size=vocab, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, initializer_range=0.15, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, **({"head_dim": 32} if family == "qwen3" else {}), **extra,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32).eval()


def load_tiny(family: str, seed: int = 0) -> LoadedModel:
    """A tiny model with its tokenizer, as `load_model` would return it."""
    tokenizer = byte_tokenizer()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|eos|>")
    wrapped.chat_template = CHAT_TEMPLATE
    model = tiny_model(family, seed)
    eos = [tokenizer.token_to_id("<|eos|>"), tokenizer.token_to_id("<|end|>")]
    model.generation_config.eos_token_id = eos
    return LoadedModel(f"tiny-{family}", model, wrapped, TextCodec(tokenizer, eos), "float32", "cpu")


@pytest.fixture(scope="session", autouse=True)
def _two_threads():
    torch.set_num_threads(2)


@pytest.fixture(autouse=True)
def _no_faults(request, caplog):
    """The engine goes on when a proposer fails; a test must not, unless it is about that."""
    yield
    if "faulty" not in request.keywords:
        assert [r for r in caplog.get_records("call") if r.name == "ooospec.engine"] == []


@pytest.fixture(scope="session", params=FAMILIES)
def tiny(request) -> LoadedModel:
    return load_tiny(request.param)


@pytest.fixture(scope="session")
def tiny_llama() -> LoadedModel:
    return load_tiny("llama")


@pytest.fixture(scope="session")
def folder_of_tiny(tmp_path_factory):
    """A tiny model saved as transformers saves models."""
    path = tmp_path_factory.mktemp("model")
    loaded = load_tiny("llama")
    loaded.model.save_pretrained(path)
    loaded.tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def codec() -> TextCodec:
    tokenizer = byte_tokenizer()
    return TextCodec(tokenizer, [tokenizer.token_to_id("<|eos|>"), tokenizer.token_to_id("<|end|>")])


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a place",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "days": {"type": "integer"},
            },
            "required": ["city"],
        },
    },
}
SEARCH = {
    "type": "function",
    "function": {
        "name": "web_search",
        "description": "Search",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}


@pytest.fixture
def tools() -> list[dict]:
    return [WEATHER, SEARCH]


LETTERS = string.ascii_letters


@pytest.fixture
def scripted_decoder():
    """A decoder whose target writes what the prompt's last key word says."""
    from ooospec.runtime import Decoder
    from served import ByPrompt

    loaded = load_tiny("llama")
    with Decoder(loaded, None, budget="fixed", prefix_cache_bytes=0) as made:
        made.target = ByPrompt(loaded.codec)
        yield made


@pytest.fixture
def client(scripted_decoder):
    """The server around it, without a network."""
    from fastapi.testclient import TestClient

    from ooospec.server.app import ServerSettings, create_app

    with TestClient(create_app(scripted_decoder, ServerSettings(("tiny", "alias")))) as made:
        yield made


ALPACA = {
    "Name": "Weather API",
    "Function_Description": {
        "get_weather": 'Weather of a place.\nParameters: {"city": "Required. string. The city.", "unit": "string. '
        'One of: [celsius, fahrenheit]. Unit.", "days": "integer. How many. Really.", "tags": "Array[string].", '
        '"more": "Object{a: string, b: integer}. Extra."}\nOutput: ok.',
        "components": "",
    },
    "Instructions": ["Weather in Oslo?", "And then?"],
    "Golden_Answers": [
        [{"Action": "get_weather", "Action_Input": '{"city": "Oslo", "unit": ""}'}],
        [{"Action": "[Optional]get_weather", "Action_Input": '{"city": ${name from search}}'}],
    ],
}


@pytest.fixture
def data(tmp_path):
    """Six BFCL requests, two of ToolAlpaca, three of API-Bank in the files' own forms."""
    bfcl = tmp_path / "bfcl"
    (bfcl / "possible_answer").mkdir(parents=True)
    tools = [{**WEATHER["function"], "parameters": {**WEATHER["function"]["parameters"], "type": "dict"}}]
    rows = [
        {"id": f"simple_python_{i}", "question": [[{"role": "user", "content": f"Weather {i}?"}]], "function": tools}
        for i in range(4)
    ]
    (bfcl / "BFCL_v4_simple_python.json").write_text("\n".join(map(json.dumps, rows)))
    gold = [{"id": r["id"], "ground_truth": [{"get_weather": {"city": ["Oslo", "oslo"]}}]} for r in rows]
    (bfcl / "possible_answer" / "BFCL_v4_simple_python.json").write_text("\n".join(map(json.dumps, gold)))
    odd = [{**row, "id": f"irrelevance_{i}"} for i, row in enumerate(rows[:2])]
    (bfcl / "BFCL_v4_irrelevance.json").write_text("\n".join(map(json.dumps, odd)))
    alpaca = tmp_path / "toolalpaca"
    alpaca.mkdir()
    (alpaca / "eval_simulated.json").write_text(json.dumps([ALPACA]))
    bank = tmp_path / "api_bank"
    bank.mkdir()
    answer = {"name": "get_weather", "parameters": {"city": "Oslo"}}
    for level, given in ((1, [answer]), (2, answer), (3, [answer])):
        row = {"system": "You may use tools.", "user": "Weather?", "answer": given}
        (bank / f"level-{level}-api_processed.json").write_text(json.dumps([row]))
    return tmp_path
