"""The GPU decoder, on a GPU or with torch references: the compact decoder's tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gpu_cycle import Cycle

from counted import count_runs
from outrider.config import NumDraftTokens
from outrider.contracts import Proposal, Verdict
from outrider.cuda.ops import TorchOps
from outrider.cuda.triton_ops import TritonOps
from outrider.doctor.advice import Advice
from outrider.doctor.checks import examine_passes
from outrider.draft_plans import Chain
from outrider.engine.build import EngineConfig, assemble
from outrider.engine.engine import Engine
from outrider.errors import ModelError
from outrider.executors.base import StepResult
from outrider.executors.cuda import CudaExecutor
from outrider.executors.cuda_cycles import Cycles, read_report
from outrider.executors.planned import Decoding
from outrider.model import load_model
from outrider.model.cuda_decoder import CudaDecoder
from outrider.model.driver import Driver
from outrider.model.int8 import RoundedLayer
from outrider.model.selfcheck import self_check
from outrider.model.tokenizer import load_tokenizer
from outrider.model.torch_decoder import TorchDecoder
from outrider.policy.base import Decision
from outrider.policy.controller import AdaptivePolicy
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama
from outrider.verifiers.ratio import RatioVerifier, accept_uniforms, draw_next
from tiny_models import SMALL, write

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PROMPT = [(i * i * 7 + i) % 64 for i in range(21)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "target", head_dim=16, num_layers=3)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "draft", head_dim=16, num_layers=1)


def load(folder: Path) -> CudaDecoder:
    return CudaDecoder.load(folder, device=DEVICE, dtype=torch.float32)


def plain(folder: Path, prompt: list[int], count: int, temperature: float, seed: int) -> list[int]:
    """What the compact torch decoder writes, one token a pass."""
    model = TorchDecoder.load(folder, device=DEVICE, dtype=torch.float32)
    engine = make_engine(folder, model, 0)
    return run(engine, prompt, count, temperature, seed)


def make_engine(
    folder: Path, model: TorchDecoder, num_draft_tokens: NumDraftTokens, **more: object
) -> Engine:
    config = EngineConfig(
        model=str(folder),
        num_draft_tokens=num_draft_tokens,
        device=DEVICE,
        backend="torch",
        kv_tokens=1024,
        **more,  # type: ignore[arg-type]
    )
    return assemble(config, model, load_tokenizer(str(folder)))


def run(engine: Engine, prompt: list[int], count: int, temperature: float, seed: int) -> list[int]:
    params = SamplingParams(max_tokens=count, temperature=temperature, seed=seed, ignore_eos=True)
    request = engine.add(prompt, params)
    for _ in engine.run([request]):
        pass
    return list(engine.collect(request).tokens)


def run_all(engine: Engine, temperature: float) -> list[list[int]]:
    """Three prompts at once, of different lengths."""
    params = SamplingParams(max_tokens=20, temperature=temperature, seed=9, ignore_eos=True)
    requests = [engine.add(PROMPT[:length], params) for length in (3, 21, 12)]
    for _ in engine.run(requests):
        pass
    return [engine.collect(request).tokens for request in requests]


def test_it_is_a_model(folder: Path) -> None:
    """Ragged passes, trees, rollback, shared blocks: tree verification equals separate passes."""
    self_check(load(folder))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_same_logits_as_the_compact_decoder(family: str, tmp_path: Path) -> None:
    """Biases and norms of queries and keys included."""
    options = {"attention_bias": True, "mlp_bias": True} if family == "Llama" else {}
    head = {} if family == "Qwen2" else {"head_dim": 16}
    config = getattr(transformers, f"{family}Config")(**SMALL, **options, **head)
    folder = write(tmp_path / family, config)
    got = []
    for kind in (CudaDecoder, TorchDecoder):
        driver = Driver(kind.load(folder, device=DEVICE, dtype=torch.float32), seed=3)
        driver.forward({"a": PROMPT, "b": PROMPT[:3]})
        driver.keep("a", range(21))
        driver.keep("b", range(3))
        tree = driver.forward(
            {"a": [5, 6, 7, 8], "b": [9, 1]}, {"a": [-1, 0, 0, 1]}, taps=(0, 2, 3)
        )
        early = driver.forward({"a": [5, 6]}, taps=(1,), exit_layer=1)
        seen = [tree.logits["a"], tree.logits["b"], early.logits["a"], early.taps[1]["a"]]
        seen += [tree.taps[layer][name] for layer in (0, 2, 3) for name in "ab"]
        got.append(seen)
    for ours, theirs in zip(*got, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_rounded_weights_are_what_they_stand_for(folder: Path) -> None:
    """In narrow passes and in wide ones: the compact decoder with the restored weights."""
    ours, theirs = load(folder), TorchDecoder.load(folder, device=DEVICE, dtype=torch.float32)
    ours.round_weights()
    for i, layer in enumerate(ours.layers):
        assert isinstance(layer, RoundedLayer)
        theirs.layers[i] = layer.restored(torch.float32)
    assert ours.head_scale_V is not None
    theirs.head_VH = ours.head_VH * ours.head_scale_V[:, None]
    got = []
    for model in (ours, theirs):
        driver = Driver(model, seed=3)
        wide = driver.forward({"a": PROMPT})
        driver.keep("a", range(21))
        narrow = driver.forward({"a": [5, 6, 7, 8]}, {"a": [-1, 0, 0, 1]})
        got.append((wide.logits["a"], narrow.logits["a"]))
    for mine, other in zip(*got, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
    full = Driver(load(folder), seed=3).forward({"a": PROMPT}).logits["a"]
    assert 0 < float((got[0][0] - full).norm() / full.norm()) < 0.03


def test_int8_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernels run, `dtype int8` is theirs; elsewhere it says what to do."""
    if DEVICE == "cpu":
        with pytest.raises(ModelError, match="choose backend 'torch' and dtype 'auto'"):
            load_model(folder, dtype="int8", backend="torch")
        monkeypatch.setattr("outrider.model.load.gpu_decoder", lambda _: CudaDecoder)
    model = load_model(folder, device=DEVICE, dtype="int8", backend="torch")
    assert isinstance(model, CudaDecoder)
    assert model.head_VH.dtype == torch.int8
    assert all(layer.qkv.dtype == torch.int8 for layer in model.layers)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_rounded_draft_changes_no_token(folder: Path, temperature: float) -> None:
    """The target's own copy in int8 drafts, and is nearly always right."""
    target, draft = load(folder), load(folder).round_weights()
    cycle = Cycle(target, draft, num_drafts=4, max_length=100)
    cycle.start([PROMPT], temperature=temperature, seed=5)
    outputs, cycles = cycle.generate(32)
    assert outputs[0] == plain(folder, PROMPT, 32, temperature, 5)
    assert cycles < 16


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_engine_writes_the_same_tokens(
    folder: Path, small: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain and speculative; the drafts of four tokens come out of one call."""
    calls = []

    class Draft(CudaDecoder):
        def draft_chain(self, *given: Any) -> list[list[int]] | None:
            calls.append(super().draft_chain(*given))
            return calls[-1]

    monkeypatch.setattr(
        "outrider.engine.build.load_model",
        lambda name, **_: Draft.load(name, device=DEVICE, dtype=torch.float32),
    )
    expected = plain(folder, PROMPT, 40, temperature, 7)
    assert run(make_engine(folder, load(folder), 0), PROMPT, 40, temperature, 7) == expected
    speculative = make_engine(folder, load(folder), 4, draft_model=str(small), max_ahead_steps=1)
    assert run(speculative, PROMPT, 40, temperature, 7) == expected
    assert calls[0] is None  # catching up on the prompt
    assert all(call is not None and len(call[0]) <= 4 for call in calls[1:])
    together = [make_engine(folder, load(folder), k, draft_model=str(small)) for k in (0, 3)]
    batches = [run_all(engine, temperature) for engine in together]
    assert batches[0] == batches[1]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("num_drafts", [0, 1, 4])
def test_engine_takes_several_cycles_without_the_host(
    folder: Path,
    small: Path,
    temperature: float,
    num_drafts: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three sequences at once, to the very end of each: the tokens of one step after another."""
    monkeypatch.setattr("outrider.engine.build.load_model", lambda name, **_: load(name))
    monkeypatch.setattr("outrider.engine.step.LIMIT_S", 60.0)
    written = []
    for most in (1, 8):
        engine = make_engine(
            folder, load(folder), num_drafts, draft_model=str(small), max_ahead_steps=most
        )
        taken = count_runs(engine)["cuda"].calls
        written.append(run_all(engine, temperature))
        written.append([run(engine, PROMPT, 30, temperature, 3)])
    assert written[:2] == written[2:]
    assert max(taken) > 3
    assert sum(taken) > 20


@pytest.mark.parametrize(
    ("num_drafts", "limit_s", "least"), [(0, 0.0, 8), (2, 0.0, 8), (2, 1e9, 2)]
)
def test_cycles_in_flight_are_the_next_call_s(
    folder: Path,
    small: Path,
    num_drafts: int,
    limit_s: float,
    least: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device goes on while the host catches up; what comes between makes it start anew."""
    monkeypatch.setattr("outrider.engine.build.load_model", lambda name, **_: load(name))
    monkeypatch.setattr("outrider.engine.step.LIMIT_S", limit_s)  # 0: each call takes one step
    resumed: list[bool] = []
    real = Cycles.resume

    def noted(self: Cycles, batch: Decoding) -> bool:
        resumed.append(real(self, batch))
        return resumed[-1]

    monkeypatch.setattr(Cycles, "resume", noted)
    engine = make_engine(
        folder, load(folder), num_drafts, draft_model=str(small), max_ahead_steps=6
    )
    expected = plain(folder, PROMPT, 40, 0.8, 7)
    assert run(engine, PROMPT, 40, 0.8, 7) == expected
    assert sum(resumed) >= least
    assert sum(resumed) > len(resumed) - 4
    # Another request joins in the middle of the first and leaves before it.
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=7, ignore_eos=True)
    first, more = engine.add(PROMPT, params), ""
    for number, _ in enumerate(engine.run([first])):
        if number == 6:
            more = engine.add(PROMPT[:5], replace(params, max_tokens=9))
    assert engine.collect(first).tokens == expected
    assert engine.collect(more).tokens == plain(folder, PROMPT[:5], 9, 0.8, 7)


def test_cycles_stop_where_another_thread_wants_it(
    folder: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engine.build.load_model", lambda name, **_: load(name))
    monkeypatch.setattr("outrider.engine.step.LIMIT_S", 60.0)
    engine = make_engine(folder, load(folder), 2, draft_model=str(small), max_ahead_steps=6)
    taken = count_runs(engine)["cuda"].calls
    engine.interrupt()
    assert run(engine, PROMPT, 20, 0.8, 7) == plain(folder, PROMPT, 20, 0.8, 7)
    assert max(taken) == 1


def test_sequences_end_one_by_one_without_the_host(
    folder: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that may draft less because it ends takes the others' cycles, and is cut off."""
    monkeypatch.setattr("outrider.engine.build.load_model", lambda name, **_: load(name))
    monkeypatch.setattr("outrider.engine.step.LIMIT_S", 60.0)
    uneven: list[bool] = []
    lengths: list[tuple[int, int]] = []  # of a reported chain, and of what was left

    def noted(self: CudaExecutor, batch: Decoding, *given: Any) -> list[StepResult]:
        left = list(batch.num_left_S)
        results = decode(self, batch, *given)
        assert isinstance(batch.plan, Chain)
        uneven.append(bool(results) and len(set(batch.plan.num_tokens)) > 1)
        for result in results:
            for s, (proposal, verdict) in enumerate(
                zip(result.proposals, result.verdicts, strict=True)
            ):
                lengths.append((len(proposal), left[s]))
                left[s] -= len(verdict.path) + 1
        return results

    decode = CudaExecutor.decode
    monkeypatch.setattr(CudaExecutor, "decode", noted)
    written = []
    for most in (1, 3):
        engine = make_engine(folder, load(folder), 4, draft_model=str(small), max_ahead_steps=most)
        params = SamplingParams(temperature=0.8, seed=9, ignore_eos=True)
        requests = [
            engine.add(PROMPT[:length], replace(params, max_tokens=count))
            for length, count in ((3, 17), (21, 26), (12, 35))
        ]
        for _ in engine.run(requests):
            pass
        written.append([engine.collect(request).tokens for request in requests])
    assert written[0] == written[1]
    assert any(uneven)
    assert all(length < left for length, left in lengths)


def test_auto_drafts_evenly_and_prices_what_it_prepares(
    folder: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.engine.build.load_model", lambda name, **_: load(name))
    target = load(folder)
    buckets = ((1, 2), (4, 1))
    engine = make_engine(folder, target, "auto", draft_model=str(small), buckets=buckets)
    [executor] = engine.executors.fast
    assert isinstance(executor, CudaExecutor)
    assert {(n, k) for n, k, _ in executor.cycles} == {(1, 0), (1, 8), *buckets}
    controller = engine.policy
    assert isinstance(controller, AdaptivePolicy)
    assert not controller.costs.verify.is_guess
    assert "draft-model" in controller.costs.drafts
    assert executor.measure(None, 16, 4, 64) is None  # too wide
    asked: list[list[int]] = []
    real = controller.decide

    def noted(*given: Any) -> Decision:
        decision = real(*given)
        asked.append(decision.budgets)
        return decision

    monkeypatch.setattr(controller, "decide", noted)
    together = run_all(engine, 0.8)
    assert together == run_all(make_engine(folder, load(folder), 0), 0.8)
    assert any(len(set(some)) == 1 for some in asked if len(some) == 3)
    assert max(max(some) for some in asked) <= 2  # what was prepared


@pytest.mark.parametrize("rule", ["token", "block", "tree"])
def test_ratio_rules_without_the_host(
    folder: Path, small: Path, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole batch judged on the device, and each sequence by itself: the same tokens."""
    monkeypatch.setattr("outrider.engine.build.load_model", lambda name, **_: load(name))
    judged: list[int] = []

    def together(
        self: RatioVerifier, views: Any, proposals: list[Proposal], laws: Any
    ) -> list[Verdict]:
        if not any(map(len, proposals)):
            return alone(self, views, proposals, laws)
        rows = zip(proposals, laws.starts, strict=True)
        p = [laws.probs(start, start + 1 + len(draft)) for draft, start in rows]
        judged.append(len(p))
        return self.verify_all(views, proposals, p)

    def alone(
        self: RatioVerifier, views: Any, proposals: list[Proposal], laws: Any
    ) -> list[Verdict]:
        decisions = []
        for view, draft, start in zip(views, proposals, laws.starts, strict=True):
            p_MV = laws.probs(start, start + 1 + len(draft))
            decisions.append(self.decide(p_MV, draft, accept_uniforms(view, len(draft))))
        tokens = draw_next(views, decisions)
        return [Verdict(d.path, token) for d, token in zip(decisions, tokens, strict=True)]

    written = []
    for verify in (together, alone):
        monkeypatch.setattr(RatioVerifier, "verify", verify)
        engine = make_engine(folder, load(folder), 3, draft_model=str(small), verifier=rule)
        written.append(run_all(engine, 0.8))
    assert written[0] == written[1]
    assert max(judged) == 3


def test_drafts_leave_room_for_everybody(
    folder: Path, small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass wider than those captured would cost more than any draft can win."""
    target = load(folder)
    assert [target.most_drafts(n) for n in (1, 4, 16, 17, 32, 33, 64, 65)] == [
        15, 15, 3, 1, 1, 0, 0, 0,
    ]  # fmt: skip
    monkeypatch.setattr("outrider.engine.build.load_model", lambda name, **_: load(name))
    engine = make_engine(folder, target, 4, draft_model=str(small))
    drafted: dict[int, int] = {}
    params = SamplingParams(max_tokens=4, seed=1, ignore_eos=True, n=17, temperature=1.0)
    for step in engine.run([engine.add(PROMPT[:3], params)]):
        most = max((len(event.draft_tokens) for event in step.events), default=0)
        drafted[len(step.events)] = max(most, drafted.get(len(step.events), 0))
    assert drafted[17] == 1
    (finding,) = examine_passes(engine)
    assert finding.text.endswith("up to 16 tokens a sequence and 64 in all")
    advice = [
        Advice(batch, name, k, 1.5, 0.5)
        for batch, name, k in [(1, "draft-model", 4), (16, "draft-model", 3), (32, None, 0)]
    ]
    (finding,) = examine_passes(engine, advice)
    assert finding.text.endswith("--buckets 1x0,1x3,1x4,1x5,16x0,16x2,16x3,32x0")
    assert ("captured in" in finding.text) == (DEVICE == "cuda")


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("num_drafts", "num_others"), [(0, 0), (1, 0), (4, 0), (1, 2), (4, 1)])
def test_cycle_writes_the_same_tokens(
    folder: Path, small: Path, temperature: float, num_drafts: int, num_others: int
) -> None:
    """The whole cycle on the device against the engine, for two sequences of different length."""
    target, draft = load(folder), load(small) if num_drafts else None
    cycle = Cycle(
        target,
        draft,
        num_drafts=num_drafts,
        num_others=num_others,
        num_sequences=2,
        max_length=100,
    )
    prompts = [PROMPT, PROMPT[:2]]
    cycle.start(prompts, temperature=temperature, seed=5)
    outputs, cycles = cycle.generate(32)
    assert outputs[0] == plain(folder, PROMPT, 32, temperature, 5)
    assert cycles <= 33
    if num_drafts == 4:
        assert cycles < 32  # the two models agree now and then
        again = Cycle(target, None, num_drafts=0, num_sequences=2, max_length=100)
        again.start(prompts, temperature=temperature, seed=5)
        assert again.generate(32)[0] == outputs


def test_runners_up_save_cycles(folder: Path, small: Path) -> None:
    """The same tokens in fewer cycles, reported as chains."""
    taken = []
    for num_others in (0, 2):
        cycle = Cycle(
            load(folder), load(small), num_drafts=3, num_others=num_others, max_length=200
        )
        cycle.start([PROMPT], temperature=0.8, seed=4)
        taken.append(cycle.generate(96))
    assert taken[0][0] == taken[1][0]
    assert taken[1][1] < taken[0][1]


@pytest.mark.parametrize(
    ("drawn", "chain", "emitted"),
    [
        ([9, 37, 5, 6], [9, 4, 5], [9, 37]),
        ([9, 4, 5, 6], [9], [9, 4]),  # the draft after the runner-up is what the target drew
    ],
)
def test_drafts_after_an_accepted_runner_up_count_as_refused(
    drawn: list[int], chain: list[int], emitted: list[int]
) -> None:
    chains = [[3, 4, 5]]
    assert read_report([[2, *drawn, 5]], chains) == ([emitted], [0])
    assert chains == [chain]


def test_kernels_run_the_whole_cycle(folder: Path, small: Path) -> None:
    """Interpreted, or on the GPU: every kernel in its place."""
    pytest.importorskip("triton")
    results = []
    for ops in (TritonOps, TorchOps):
        target, draft = load(small), load(small).round_weights()
        cycle = Cycle(target, draft, num_drafts=2, num_others=1, max_length=40)
        for model in (target, draft):
            model.ops = ops(model.device) if ops is TritonOps else TorchOps()
            if isinstance(model.ops, TritonOps):
                model.ops.reserve(64, 4, 16, 64, 64)
        cycle.start([PROMPT], temperature=0.9, seed=2)
        results.append(cycle.generate(2))
    assert results[0] == results[1]
