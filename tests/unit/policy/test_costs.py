"""Cost tables: interpolation, learning from steps, and the copy on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random

import pytest

from outrider.policy import cache
from outrider.policy.costs import (
    USUAL_CONTEXT,
    Costs,
    CostTable,
    batch_bucket,
    between,
    draft_table,
    interpolate,
    verify_table,
)


def test_buckets_double() -> None:
    assert [batch_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]


def test_lines_between_points_and_beyond_them() -> None:
    points = {1: 1.0, 5: 2.0, 9: 6.0}
    assert [between(points, x) for x in (0, 1, 3, 5, 7, 9, 10)] == [1, 1, 1.5, 2, 4, 6, 7]
    assert between({1: 2.0, 4: 1.0}, 10) == 1.0  # faster with width was noise
    assert interpolate({1: 2.0, 2: 1.0, 3: 3.0}) == [1.5, 1.5, 1.5, 3.0]  # noise, shared out


def test_a_verify_table_is_linear_in_context() -> None:
    table = verify_table({64: {1: 1.0, 9: 2.0, 17: 4.0}, 1088: {1: 2.0, 9: 4.0}})
    assert table.context_s == pytest.approx(1.0 / 1024)
    assert table.pair_s == pytest.approx(1.0 / 1024 / 8)
    usual = USUAL_CONTEXT - 64
    assert table.seconds(0, 1) == pytest.approx(1 + usual / 1024)
    assert table.seconds(0, 9) == pytest.approx(2 + 2 * usual / 1024)
    assert table.context_cost(1, USUAL_CONTEXT) == 0.0
    assert table.context_cost(2, 2 * USUAL_CONTEXT + 1024) == pytest.approx(1.0)


def test_sequences_read_their_own_context() -> None:
    table = verify_table({256: {1: 1.0, 33: 2.0}}, {16: {16: 3.0 + 15 / 32}})
    assert table.seconds(4, 16) == pytest.approx(3.0 + 15 / 32)
    assert table.seconds(0, 16) == pytest.approx(1.0 + 15 / 32)


def test_a_draft_table_starts_at_nothing() -> None:
    table = draft_table({1: {1: 1.0, 4: 4.0}, 4: {1: 1.3, 4: 5.2}}, 16)
    assert [table.seconds(0, k) for k in (0, 1, 2, 8)] == [0.0, 1.0, 2.0, 8.0]
    assert table.seconds(2, 4) == pytest.approx(5.2)
    assert table.seconds(1, 4) == pytest.approx(4.4)


def test_wide_passes_follow_the_last_slope() -> None:
    table = CostTable({1: [1.0 + 0.1 * n for n in range(33)]}, measured=True)
    assert table.seconds(0, 100) == pytest.approx(11.0)
    assert table.seconds(0, 9000) == pytest.approx(901.0)


def test_a_guess_takes_its_speed_from_the_first_step() -> None:
    costs = Costs.guess()
    assert costs.verify.is_guess
    costs.verify.learn(0, 1, 0.5)
    assert costs.verify.seconds(0, 1) == pytest.approx(0.5, rel=0.1)
    assert costs.verify.seconds(0, 5) == pytest.approx(0.5 * 1.15 / 1.03, rel=0.1)
    assert costs.draft_s("anything", 0, 1) == pytest.approx(0.015, rel=0.1)


def test_steps_teach_a_batchs_costs_and_the_machines_speed() -> None:
    table = CostTable({1: interpolate({1: 1.0, 33: 2.0})}, measured=True)
    random = Random(0)
    for _ in range(300):
        table.learn(0, 1, 2.0 * random.gauss(1, 0.05))
        table.learn(0, 5, 5.0 * random.gauss(1, 0.05))
    assert table.seconds(0, 1) == pytest.approx(2.0, rel=0.08)
    assert table.seconds(0, 5) == pytest.approx(5.0, rel=0.08)
    assert table.seconds(0, 9) >= table.seconds(0, 5)
    known = table.seconds(0, 1), table.seconds(0, 33)
    for _ in range(100):
        table.learn(0, 1, 2.0 * known[0])
    slower = table.seconds(0, 1) / known[0], table.seconds(0, 33) / known[1]
    assert slower == pytest.approx((2.0, 2.0), rel=0.3)  # a machine slows down as a whole


def test_a_disturbed_step_changes_little() -> None:
    table = CostTable({1: interpolate({1: 1.0, 33: 2.0})}, measured=True)
    for _ in range(50):
        table.learn(0, 1, 1.0)
    table.learn(0, 1, 1000.0)
    assert table.seconds(0, 1) < 1.1
    table.learn(0, 1, 0.0)
    table.learn(0, 1, -1.0)  # a clock that went backwards
    assert table.seconds(0, 1) > 0.9


@pytest.mark.parametrize(
    ("offset", "factor", "slope"), [(0.5, 1.0, 0.0), (0.0, 0.4, 0.0), (0.0, 1.0, 0.1)]
)
def test_a_wrong_measurement_is_corrected_at_all_counts(
    offset: float, factor: float, slope: float
) -> None:
    """Whether something constant was left out, the moment was slow, or a token costs more."""
    row = [1.0 + 0.05 * n for n in range(129)]
    true = [offset + factor * cell + slope * n for n, cell in enumerate(row)]
    table = CostTable({1: row}, measured=True)
    for _ in range(80):
        for count in (1, 5, 9):
            table.learn(0, count, true[count])
    found = [table.seconds(0, n) for n in (1, 3, 5, 9, 17)]
    assert found == pytest.approx([true[n] for n in (1, 3, 5, 9, 17)], rel=0.08)


def test_one_disturbed_count_does_not_become_a_cliff() -> None:
    table = CostTable({1: [1.0 + 0.05 * n for n in range(65)]}, measured=True)
    for _ in range(40):
        for count in (1, 5, 9):
            table.learn(0, count, 1.0 + 0.05 * count)
    table.learn(0, 13, 5.0, 4)  # a probe in a slow moment
    assert table.seconds(0, 13) == pytest.approx(1.65, rel=0.1)


def test_plain_steps_of_a_large_batch_do_not_make_drafts_free() -> None:
    # 0.3 a sequence, of which 0.2 was measured, beside 0.02 a token: 8 sequences have drafted 3
    # each, then 32 come.
    row = [1.0 + 0.02 * n for n in range(129)]
    table = CostTable({1: row, 2: [cell + 0.2 for cell in row]}, measured=True)

    def took(num_sequences: int, num_tokens: int) -> float:
        return 1.0 + 0.02 * num_tokens + 0.3 * num_sequences

    for _ in range(64):
        for num_sequences, num_tokens in ((8, 8), (8, 32), (32, 32)):
            batch = batch_bucket(num_sequences)
            table.learn(batch, num_tokens, took(num_sequences, num_tokens))
    found = table.row(batch_bucket(32), 64)
    assert 0.5 < table.speed * (found[64] - found[32]) < 1.2
    found = table.row(batch_bucket(8), 64)
    assert table.speed * (found[32] - found[8]) == pytest.approx(0.48, rel=0.1)


def test_prices_of_all_counts_recover_from_a_slow_moment_of_the_machine() -> None:
    """Else the K in use alone would become cheap again, and stay for ever."""
    true = [2.0 + 0.1 * n for n in range(17)]
    table = CostTable({1: true}, measured=True)
    for slowness, counts in ((1.0, (1, 5, 9)), (3.0, (5,)), (1.0, (5,))):
        for step in range(100):
            count = counts[step % len(counts)]
            table.learn(0, count, slowness * true[count])
    for count in (1, 5, 9):
        assert table.seconds(0, count) == pytest.approx(true[count], rel=0.2)


# --- on disk ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path / "costs"


IDENTITY: dict[str, object] = {"model": "a", "threads": [1, 2]}


def example() -> Costs:
    costs = Costs(verify_table({64: {1: 1.0, 5: 2.0}}))
    costs.drafts["ngram"] = draft_table({1: {1: 0.1}}, 16)
    costs.refused["ngram"] = 7
    return costs


def test_saved_costs_come_back(folder: Path) -> None:
    assert cache.load(IDENTITY) is None
    cache.save(IDENTITY, example())
    found = cache.load(IDENTITY)
    assert found is not None
    assert found.verify.to_dict() == example().verify.to_dict()
    assert found.drafts["ngram"].to_dict() == example().drafts["ngram"].to_dict()
    assert found.refused == {"ngram": 7}
    assert cache.load({**IDENTITY, "model": "b"}) is None
    assert [path.suffix for path in folder.iterdir()] == [".json"]  # no temporary file is left


@pytest.mark.parametrize(
    "damage",
    [
        lambda record: "",
        lambda record: "[]",
        lambda record: json.dumps(record)[:-40],
        lambda record: json.dumps(record | {"format": 0}),
        lambda record: json.dumps(record | {"saved_at": 0}),
        lambda record: json.dumps(record | {"identity": {}}),
        lambda record: json.dumps(record | {"costs": {}}),
        lambda record: json.dumps(record | {"costs": record["costs"] | {"refused": {"a": -1}}}),
        lambda record: json.dumps(record | {"costs": record["costs"] | {"refused": 1}}),
        lambda record: json.dumps(
            record | {"costs": {"verify": {"rows": {"1": [1.0]}}, "drafts": {}}}
        ),
        lambda record: json.dumps(record).replace("1.0", "NaN"),
        lambda record: json.dumps(record).replace("1.0", '"1"'),
    ],
)
def test_stale_and_damaged_files_are_ignored(folder: Path, damage: object) -> None:
    cache.save(IDENTITY, example())
    (path,) = folder.iterdir()
    assert callable(damage)
    path.write_text(damage(json.loads(path.read_text())))
    assert cache.load(IDENTITY) is None


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.cache_folder() == tmp_path / "outrider" / "costs"


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    cache.save(IDENTITY, example())
    assert cache.load(IDENTITY) is None
