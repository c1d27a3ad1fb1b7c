"""The worker's side: a proposer for vLLM's out-of-tree hook."""

from __future__ import annotations

import atexit
import copy
import json
import os
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version
from transformers import AutoTokenizer, GenerationConfig

from ooospec.chat.codec import TextCodec
from ooospec.chat.template import template_format
from ooospec.errors import UsageError
from ooospec.integrations.rows import Known, RowDrafter, Situation
from ooospec.integrations.vllm.connection import STATS_VARIABLE, Connection, logger, remembers
from ooospec.sidecar.client import SidecarClient

TESTED = (Version("0.32.0"), Version("0.33.0"))
"""vLLM versions from the first to before the second."""
REPORT_SECONDS, LOG_SECONDS = 1.0, 10.0


class _Hints:
    """Hints of the requests that front ends named."""

    def __init__(self) -> None:
        self._connection = Connection(SidecarClient.subscribe)
        self._connection.get()

    def drain(self) -> None:
        """Read what has come, so that nothing is lost for want of room."""
        client = self._connection.get()
        if client is not None:
            client.receive()

    def find(self, key: bytes) -> Known | None:
        """Look a request up; None for one that was not named."""
        client = self._connection.get()
        mailbox = client.announced(key) if client is not None else None
        return Known(mailbox.tools, mailbox.poll, mailbox.ask) if mailbox is not None else None


class OooSpecProposer:
    """What vLLM's `custom_class` hook instantiates in every worker; `propose` never raises.

    The scheduler takes the drafts of one rank and hands them to all, so ranks cannot disagree; others draft nothing.
    """

    def __init__(self, vllm_config: Any) -> None:
        """Raises UsageError for a vLLM that was not tested, or a target whose state cannot be rolled back."""
        check_version(version_of_vllm())
        model = vllm_config.model_config
        if getattr(model, "is_hybrid", False) or getattr(model, "is_attention_free", False):
            raise UsageError(
                f"{model.model} keeps a recurrent state (Mamba or linear attention), which vLLM does not roll back for "
                "drafts of varying length; OoO-Spec does not run with it. Serve it without --speculative-config."
            )
        parallel = vllm_config.parallel_config
        if parallel.distributed_executor_backend == "external_launcher":
            raise UsageError(
                "With the external_launcher backend every rank schedules by itself: all would have to draft the same "
                "at the same time; hints come when they come. Use another backend, or leave out --speculative-config."
            )
        if parallel.pipeline_parallel_size > 1:
            raise UsageError(
                f"pipeline_parallel_size is {parallel.pipeline_parallel_size}: several batches are under way at once "
                "then, and OoO-Spec follows one. Use --tensor-parallel-size, or leave out --speculative-config."
            )
        self.max_tokens = int(vllm_config.speculative_config.num_speculative_tokens)
        _keep_asking(vllm_config.speculative_config, self.max_tokens)
        self._drafts = parallel.rank % parallel.tensor_parallel_size == 0
        """Whether the scheduler takes this rank's drafts."""
        self._hints = _Hints() if self._drafts else None
        self.drafter = RowDrafter(
            read_situation(model), self.max_tokens, int(model.max_model_len), self._hints, remembers()
        )
        replica = parallel.data_parallel_index  # kept where replicas are engines of their own, too
        self._replica = f".{replica}" if parallel.data_parallel_size > 1 or replica else ""
        self._report_at = self._log_at = 0.0
        self._written = self._logged = ""
        if self._drafts:
            atexit.register(self._report)

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:  # fmt: skip
        """Return the draft of every row: at most `num_speculative_tokens` ids each, [] where nothing pays."""
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if self._hints is None:
            return drafts
        try:
            self._hints.drain()
        except Exception:
            self.drafter.fault("the hints of a step")
        try:
            ran = _tokens_run(slot_mappings)
            drafts = self.drafter.propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, ran)
            if time.monotonic() > self._report_at:
                self._report()
        except Exception:
            self.drafter.fault("a step")
        return drafts

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no model in this process."""

    def _report(self) -> None:
        """Log the counts when they changed, and write them to the file that OOOSPEC_STATS names."""
        now = time.monotonic()
        self._report_at = now + REPORT_SECONDS
        text, path = json.dumps(dict(sorted(self.drafter.counts.items()))), os.environ.get(STATS_VARIABLE)
        if now >= self._log_at and text != self._logged:
            self._log_at, self._logged = now + LOG_SECONDS, text
            logger.info("OoO-Spec: %s", text)
        if path and text != self._written:
            self._written = text
            try:
                temporary = Path(f"{path}{self._replica}.{os.getpid()}.tmp")
                temporary.write_text(text + "\n", "utf-8")
                temporary.replace(f"{path}{self._replica}")
            except OSError as error:
                logger.warning("%s=%s cannot be written: %s", STATS_VARIABLE, path, error)


def _keep_asking(speculative: Any, most: int) -> None:
    """Have vLLM ask for drafts up to the end of a row.

    Otherwise it verifies `num_speculative_tokens` zeros in every row as soon as one row of the batch is so near the
    longest length that a full draft would not fit. The drafter looks at each row's room itself.
    """
    longer = copy.copy(speculative.draft_model_config)
    longer.max_model_len += most
    speculative.draft_model_config = longer


def _tokens_run(slot_mappings: Any) -> int | None:
    """Return how many tokens the step before ran, padding included; None where vLLM does not tell."""
    parts = slot_mappings if isinstance(slot_mappings, list) else [slot_mappings]
    if not parts or not all(parts):
        return None
    return sum(int(next(iter(part.values())).shape[0]) for part in parts)


def version_of_vllm() -> str:
    """Return the installed version, whichever wheel carries it."""
    import vllm

    return str(vllm.__version__)


def check_version(found: str) -> None:
    """Raise UsageError for a vLLM outside the tested range: the hook's signature differs between versions."""
    first, before = TESTED
    if not first <= Version(Version(found).base_version) < before:
        raise UsageError(
            f"OoO-Spec {version('ooo-spec')} was tested with vLLM from {first} to before {before}; this is {found}. "
            "Install one of those, or serve without --speculative-config."
        )


def read_situation(model: Any) -> Situation:
    """Load the target's tokenizer and read its call format (vLLM's ModelConfig). Raises UsageError for a slow one."""
    tokenizer = AutoTokenizer.from_pretrained(
        model.tokenizer, revision=model.tokenizer_revision, trust_remote_code=bool(model.trust_remote_code)
    )
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise UsageError(f"The tokenizer of {model.tokenizer} has no fast form; OoO-Spec needs one.")
    try:
        ended = GenerationConfig.from_pretrained(model.model, revision=model.revision).eos_token_id
    except OSError:
        ended = None
    ended = tokenizer.eos_token_id if ended is None else ended
    ids = list(ended) if isinstance(ended, list | tuple) else [] if ended is None else [int(ended)]
    call_format, _ = template_format(tokenizer)
    reasons = "<think>" in str(tokenizer.chat_template or "")
    codec = TextCodec(tokenizer.backend_tokenizer, ids)
    return Situation(codec, call_format.name, reasons, Path(model.model).name, int(model.get_vocab_size()))
