"""Convert a GGUF file to bfloat16 safetensors, once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ooospec.errors import ModelNotFoundError
from ooospec.models.progress import Progress


def convert_gguf(gguf: Path, folder: Path, progress: Progress) -> None:
    """Write model and tokenizer of `gguf` into `folder`, which appears only when complete."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    what = f"convert {gguf.name}"
    temporary = folder.with_name(folder.name + ".converting")
    shutil.rmtree(temporary, ignore_errors=True)
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # newer releases keep the blocks packed unless told otherwise
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        progress.update(what, 0, 4)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        progress.update(what, 1, 4)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **options)
        progress.update(what, 3, 4)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
    except (OSError, ValueError, KeyError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise ModelNotFoundError(f"{gguf} could not be converted: {str(error)[:300]}") from error
    finally:
        logging.set_verbosity(verbosity)
        logging.enable_progress_bar()
    temporary.replace(folder)
    progress.update(what, 4, 4)
