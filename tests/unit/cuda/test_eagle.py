"""EAGLE-3 on a GPU, or with torch references: the drafts of the torch module, without the host."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.contracts import Drafted, Observation, Proposal, Verdict
from outrider.cuda.ops import Pass, TorchOps
from outrider.cuda.triton_ops import TritonOps
from outrider.draft_plans import Chain, Propose
from outrider.engine.build import EngineConfig, assemble
from outrider.engine.engine import Engine
from outrider.errors import ConfigError
from outrider.executors.cuda import CudaExecutor
from outrider.executors.cuda_cycles import Cycles
from outrider.executors.planned import Decoding
from outrider.model.cuda_eagle3 import CudaEagle3
from outrider.model.cuda_target import CudaTarget
from outrider.model.tokenizer import load_tokenizer
from outrider.model.torch_decoder import TorchDecoder
from outrider.proposers.eagle3 import Eagle3Proposer
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_head, write_tiny_llama

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PROMPT = [(i * i * 7 + i) % 64 for i in range(40)]
Drafts = list[tuple[list[int], list[int]]]  # of each step, and how many were kept


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle")
    write_tiny_llama(folder / "target", head_dim=16, num_layers=3)
    write_tiny_head(folder / "head", "eagle3", taps=(1, 3), head_dim=16)
    return folder


def engine_for(
    folder: Path,
    kind: type[TorchDecoder] = CudaTarget,
    *,
    num_drafts: int = 4,
    weights: str = "float32",
    most: int = 1,
    children: int | None = 1,
) -> Engine:
    config = EngineConfig(
        model=str(folder / "target"),
        draft_model=str(folder / "head"),
        proposer="eagle3",
        proposer_options={"eagle3": {"children": children, "weights": weights}},
        num_draft_tokens=num_drafts,
        device=DEVICE.type,
        backend="torch",
        kv_tokens=1024,
        block_size=8,
        max_ahead_steps=most,
    )
    model = kind.load(folder / "target", device=DEVICE, dtype=torch.float32)
    return assemble(config, model, load_tokenizer(str(folder / "target")))


def write(
    engine: Engine, temperature: float, prompts: list[list[int]] | None = None, count: int = 40
) -> tuple[list[list[int]], list[Drafts]]:
    """What requests at once wrote, and what was drafted for them step by step."""
    params = SamplingParams(max_tokens=count, temperature=temperature, seed=9, ignore_eos=True)
    requests = [engine.add(prompt, params) for prompt in prompts or [PROMPT]]
    steps: dict[str, Drafts] = {request: [] for request in requests}
    for step in engine.run(requests):
        for event in step.events:
            steps[event.request_id].append((event.draft_tokens, list(event.path)))
    return [engine.collect(request).tokens for request in requests], list(steps.values())


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_drafts_are_the_torch_module_s(folder: Path, temperature: float) -> None:
    """In one call a draft; a prompt longer than any pass comes first."""
    tokens, drafts = write(engine_for(folder), temperature)
    assert (tokens, drafts) == write(engine_for(folder, TorchDecoder), temperature)
    assert tokens == write(engine_for(folder, TorchDecoder, num_drafts=0), temperature)[0]
    assert any(len(path) > 1 for _, path in drafts[0]) == (temperature > 0)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("num_others", [0, 2])
def test_cycles_without_the_host(
    folder: Path, temperature: float, num_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that follow one another on the device draft what steps by themselves do."""
    monkeypatch.setattr("outrider.executors.cuda.num_runners_up", lambda *_: num_others)
    monkeypatch.setattr("outrider.engine.step.LIMIT_S", 60.0)
    taken: list[bool] = []
    real = Cycles.resume

    def noted(self: Cycles, batch: Decoding) -> bool:
        taken.append(real(self, batch))
        return taken[-1]

    monkeypatch.setattr(Cycles, "resume", noted)
    one_by_one, by_device = (engine_for(folder, num_drafts=3, most=most) for most in (1, 6))
    expected, drafts = write(one_by_one, temperature, count=80)
    tokens, own = write(by_device, temperature, count=80)
    assert tokens == expected
    assert sum(taken) > len(taken) - 4 > 0
    if num_others:
        assert len(own[0]) < len(drafts[0]) or not temperature
    else:
        assert own[0][:-3] == drafts[0][: len(own[0]) - 3]  # the last ones need not be shorter
    # Three at once; the beginning of one is cached, and the head has not seen it.
    prompts = [PROMPT, PROMPT[:3], PROMPT[:9]]
    assert write(by_device, temperature, prompts)[0] == write(one_by_one, temperature, prompts)[0]


def test_a_rounded_head_changes_no_token(folder: Path) -> None:
    tokens, drafts = write(engine_for(folder, weights="int8", most=6), 2.0)
    assert tokens == write(engine_for(folder, num_drafts=0), 2.0)[0]
    assert sum(len(path) for _, path in drafts[0]) > 5


def test_weights_that_the_kernels_do_not_have_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be 'int4'.* choose int8 or float32$"):
        engine_for(folder, weights="int4")


def test_trees_that_the_kernels_do_not_draft_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"drafts chains on this GPU.* not 4"):
        engine_for(folder, children=4)
    usual, torch_module = (
        engine_for(folder, kind, children=None).proposers["eagle3"]
        for kind in (CudaTarget, TorchDecoder)
    )
    assert (usual.trees, torch_module.trees) == (False, True)


