"""One training run from files to a finished drafter: the work of every `outrider train` command.

    data -> checks -> held-out split -> the target's own text -> recipe -> measure -> train
         -> measure -> save

Errors in the input are found before the first step. The run measures the drafter's agreement with
the target on held-out text before and after training.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from outrider.errors import ConfigError
from outrider.model.head_notes import write_notes
from outrider.train.chats import Written, answers_of, prompts_of, write_chats
from outrider.train.config import DataError, SessionConfig
from outrider.train.data import (
    BatchSource,
    Mixture,
    Rows,
    Windows,
    digest,
    encode,
    read_documents,
    to_device,
)
from outrider.train.expected import expected_speed
from outrider.train.kinds import Material, build_recipe
from outrider.train.models import load_model, load_tokenizer
from outrider.train.plateau import Plateau
from outrider.train.progress import Progress
from outrider.train.provenance import write_provenance
from outrider.train.sampler import generate_rows, prompts, temperatures
from outrider.train.trainer import Recipe, Report, TrainConfig, train

logger = logging.getLogger(__name__)

MAX_LOGITS = 1 << 27  # of a pass on a CPU: 512 MB
WRITING_SHARE = 0.25  # of a run's time, where the target writes all of the text
HELD_OUT = 32  # rows
CHAT_IDS = 8192  # that a head can draft where nothing is chosen: its output head is small
OWN_TEXT = "own-text.pt"  # until the run is complete
OWN_TEMPERATURES = {1.0: 0.6, 0.7: 0.3, 0.0: 0.1}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a run; the dictionaries are a recipe's `measure` on held-out rows."""

    folder: Path
    before: dict[str, Any]
    after: dict[str, Any]
    trained_on: dict[str, Any]
    report: Report
    # Tokens/s on this machine, with it and without; may be empty.
    expected: dict[str, float] = field(default_factory=dict)


