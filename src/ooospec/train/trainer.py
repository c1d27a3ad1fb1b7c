"""Train a LoRA adapter (Hu et al., 2021) for a sidecar on packed requests; a kill costs at most the steps since the
last checkpoint, and a resumed run ends with the same weights as one that was never stopped."""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor

from ooospec.errors import UsageError
from ooospec.target.loading import LoadedModel
from ooospec.train.average import WEIGHTS, file_hash, read_adapter, write_weights
from ooospec.train.packing import FUNCTION, NULL, VALUE, Packed
from ooospec.train.recipe import Recipe

CHECKPOINT, STATE, LOG = "checkpoint", "state.pt", "log.jsonl"
TARGET_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def packed_loss(model: Any, packed: Packed, device: torch.device) -> tuple[Tensor, dict[str, list[bool]]]:
    """Return (loss summed over questions, per kind of question whether all tokens of each answer are the likeliest)."""
    rows = torch.tensor(packed.rows, device=device)
    kept, index = rows.unique(return_inverse=True)
    logits = model(
        input_ids=torch.tensor([packed.tokens], device=device),
        position_ids=torch.tensor([packed.positions], device=device),
        attention_mask=torch.from_numpy(packed.visible)[None, None].to(device),
        use_cache=False,
        logits_to_keep=kept,
    ).logits[0]
    targets = torch.tensor(packed.targets, device=device)
    losses = torch.nn.functional.cross_entropy(logits.float()[index], targets, reduction="none")
    right = [True] * len(packed.kinds)
    for owner, hit in zip(packed.owners, (logits.argmax(-1)[index] == targets).tolist(), strict=True):
        right[owner] = right[owner] and hit
    by_kind: dict[str, list[bool]] = {FUNCTION: [], VALUE: [], NULL: []}
    for kind, hit in zip(packed.kinds, right, strict=True):
        by_kind[kind].append(hit)
    return (losses * torch.tensor(packed.weights, device=device)).sum(), by_kind


def learning_rate(step: int, steps: int, recipe: Recipe) -> float:
    """Cosine with linear warm-up, in every cycle anew (warm restarts, Loshchilov and Hutter, 2017)."""
    length = math.ceil(steps / recipe.cycles)
    step %= length
    warm = max(1, math.ceil(recipe.warmup * length))
    if step < warm:
        return recipe.learning_rate * (step + 1) / warm
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, length - warm)))


@dataclass(frozen=True, slots=True)
class Report:
    """What one optimiser step reports. Losses are per question."""

    step: int
    steps: int
    loss: float
    tokens_per_s: float
    left_s: float
    dev_loss: float | None = None
    dev_right: dict[str, float] | None = None
    """Share of dev questions answered right when the right beginning is given, by kind."""


