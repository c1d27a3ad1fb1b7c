"""Every error that OoO-Spec raises on purpose.

OooSpecError
|-- UsageError            the caller's input cannot be used (the command line exits with 2)
|   |-- ToolsError        a tool list or a schema is malformed
|   |-- ModelNotFoundError
|   |-- ChecksumError     a downloaded file is not the file that was asked for
|   |-- CacheError        the cache folder cannot be used, or its disk is full
|   `-- ContextLengthError
|-- RequestStopped        a request was aborted or ran out of time
|-- UnsupportedModelError the model's state cannot be verified as a tree
`-- SidecarError          the sidecar cannot be started or reached (never raised while decoding)

A message says what came, what is allowed and what to do.
"""

from __future__ import annotations


class OooSpecError(Exception):
    """Base of all errors of this package."""


class UsageError(OooSpecError, ValueError):
    """Tell the caller that an input cannot be used as given."""


class ToolsError(UsageError):
    """Tell the caller that a tool list or schema is malformed."""


class ModelNotFoundError(UsageError):
    """Tell the caller that a model name matches nothing that can be loaded."""


class ChecksumError(UsageError):
    """Tell the caller that a file differs from the one the catalogue names."""


class CacheError(UsageError):
    """Tell the caller that the cache folder cannot hold what is needed."""


class ContextLengthError(UsageError):
    """Tell the caller that a prompt does not fit into the model's context."""


class RequestStopped(OooSpecError):
    """Tell that a request was aborted or ran out of time while it was decoded."""


class UnsupportedModelError(OooSpecError):
    """Tell the caller that a model's per-token state is no plain attention KV cache."""


class SidecarError(OooSpecError):
    """Tell the caller that the sidecar cannot be started or reached."""