def test_steps_that_nobody_took(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ends or comes in the middle makes the others start anew."""
    monkeypatch.setattr("outrider.engine.step.LIMIT_S", 60.0)
    engine = engine_for(folder, most=6)
    params = SamplingParams(max_tokens=60, temperature=2.0, seed=9, ignore_eos=True)
    first, second = (engine.add(PROMPT[:n], params) for n in (20, 12))
    third = ""
    for number, _ in enumerate(engine.run([first, second])):
        if number == 8:
            engine.cancel(second)
        if number == 14:
            third = engine.add(PROMPT[:7], params)
    for _ in engine.run([third]):
        pass
    plain = engine_for(folder, num_drafts=0)
    for request, length in ((first, 20), (third, 7)):
        got = engine.collect(request).tokens
        assert [got] == write(plain, 2.0, [PROMPT[:length]], 60)[0]


def test_a_text_whose_steps_were_not_all_observed_is_read_anew(folder: Path) -> None:
    engine = engine_for(folder)
    proposer = engine.proposers["eagle3"]
    assert isinstance(proposer, Eagle3Proposer)
    request = engine.add(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True))
    steps = engine.run([request])
    next(steps)
    (view,) = engine.scheduler.running
    assert isinstance(proposer.plan([view], [3], 4), Chain)
    step = Proposal([1, 2, 3], drafted=Drafted(0.1, 0.1, 4, 2))  # others follow
    proposer.observe([view], [Observation(step, Verdict([], 5))])
    assert isinstance(proposer.plan([view], [3], 4), Propose)
    next(steps)  # without a draft: this step's states are seen
    assert isinstance(proposer.plan([view], [3], 4), Chain)
    for _ in steps:
        pass


def test_prices_of_its_cycles_are_measured(folder: Path) -> None:
    engine = engine_for(folder)
    proposer = engine.proposers["eagle3"]
    assert isinstance(proposer, Eagle3Proposer)
    [executor] = engine.executors.fast
    assert isinstance(executor, CudaExecutor)
    took = executor.measure(proposer.device_head, 2, 3, 20)
    assert took is not None
    assert min(took) > 0


def _rows(where: Pass) -> list[torch.Tensor]:
    names = ("tokens_T", "positions_T", "slots_T", "masks_T", "contexts_S", "lengths_S")
    return [getattr(where, name).clone() for name in names]


def test_following_a_verdict() -> None:
    """The kernel against torch: every number of emitted tokens, with and without a runner-up."""
    num_drafts, width, page, verified = 3, 4, 4, 10
    report = torch.tensor(
        [[1, 9, 0, 0, 0, 0], [4, 1, 2, 3, 4, 0], [2, 5, 6, 0, 0, 5], [4, 7, 8, 9, -1, 9]],
        dtype=torch.int32,
        device=DEVICE,
    )
    assert report.shape[1] == num_drafts + 3
    results = []
    for ops in (TritonOps(DEVICE), TorchOps()):

        def room(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=DEVICE)

        tables = torch.arange(4 * 6, dtype=torch.int32, device=DEVICE).view(4, 6)
        tables[1, 1:] = -1
        where = Pass(
            4, width, room(16), room(16), room(16), room(16, dtype=torch.int64), room(4), room(4),
            tables,
        )  # fmt: skip
        lengths = torch.tensor([5, 2, 7, 21], dtype=torch.int32, device=DEVICE)
        keys, sources = room(16, dtype=torch.int64), room(16)
        secrets = torch.tensor([3, -5, 1 << 62, 0], device=DEVICE)
        ops.follow(report, lengths, secrets, page, verified, where, keys, sources)
        results.append([*_rows(where), lengths, keys, sources])
    for ours, reference in zip(*results, strict=True):
        assert torch.equal(ours, reference)
    tokens, positions, slots, masks, *_, lengths, _, sources = results[0]
    assert tokens.view(4, 4)[1:].tolist() == [[1, 2, 3, 4], [5, 5, 5, 6], [7, 8, 9, 0]]
    assert positions.view(4, 4)[0].tolist() == [5, 5, 5, 5]
    assert slots.view(4, 4)[:2].tolist() == [[-1, -1, -1, 5], [26, 27, -1, -1]]
    assert masks.view(4, 4)[2].tolist() == [0, 0, 1, 3]
    assert sources.view(4, 4)[2:].tolist() == [[20, 20, 20, 25], [30, 31, 32, 39]]
    assert lengths.tolist() == [6, 6, 9, 25]


def test_kernels_run_the_head(folder: Path) -> None:
    """Interpreted, or on the GPU: a whole cycle by the kernels and by torch."""
    pytest.importorskip("triton")
    results = []
    for kind in (TritonOps, TorchOps):
        engine = engine_for(folder, num_drafts=2)
        proposer = engine.proposers["eagle3"]
        assert isinstance(proposer, Eagle3Proposer)
        target, head = engine.target, proposer.device_head
        assert isinstance(target, CudaTarget)
        assert isinstance(head, CudaEagle3)
        for model in (target, head):
            model.ops = TritonOps(DEVICE) if kind is TritonOps else TorchOps()
            if isinstance(model.ops, TritonOps):
                model.ops.reserve(64, 4, 16, 128, 64)
        results.append(write(engine, 2.0, [PROMPT[:6]], count=5))
    assert results[0] == results[1]