class Trainer:
    """Trains over `count` requests that `pack(index)` gives on demand (None = too long or nothing asked: skipped)."""

    def __init__(
        self,
        loaded: LoadedModel,
        recipe: Recipe,
        out: Path,
        count: int,
        pack: Callable[[int], Packed | None],
        dev: Sequence[Packed] = (),
        start: Path | None = None,
        data: str = "",
    ) -> None:
        """Wrap the model of `loaded`; resume from `out` if it holds a checkpoint, else begin with the adapter `start`.

        `data` names the examples: a run goes on with the same ones only. Raises UsageError.
        """
        if count < 1:
            raise UsageError("There is nothing to train on: no example was usable.")
        self.recipe, self.out, self.count, self.pack, self.dev = recipe, out, count, pack, dev
        self.base, self.device = loaded.name, loaded.model.device
        self.model = _with_fresh_adapter(loaded, recipe)
        if start is not None:
            _begin_with(self.model, start, recipe)
        self.weights = [p for p in self.model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().clone().requires_grad_() for p in self.weights]
        self.optimizer = torch.optim.AdamW(
            self.masters, lr=recipe.learning_rate, weight_decay=recipe.weight_decay, betas=(0.9, 0.999)
        )
        self.per_epoch = math.ceil(count / recipe.batch)
        self.steps, self.step = recipe.epochs * self.per_epoch, 0
        self.out.mkdir(parents=True, exist_ok=True)
        self._identity = {**msgspec.structs.asdict(recipe), "base": loaded.name, "dtype": loaded.dtype, "count": count}
        self._identity |= {"start": start and file_hash(start / WEIGHTS), "data": data}
        self.too_long: set[int] = set()
        """Examples that were left out: too long, or asking nothing."""
        self._resume()

    def run(self) -> Iterator[Report]:
        """Train to the end, a report an optimiser step."""
        start, first, tokens = time.perf_counter(), self.step, 0
        while self.step < self.steps:
            self.model.train()
            losses, asked = 0.0, 0
            batch = self._batch(self.step)
            for index, epoch in batch:
                packed = self.pack(index)
                if packed is None:
                    self.too_long.add(index)
                    continue
                torch.manual_seed(random.Random(f"{self.recipe.seed}-{index}-{epoch}").getrandbits(62))
                loss, _ = packed_loss(self.model, packed, self.device)
                loss.backward()
                losses, asked, tokens = (
                    losses + float(loss.detach()),
                    asked + len(packed.kinds),
                    tokens + len(packed.tokens),
                )
            if asked:
                self._update(asked)
            self.step += 1
            if len(self.too_long) == self.count:
                raise UsageError(
                    f"There is nothing to train on: all {self.count} examples ask nothing, or have more tokens than "
                    f"max_tokens = {self.recipe.max_tokens} of the recipe."
                )
            measured = self.step % self.recipe.evaluate_every == 0 or self.step == self.steps
            dev_loss, dev_right = self.evaluate() if self.dev and measured else (None, None)
            spent = time.perf_counter() - start
            left = spent / (self.step - first) * (self.steps - self.step)
            report = Report(self.step, self.steps, losses / max(1, asked), tokens / spent, left, dev_loss, dev_right)
            self._log(report)
            if self.step % self.recipe.checkpoint_every == 0 or self.step == self.steps:
                self._save()
            yield report

    def _update(self, asked: int) -> None:
        """Step the float32 masters by the mean gradient of the batch's questions, and copy them to the model."""
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = weight.grad.float() / asked if weight.grad is not None else None
            weight.grad = None
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.steps, self.recipe)
        torch.nn.utils.clip_grad_norm_(self.masters, self.recipe.clip)
        self.optimizer.step()
        self._copy_masters()

    def _copy_masters(self) -> None:
        with torch.no_grad():
            for master, weight in zip(self.masters, self.weights, strict=True):
                weight.copy_(master)

    @torch.inference_mode()
    def evaluate(self) -> tuple[float, dict[str, float]]:
        """Return (loss per question, share right by kind) over the dev requests."""
        self.model.eval()
        total, asked = 0.0, 0
        right: dict[str, list[bool]] = {FUNCTION: [], VALUE: [], NULL: []}
        for packed in self.dev:
            loss, by_kind = packed_loss(self.model, packed, self.device)
            total, asked = total + float(loss), asked + len(packed.kinds)
            for kind, hits in by_kind.items():
                right[kind] += hits
        return total / max(1, asked), {kind: sum(hits) / len(hits) for kind, hits in right.items() if hits}

    def save_adapter(self, folder: Path) -> None:
        """Write the adapter as peft reads it, in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        state = {name: tensor.bfloat16().contiguous() for name, tensor in get_peft_model_state_dict(self.model).items()}
        write_weights(folder / WEIGHTS, state)
        config = self.model.peft_config["default"]
        config.base_model_name_or_path, config.inference_mode = self.base, True
        config.save_pretrained(folder)

    def _batch(self, step: int) -> list[tuple[int, int]]:
        epoch, number = divmod(step, self.per_epoch)
        order = list(range(self.count))
        random.Random(f"{self.recipe.seed}-{epoch}").shuffle(order)
        return [(i, epoch) for i in order[number * self.recipe.batch : (number + 1) * self.recipe.batch]]

    def _log(self, report: Report) -> None:
        with (self.out / LOG).open("a", encoding="utf-8") as sink:
            sink.write(json.dumps(asdict(report)) + "\n")

    # ------------------------------------------------------------------ checkpoints

    def _save(self) -> None:
        """Write a whole checkpoint beside the last one, then swap: a kill or a full disk leaves one of them intact."""
        fresh, last, old = (self.out / f"{CHECKPOINT}{end}" for end in (".new", "", ".old"))
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        state = {
            "step": self.step,
            "identity": self._identity,
            "too_long": sorted(self.too_long),
            "masters": [master.detach() for master in self.masters],
            "optimizer": self.optimizer.state_dict(),
        }
        with (fresh / STATE).open("wb") as sink:
            torch.save(state, sink)
            sink.flush()
            os.fsync(sink.fileno())
        shutil.rmtree(old, ignore_errors=True)
        if last.is_dir():
            last.rename(old)
        fresh.rename(last)
        shutil.rmtree(old, ignore_errors=True)

    def _resume(self) -> None:
        folders = (self.out / CHECKPOINT, self.out / f"{CHECKPOINT}.old")
        last = next((folder for folder in folders if (folder / STATE).is_file()), None)
        if last is None:
            _cut_log(self.out / LOG, 0)
            return
        state = self._read(last / STATE)
        differing = [key for key, value in self._identity.items() if state["identity"].get(key) != value]
        if differing:
            given = ", ".join(f"{key} {state['identity'].get(key)!r}, now {self._identity[key]!r}" for key in differing)
            raise UsageError(f"{self.out} holds a run with other settings ({given}); give those or another --out.")
        with torch.no_grad():
            for master, kept in zip(self.masters, state["masters"], strict=True):
                master.copy_(kept)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.too_long = int(state["step"]), set(state["too_long"])
        self._copy_masters()
        _cut_log(self.out / LOG, self.step)

    def _read(self, path: Path) -> dict[str, Any]:
        try:
            state: dict[str, Any] = torch.load(path, weights_only=True, map_location=self.device)
            missing = {"step", "identity", "too_long", "masters", "optimizer"} - state.keys()
        except Exception as error:  # pickle raises what it happens to stumble over
            told = str(error).strip().splitlines()[:1]
            raise UsageError(
                f"The checkpoint {path} is damaged ({''.join(told)[:120] or type(error).__name__}); remove "
                f"{path.parent} to begin anew, or choose another --out."
            ) from error
        if missing:
            raise UsageError(f"The checkpoint {path} is of another version; choose another --out to begin anew.")
        return state


def _with_fresh_adapter(loaded: LoadedModel, recipe: Recipe) -> Any:
    torch.manual_seed(recipe.seed)
    layers = int(loaded.model.config.num_hidden_layers)
    if not 0 <= recipe.first_layer < layers:
        raise UsageError(f"first_layer must be from 0 to {layers - 1} for {loaded.name}; got {recipe.first_layer}.")
    chosen = list(range(recipe.first_layer, layers)) if recipe.first_layer else None
    lora = LoraConfig(
        r=recipe.rank, lora_alpha=recipe.alpha, lora_dropout=recipe.dropout, target_modules=TARGET_MODULES,
        layers_to_transform=chosen, task_type="CAUSAL_LM",
    )  # fmt: skip
    return get_peft_model(loaded.model, lora, autocast_adapter_dtype=False)


def _begin_with(model: Any, start: Path, recipe: Recipe) -> None:
    """Copy the weights of an adapter of the recipe's rank and layers. Raises UsageError."""
    state, _, scale = read_adapter(start)
    own = get_peft_model_state_dict(model)
    rank = next((len(tensor) for name, tensor in state.items() if "lora_A" in name), 0)
    if rank != recipe.rank:
        raise UsageError(
            f"Adapter {str(start)!r} has rank {rank}, the recipe {recipe.rank}; give a --recipe with rank {rank} "
            "(small has 16), or another --start."
        )
    if {name: tensor.shape for name, tensor in state.items()} != {name: tensor.shape for name, tensor in own.items()}:
        raise UsageError(
            f"Adapter {str(start)!r} was trained on other layers or another base than this run (first_layer "
            f"{recipe.first_layer}); give a --recipe with the same layers, or another --start."
        )
    factor = scale * recipe.rank / recipe.alpha
    for name, tensor in state.items():
        state[name] = tensor * factor if "lora_B" in name else tensor
    set_peft_model_state_dict(model, state)


def _cut_log(path: Path, step: int) -> None:
    """Drop log lines of steps after the checkpoint: they are done again."""
    if not path.exists():
        return
    kept = list[str]()
    for line in path.read_text("utf-8").splitlines():
        with contextlib.suppress(ValueError):  # a last line that was cut short
            kept += [line] if json.loads(line)["step"] <= step else []
    path.write_text("".join(f"{line}\n" for line in kept), "utf-8")
