"""Groups of requests, and lanes that step apart from others."""

from __future__ import annotations

import pytest

from outrider.engine.engine import Engine
from outrider.engine.lane import Group, Lane, take_turns
from outrider.engine.request import Speculation
from outrider.errors import RequestError
from outrider.llm import LLM
from outrider.sampling import SamplingParams
from outrider.testing import write_tiny_llama

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3)
SUFFIX = Speculation(proposer="suffix", num_draft_tokens=8)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    target = write_tiny_llama(tmp_path_factory.mktemp("lane") / "target", vocab_size=128)
    return LLM(str(target), num_draft_tokens=4).engine


def test_a_group_is_collected_in_order(engine: Engine) -> None:
    prompts = [[5, 6, 7], [8, 9]]
    group = Group(engine)
    for prompt in prompts:
        group.add(prompt, PARAMS)
    assert [result.prompt_tokens for result in group.run()] == prompts
    assert all(len(result.tokens) == 24 for result in group.results)


def test_leaving_a_group_keeps_what_is_confirmed(engine: Engine) -> None:
    group = Group(engine)

    def run_and_fail() -> None:
        with group:
            group.add([5, 6, 7], PARAMS)
            next(iter(group))
            group.add([], PARAMS)

    with pytest.raises(RequestError):
        run_and_fail()
    [result] = group.results
    assert result.completions[0].finish_reason == "cancelled"
    assert 0 < len(result.tokens) < 24
    assert not engine.has_work
    assert engine.kv.usage == 0


def test_lanes_decode_what_their_engine_decodes(engine: Engine) -> None:
    expected = Group(engine)
    expected.add([5, 6, 7], PARAMS)
    [alone] = expected.run()
    lanes = [Lane(engine), Lane(engine)]
    for lane in lanes:
        lane.add([5, 6, 7], PARAMS)
    moved = [lane for lane, _ in take_turns(lanes, lambda lane: lane.stats.num_tokens)]
    assert {moved[0], moved[1]} == {*lanes}
    for lane in lanes:
        lane.close()
        assert [result.tokens for result in lane.results] == [alone.tokens]
        assert lane.stats.num_tokens == 24
        assert lane.seconds == pytest.approx(sum(seconds for _, seconds in lane.steps))


def test_no_lane_replays_an_output(engine: Engine) -> None:
    """Sampled outputs of a tiny model are noise: only a replay could draft half of them."""
    for lane in (Lane(engine), Lane(engine)):
        for _ in range(2):
            lane.add([5, 6, 7], PARAMS, speculation=SUFFIX)
            for _ in take_turns([lane], lambda lane: lane.seconds):
                pass
        lane.close()
        assert [result.stats.num_accepted < 12 for result in lane.results] == [True, True]
