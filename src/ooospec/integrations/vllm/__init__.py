"""OoO-Spec inside vLLM: a proposer for its workers and a middleware for its front end (docs/vllm.md).

    vllm serve MODEL --middleware ooospec.integrations.vllm.OooSpecMiddleware \\
        --speculative-config '{"method": "custom_class", "num_speculative_tokens": 24,
                               "model": "ooospec.integrations.vllm.OooSpecProposer"}'

The middleware submits the sidecar's wave when a chat request arrives, before scheduling, and names it by its prompt's
tokens; the proposer, in the worker, is told of named requests by the sidecar and finds a row's hint by the same key.
Both find the sidecar (`ooospec sidecar`) at OOOSPEC_SIDECAR, tcp://127.0.0.1:7777 by default; without one the proposer
drafts from schemas and earlier calls alone.
"""

from ooospec.integrations.vllm.front import OooSpecMiddleware, announce
from ooospec.integrations.vllm.worker import OooSpecProposer

__all__ = ["OooSpecMiddleware", "OooSpecProposer", "announce"]
