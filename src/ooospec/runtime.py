"""Put the pieces together: load a target, start a sidecar, decode requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch

from ooospec.chat.formats.registry import format_named
from ooospec.chat.template import check_messages, render
from ooospec.config import AUTO, DEFAULT_SIDECAR, DEFAULT_TARGET, SMALLER, cache_dir, default_sidecar_pays
from ooospec.constraint import Grammars
from ooospec.core import Commit, common_prefix
from ooospec.errors import UsageError
from ooospec.generation import Generation
from ooospec.memory import Memory
from ooospec.methods import method_named
from ooospec.models.progress import Progress, Silent
from ooospec.models.resolver import resolve_model
from ooospec.placement import Placement
from ooospec.planner import check_policy
from ooospec.request import Request
from ooospec.sidecar.adapter import find_adapter, is_named
from ooospec.sidecar.client import SidecarClient
from ooospec.sidecar.mailbox import Mailbox
from ooospec.sidecar.process import SidecarProcess, SidecarSpec
from ooospec.sidecar.prompt import NEUTRAL_DIALOGUE
from ooospec.sidecar.quantize import load_sidecar
from ooospec.target.cost import CostCurve, cached_cost, cost_key
from ooospec.target.draft import DraftModel
from ooospec.target.loading import (
    LoadedModel,
    check_adapter,
    chosen_dtype,
    load_model,
    parse_device,
    stored_weights,
)
from ooospec.target.model import TargetModel
from ooospec.target.packing import is_packed, pack
from ooospec.target.prefix_cache import PrefixCache

READY_TIMEOUT_S = 120.0
TURN_S = 2.5
"""Longest time that a target which shares its cores waits for the sidecar's wave."""
CHUNK_BUSY, CHUNK_IDLE = 64, 512
"""Prompt tokens per prefill pass while the sidecar works on cores that the target will take back, and otherwise."""
LAST_CHUNK = 8
"""Prompt tokens left for the pass of the first tree while a hint is expected, so that it can still come in time."""