def run_session(config: SessionConfig) -> Outcome:
    """Train one drafter and write it to `config.out`; resumes an interrupted run of this call."""
    device = _device(config.device)
    from outrider.model.bundled import find_folder

    began = time.monotonic()
    target_folder = find_folder(config.target)
    tokenizer = load_tokenizer(target_folder)
    # Before the trainable target is loaded: the engine that writes has a copy of its own.
    written = _written(config) if _wants_chats(config, tokenizer) else None
    on_gpu = device.type == "cuda"
    # The frozen target keeps its own type; trained weights are fp32.
    frozen_type = torch.bfloat16 if on_gpu and config.kind != "early-exit" else torch.float32
    target = load_model(target_folder, dtype=frozen_type).to(device)
    data = _data(config, target, tokenizer, written)
    options = dict(config.options)
    if written is not None and options.get("draft_vocab_size") is None:
        options["draft_vocab_size"] = CHAT_IDS
    material = Material(
        target=target,
        tokenizer=tokenizer,
        text=data.text,
        start=find_folder(config.start) if config.start else None,
        compiled=on_gpu if config.compiled is None else config.compiled,
        seed=config.seed,
        answers_only=written is not None,
    )
    recipe = build_recipe(config.kind, material, options)
    sample = data.source.rows(0, config.rows_per_step)[:32]
    before = _measure(recipe, data.heldout, on_gpu)
    checkpoint = config.out / "checkpoint.pt"
    train_config = _train_config(config, data.files, on_gpu, target.config.vocab_size)
    plateau = None
    if written is not None:
        plateau = Plateau(lambda: _length(_measure(recipe, data.heldout, on_gpu)))
        if train_config.minutes is not None:
            left = train_config.minutes - max(written.seconds, time.monotonic() - began) / 60
            train_config = replace(train_config, minutes=max(0.1, left))
    report = train(
        recipe, data.source, train_config, checkpoint=checkpoint, title=config.kind, plateau=plateau
    )
    outcome = Outcome(
        folder=config.out,
        before=before,
        after=_measure(recipe, data.heldout, on_gpu),
        trained_on=_measure(recipe, sample, on_gpu),
        report=report,
    )
    if not dist.is_initialized() or dist.get_rank() == 0:
        _save(config, recipe, tokenizer)
        outcome = _record(config, outcome, data, written, on_gpu=on_gpu)
        checkpoint.unlink(missing_ok=True)
        (config.out / OWN_TEXT).unlink(missing_ok=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    return outcome


def _record(
    config: SessionConfig, outcome: Outcome, data: _Data, written: Written | None, *, on_gpu: bool
) -> Outcome:
    """Writes the files beside the drafter; the outcome with the speed to expect."""
    if "alpha_by_depth" in outcome.after:
        write_notes(config.out, _notes(outcome.after))
    facts: dict[str, Any] = {"files": data.files, "target": str(config.target)}
    facts |= {"own_tokens": config.own_tokens}
    results = {"before": outcome.before, "after": outcome.after}
    results |= {"training_text": outcome.trained_on}
    if written is not None:
        facts |= {"answer_tokens": written.num_answer_tokens, "chats": written.kinds}
        if not on_gpu:
            prompts = prompts_of(data.heldout)
            expected = expected_speed(config.target, config.out, prompts, temperature=0.0)
            outcome = replace(outcome, expected=expected)
            results |= {"expected": expected}
    path = config.out / "provenance.json"
    write_provenance(path, report=outcome.report, results=results, data=facts)
    return outcome


@dataclass(frozen=True, kw_only=True)
class _Data:
    source: BatchSource
    heldout: Tensor
    text: Tensor  # whose most frequent ids a head may draft
    files: list[dict[str, object]]


def _data(config: SessionConfig, target: Any, tokenizer: Any, written: Written | None) -> _Data:
    device = next(target.parameters()).device
    if written is not None:
        rows = written.rows.to(device)
        is_heldout = torch.arange(len(rows), device=device) % 20 == 0
        heldout, rows = rows[is_heldout][:HELD_OUT].long(), rows[~is_heldout]
        if not len(rows):
            raise DataError("the target wrote too little: give it more --minutes or --own-tokens")
        facts = {"rows": len(rows), "sha256": digest(rows.cpu().numpy().astype(np.uint32))}
        return _Data(
            source=Rows(rows, config.seed), heldout=heldout, text=answers_of(rows), files=[facts]
        )
    stream, heldout, files = _read(config, tokenizer, target.config.vocab_size)
    own, own_heldout = _own_rows(config, target, tokenizer, stream)
    text = None if stream is None else to_device(stream, device)
    return _Data(
        source=_source(config, text, own),
        heldout=_heldout_rows(heldout, own_heldout, config.length, device),
        text=own.flatten() if text is None else text,
        files=files,
    )


def _wants_chats(config: SessionConfig, tokenizer: Any) -> bool:
    """Whether a chat model writes all of the text, for a recipe that can count answers alone."""
    has_template = bool(getattr(tokenizer, "chat_template", None))
    return config.kind == "eagle3" and not config.data and has_template


def _written(config: SessionConfig) -> Written:
    """The target's chats; those of an interrupted run of this call, if there are."""
    path = config.out / OWN_TEXT
    facts = [config.target, config.length, config.own_tokens, config.seed]
    asked = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    if path.exists():
        written = Written.load(path)
        if written.asked == asked:
            return written
    minutes = config.minutes if config.hours is None else 60 * config.hours
    unit = "tokens" if minutes is None else "s"
    with Progress("the target writes", unit=unit) as progress:
        written = write_chats(
            config.target,
            config.length,
            most_tokens=config.own_tokens,
            most_s=None if minutes is None else 60 * minutes * WRITING_SHARE,
            seed=config.seed,
            tell=progress.count,
        )
    written.asked = asked
    written.save(path)
    return written


def _length(figures: dict[str, Any]) -> float:
    """Of accepted drafts, at temperatures 0 and 1."""
    greedy, sampled = figures["greedy_acceptance_length"], figures["sampled_acceptance_length"]
    return float((greedy + sampled) / 2)


def _notes(figures: dict[str, Any]) -> dict[str, Any]:
    def rounded(name: str) -> list[float]:
        return [round(share, 4) for share in figures[name]]

    return {
        "acceptance_by_depth": rounded("alpha_by_depth"),
        "agreement_by_depth": rounded("agreement_by_depth"),
        "positions": figures["num_positions"],
    }


def _device(name: str) -> torch.device:
    """The device of this process; joins the process group when torchrun started it."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("there is no CUDA device here: use --device cpu")
    device = torch.device(name)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if dist.is_initialized() and device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return device


def _read(
    config: SessionConfig, tokenizer: Any, vocab_size: int
) -> tuple[Any, Any, list[dict[str, object]]]:
    """Token streams for training and for measuring, and the hashes of the files they came from."""
    if not config.data:
        return None, None, []
    documents = read_documents(config.data, tokenizer)
    if len(documents) >= 20:
        measured, trained = documents[::20], [d for i, d in enumerate(documents) if i % 20]
        streams = encode(trained, tokenizer, vocab_size), encode(measured, tokenizer, vocab_size)
    else:
        whole = encode(documents, tokenizer, vocab_size)
        cut = max(1, min(len(whole) // 10, 16 * config.length))
        streams = whole[:-cut], whole[-cut:]
    needed = 2 * config.length
    if len(streams[0]) < needed:
        raise DataError(
            f"too little text: {len(streams[0])} tokens to train on, at least {needed} are needed "
            f"for sequences of {config.length}; give more text or a smaller --length"
        )
    files: list[dict[str, object]] = [
        {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in config.data
    ]
    files.append({"tokens": len(streams[0]), "sha256": digest(streams[0])})
    return streams[0], streams[1], files


def _beginning(tokenizer: Any, end: int) -> list[int]:
    """What a text of the target begins with: of a chat template all up to the user's message, so
    that the target writes the message and the answer."""
    if not getattr(tokenizer, "chat_template", None):
        return [end]
    mark = "\N{SNOWMAN}"
    chat = [{"role": "user", "content": mark}]
    text = str(tokenizer.apply_chat_template(chat, tokenize=False)).partition(mark)[0]
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]) or [end]


def _own_rows(
    config: SessionConfig, target: Any, tokenizer: Any, stream: Any
) -> tuple[Tensor, Tensor]:
    """The target's own rows for training and a few for measuring; empty without own_tokens."""
    device = next(target.parameters()).device
    if not config.own_tokens:
        empty = torch.empty(0, config.length, dtype=torch.int32, device=device)
        return empty, empty
    began = time.monotonic()
    num_rows = -(-config.own_tokens // config.length) + 4
    num_prompt = max(1, min(32, config.length // 4))
    if stream is None:
        end = target.config.eos_token_id
        end = end[0] if isinstance(end, list) else end or 0
        given = torch.tensor([_beginning(tokenizer, end)]).expand(num_rows, -1)
    else:
        given = prompts(
            torch.from_numpy(stream.astype(np.int64)), num_rows, num_prompt, config.seed
        )
    warmth = temperatures(num_rows, OWN_TEMPERATURES)
    parts = []
    at_once = 1024 if device.type == "cuda" else 64  # their keys and values are all in memory
    with Progress("the target writes", unit="tokens") as progress:
        for i in range(0, num_rows, at_once):
            some = given[i : i + at_once]

            def tell(position: int, done: int = i, count: int = len(some)) -> None:
                progress.count(done * config.length + count * position, num_rows * config.length)

            parts.append(
                generate_rows(
                    target, some, config.length, warmth[i : i + at_once], config.seed + i, tell
                ).to(device, torch.int32)
            )
    table = torch.cat(parts)
    logger.info("%d of the target's own tokens in %.0f s", table.numel(), time.monotonic() - began)
    return table[4:], table[:4]


def _source(config: SessionConfig, text: Tensor | None, own: Tensor) -> BatchSource:
    if text is None:
        return Rows(own, config.seed)
    windows = Windows(text, config.length, config.seed)
    if not len(own):
        return windows
    share = config.own_share
    return Mixture([(windows, 1 - share), (Rows(own, config.seed), share)])


def _heldout_rows(heldout: Any, own: Tensor, length: int, device: torch.device) -> Tensor:
    """At most 32 rows; a held-out stream shorter than one row is one short row."""
    if heldout is None:
        return own.long()
    count = min(32, max(1, len(heldout) // length))
    length = min(length, len(heldout))
    return to_device(heldout[: count * length], device).long().view(count, length)


def passes_per_step(config: SessionConfig, vocab_size: int, *, on_gpu: bool) -> int:
    """On a CPU, as many passes a step as keep the logits of a pass small."""
    if on_gpu or config.accumulation != 1:
        return config.accumulation
    rows = max(1, MAX_LOGITS // (config.length * vocab_size))
    count = next(n for n in range(1, config.rows_per_step + 1) if config.rows_per_step <= n * rows)
    while config.rows_per_step % count:
        count += 1
    return count


def _train_config(
    config: SessionConfig, files: list[Any], on_gpu: bool, vocab_size: int
) -> TrainConfig:
    facts: list[Any] = [config.kind, config.target, config.start, config.length, config.own_tokens]
    facts += [config.own_share, sorted(config.options.items()), files]
    return TrainConfig(
        num_steps=config.num_steps,
        minutes=config.minutes if config.hours is None else 60 * config.hours,
        rows_per_step=config.rows_per_step,
        accumulation=passes_per_step(config, vocab_size, on_gpu=on_gpu),
        seed=config.seed,
        optim=config.optim,
        checkpoint_every_s=config.checkpoint_every_s,
        log_every=config.log_every,
        bf16=on_gpu,
        fingerprint=hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest(),
    )


def _measure(recipe: Recipe, rows_BL: Tensor, on_gpu: bool) -> dict[str, Any]:
    with torch.no_grad(), torch.autocast(rows_BL.device.type, torch.bfloat16, enabled=on_gpu):
        return recipe.measure(rows_BL)


def _save(config: SessionConfig, recipe: Recipe, tokenizer: Any) -> None:
    """The drafter's folder; the checkpoint and the provenance file share it."""
    staging = config.out / ".model"
    recipe.save(staging)
    if config.kind in ("draft", "early-exit"):
        tokenizer.save_pretrained(staging)
    for path in staging.iterdir():
        os.replace(path, config.out / path.name)
    staging.rmdir()