class Decoder:
    """A target with a sidecar beside it. Decodes one request at a time.

    `target` and `sidecar` are model names (see `resolve_model`); a sidecar `tcp://host:port` attaches to a running
    one, "auto" is the default one unless it is too large to pay (`left_out` says so), and None goes without.
    `adapter` is the folder of a trained adapter for the sidecar, "auto" for the one that ships for it, or None. Use it
    as a context manager, or call `close`.
    """

    def __init__(
        self,
        target: str | LoadedModel = DEFAULT_TARGET,
        sidecar: str | None = AUTO,
        *,
        adapter: str | None = AUTO,
        sidecar_dtype: str = AUTO,
        dtype: str = AUTO,
        device: str | None = None,
        placement: Placement | None = None,
        draft: str | None = None,
        draft_optional: bool = False,
        max_nodes: int | None = None,
        budget: str = "measured",
        call_format: str | None = None,
        prefix_cache_bytes: int = 1 << 30,
        progress: Progress | None = None,
    ) -> None:
        progress = progress or Silent()
        device = parse_device(device)
        chosen_dtype(dtype, device)
        check_policy(budget)
        self.call_format = format_named(call_format).name if call_format is not None else None
        self.placement = placement or Placement.shared()
        self.left_out = ""
        """Why the default sidecar is not used; empty if it is, or if another was chosen."""
        if sidecar == AUTO:
            sidecar = DEFAULT_SIDECAR if is_named(adapter) else self._default_sidecar(target, device, progress)
        adapter = find_adapter(adapter, sidecar or "")
        check_adapter(adapter)
        if adapter and (sidecar is None or "://" in sidecar):
            given = "there is none" if sidecar is None else f"the one at {sidecar} has its own settings"
            raise UsageError(f"An adapter belongs to a sidecar started here, and {given}; leave the adapter out.")
        self._client: SidecarClient | None = None
        self._warm: tuple[tuple[str, list[int]], list[PrefixCache]] | None = None
        self._mailbox: Mailbox | None = None
        self._active: Request | None = None
        if sidecar is not None:
            self._client = self._reach(sidecar, adapter, sidecar_dtype, progress)
        self.memories: dict[str, Memory] = {}
        self.faults: Counter[str] = Counter()
        self._grammars: Grammars | None = None
        self.default_method = "ooo"
        """Method of requests that name none."""
        try:
            self.placement.apply()
            self.loaded = self._load(target, dtype, device, progress)
            self.target = TargetModel(self.loaded.model)
            self.draft = self._load_draft(draft, draft_optional, progress) if draft is not None else None
            for model in self._models():
                model.prefix_cache = PrefixCache(prefix_cache_bytes) if prefix_cache_bytes else None
            if self._client is not None:  # before anything is timed: a sidecar that still loads uses the cores
                progress.update("start sidecar", 0, 1)
                self._client.wait_ready(READY_TIMEOUT_S)
                progress.update("start sidecar", 1, 1)
            self.max_nodes, self.budget = max_nodes, budget
            self.cost = self._measure(progress) if budget == "measured" else None
            for model in self._models():
                model.threads = self._threads if self.loaded.device == "cpu" else None
        except BaseException:
            self.close()
            raise

    def _default_sidecar(self, target: str | LoadedModel, device: str, progress: Progress) -> str | None:
        """Name the default sidecar; None where its waves would cost more than they save."""
        if isinstance(target, LoadedModel):
            device = target.device
        if device != "cpu" or self.placement.target_busy:
            return DEFAULT_SIDECAR
        if isinstance(target, LoadedModel):
            size = target.model.num_parameters()
        else:
            size = stored_weights(resolve_model(target, progress))
        if default_sidecar_pays(size):
            return DEFAULT_SIDECAR
        self.left_out = (
            f"No sidecar: {DEFAULT_SIDECAR} has more than 1/{SMALLER} of the target's weights, and on cores that both "
            "share its waves would take longer than they save; name a sidecar to use one all the same."
        )
        return None

    @staticmethod
    def _load(target: str | LoadedModel, dtype: str, device: str | None, progress: Progress) -> LoadedModel:
        if isinstance(target, LoadedModel):
            return target
        path = resolve_model(target, progress)
        progress.update(f"load {target}", 0, 1)
        loaded = load_model(path, target, dtype, device)
        pack(loaded.model)
        progress.update(f"load {target}", 1, 1)
        return loaded

    def _reach(self, sidecar: str, adapter: str | None, dtype: str, progress: Progress) -> SidecarClient:
        if "://" in sidecar:  # on other cores than the target's
            self.placement = replace(self.placement, target_busy=self.placement.target_idle)
            return SidecarClient(address=sidecar)
        path = resolve_model(sidecar, progress)
        place = self.placement
        spec = SidecarSpec(path, sidecar, adapter, dtype, threads=place.sidecar, cores=place.sidecar_cores)
        return SidecarClient(process=SidecarProcess(spec))

    def _load_draft(self, name: str, optional: bool, progress: Progress) -> DraftModel | None:
        """Load the draft model; None for an `optional` one that does not fit the target."""
        if name == self.loaded.name and optional:
            return None
        path = resolve_model(name, progress)
        progress.update(f"load {name}", 0, 1)
        loaded = load_sidecar(path, name, "auto", self.loaded.device, None)  # its precision changes no output either
        progress.update(f"load {name}", 1, 1)
        try:
            return DraftModel(loaded, self.loaded)
        except UsageError:
            if not optional:
                raise
            return None

    def _models(self) -> list[TargetModel]:
        """List the models that keep a prefix: the target, and the draft model if there is one."""
        return [self.target] if self.draft is None else [self.target, self.draft.model]

    def _measure(self, progress: Progress) -> CostCurve:
        loaded = self.loaded
        key = cost_key(loaded.name, loaded.dtype, loaded.device, is_packed(loaded.model))
        file = cache_dir() / "cost_curves.json"

        def report(done: int, total: int) -> None:
            progress.update("measure verify cost", done, total)

        return cached_cost(file, key, self.target, report)

    def _threads(self) -> int:
        mailbox = self._mailbox
        if mailbox is None or not self.placement.target_busy:
            return self.placement.target_idle
        mailbox.poll()
        return self.placement.target_busy if mailbox.working else self.placement.target_idle

    def _take_turns(self, mailbox: Mailbox | None) -> None:
        """On cores that target and sidecar share by turns, let the sidecar finish first, then stop it."""
        if mailbox is not None and self.by_turns:
            mailbox.take_turn(TURN_S, self._active.check if self._active is not None else None)

    @property
    def by_turns(self) -> bool:
        """Tell whether the target waits while the sidecar works."""
        return not self.placement.target_busy and self.loaded.device == "cpu"

    def _next_chunk(self, left: int) -> int:
        """Say how many of the prompt tokens left to prefill before the next look into the mailbox."""
        if self._active is not None:
            self._active.check()
        if self._mailbox is None or not self._mailbox.working or left <= CHUNK_BUSY:
            return CHUNK_IDLE if left > CHUNK_IDLE else 0
        takes_back = self.loaded.device == "cpu" and self._threads() < self.placement.target_idle
        return min(CHUNK_BUSY if takes_back else CHUNK_IDLE, left - LAST_CHUNK)  # leave some for the first tree's pass

    # ------------------------------------------------------------------ requests

    def stream(self, messages: Any, tools: Any = None, **options: Any) -> Iterator[Commit]:
        """Decode a request and yield its commits; options as in `generate`."""
        yield from Request(self, messages, tools, **options).run()

    def generate(self, messages: Any, tools: Any = None, *, prefix: str = "auto", **options: Any) -> Generation:
        """Decode a request to its end.

        Options: method (a name of `ooospec.methods.METHODS`), max_new_tokens, those of `ooospec.sampling.Sampling`
        (temperature, top_p, top_k, min_p, penalties, logit_bias, seed, logprobs; default: greedy), stop (strings),
        salt (prefix caches of different salts never meet), hint (a Hint to use instead of the sidecar), memory (a
        Memory instead of the method's own), tool_choice, parallel_tool_calls and response_format as in OpenAI's API,
        prediction (text that the output will probably contain), skip_special_tokens (default: without
        tools, control tokens are not in the text), max_nodes (bound of the candidate tree), budget
        ("measured": only nodes that pay by the measured cost curve; "fixed": the method's published tree size).
        `prefix` sets the condition for measurements: "cold" uses no KV entries of earlier requests, "warm" exactly
        those of the tools and the system prompt, prefilled before the clock starts; both leave the cache as it was.
        Raises UsageError for input that cannot be decoded; a failing sidecar never raises.
        """
        if prefix not in ("auto", "cold", "warm"):
            raise UsageError(f"prefix must be auto, cold or warm; got {prefix!r}.")
        kept = [model.prefix_cache for model in self._models()]
        try:
            if prefix == "cold":
                for model in self._models():
                    model.prefix_cache = None
            elif prefix == "warm":
                self._warm_prefix(messages, tools, **options)
            request = Request(self, messages, tools, fresh=prefix == "cold", **options)
            for _ in request.run():
                pass
            return request.result()
        finally:
            for model, cache in zip(self._models(), kept, strict=True):
                model.prefix_cache = cache

    def _warm_prefix(self, messages: Any, tools: Any, **options: Any) -> None:
        """Prefill what other requests with these tools and this system prompt share, on the sidecar's side too."""
        other = [*check_messages(messages)[:-1], {"role": "user", "content": NEUTRAL_DIALOGUE[0].text}]
        salt = str(options.get("salt", ""))
        rendered = [render(self.loaded.tokenizer, m, tools) for m in (messages, other)]
        ids, other_ids = (self.loaded.codec.encode(conversation.prompt) for conversation in rendered)
        shared = ids[: common_prefix(ids, other_ids)]
        if self._warm is None or self._warm[0] != (salt, shared):
            self._warm = (salt, shared), [model.prefilled(shared, salt) for model in self._models()]
        for model, cache in zip(self._models(), self._warm[1], strict=True):
            model.prefix_cache = cache
        if (
            self._client is not None
            and method_named(options.get("method") or self.default_method).hints
            and rendered[1].tools
        ):
            said = [(turn.role, turn.text) for turn in NEUTRAL_DIALOGUE]
            mailbox = self._client.submit(rendered[1].tools, said, fresh=True)
            mailbox.wait(READY_TIMEOUT_S)
            mailbox.close()

    def request(self, messages: Any, tools: Any = None, **options: Any) -> Request:
        """Build a request without decoding it yet; options as in `generate`, and `messages` may be a RawPrompt."""
        return Request(self, messages, tools, **options)

    @property
    def waves_run_ahead(self) -> bool:
        """Tell whether the sidecar can work for waiting requests without taking the target's cores."""
        return self._client is not None and (self.loaded.device != "cpu" or self.placement.target_busy > 0)

    @property
    def grammars(self) -> Grammars:
        """Compiles grammars for this target."""
        if self._grammars is None:
            self._grammars = Grammars(self.loaded)
        return self._grammars

    @property
    def sidecar_name(self) -> str:
        """Name of the sidecar's model; empty without one."""
        return self._client.model if self._client is not None else ""

    @property
    def warnings(self) -> dict[str, int]:
        """Faults of the sidecar and of proposers, counted by kind."""
        return {**(self._client.warnings if self._client is not None else {}), **self.faults}

    def top_gap(self, ids: Sequence[int]) -> tuple[float, float]:
        """Return (difference of the two largest logits after `ids`, the largest), by one plain forward pass."""
        tokens = torch.tensor([list(ids)], device=self.loaded.model.device)
        with torch.inference_mode():
            logits = self.loaded.model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[0, -1]
        best = logits.float().topk(2).values.tolist()
        return best[0] - best[1], best[0]

    def close(self) -> None:
        """End the sidecar that this decoder started and let go of its connection."""
        if self._client is not None:
            self._client.close()
            self._client = None
        self.placement.undo()

    def __enter__(self) -> Decoder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
