"""Cost tables: interpolation, learning from steps, and the copy on disk."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random

import pytest

from outrider.control import cost_cache
from outrider.control.cost import (
    NUM_BATCH_BUCKETS,
    NUM_CONTEXT_BUCKETS,
    Costs,
    CostTable,
    batch_bucket,
    between,
    bucket_context,
    context_bucket,
    draft_table,
    interpolate,
    verify_table,
)


def test_buckets_double() -> None:
    assert [context_bucket(n) for n in (0, 511, 512, 1023, 1024, 4096)] == [0, 0, 1, 1, 2, 4]
    assert [batch_bucket(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]
    assert context_bucket(10**9) == NUM_CONTEXT_BUCKETS - 1
    assert batch_bucket(10**9) == NUM_BATCH_BUCKETS - 1
    assert all(context_bucket(int(bucket_context(b))) == b for b in range(NUM_CONTEXT_BUCKETS))


def test_lines_between_points_and_beyond_them() -> None:
    points = {1: 1.0, 5: 2.0, 9: 6.0}
    assert [between(points, x) for x in (0, 1, 3, 5, 7, 9, 10)] == [1, 1, 1.5, 2, 4, 6, 7]
    assert between({1: 2.0, 4: 1.0}, 10) == 1.0  # faster with width was noise
    assert interpolate({1: 2.0, 2: 1.0, 3: 3.0}) == [1.5, 1.5, 1.5, 3.0]  # noise, shared out


def test_a_verify_table_is_linear_in_context() -> None:
    table = verify_table({64: {1: 1.0, 9: 2.0, 17: 4.0}, 1088: {1: 2.0, 9: 4.0}})
    per_token = 1.0 / 1024
    short, long = bucket_context(0), bucket_context(3)
    assert table.seconds(0, 1) == pytest.approx(1 + (short - 64) * per_token)
    assert table.seconds(3, 1) == pytest.approx(1 + (long - 64) * per_token)
    assert table.seconds(3, 9) == pytest.approx(2 + 2 * (long - 64) * per_token)
    assert table.seconds(0, 17) > table.seconds(0, 9)


def test_a_draft_table_starts_at_nothing() -> None:
    table = draft_table({1: {1: 1.0, 4: 4.0}, 4: {1: 1.3, 4: 5.2}}, 16)
    assert [table.seconds(0, k) for k in (0, 1, 2, 8)] == [0.0, 1.0, 2.0, 8.0]
    assert table.seconds(2, 4) == pytest.approx(5.2)
    assert table.seconds(1, 4) == pytest.approx(4.4)


def test_wide_passes_follow_the_last_slope() -> None:
    table = CostTable([[1.0 + 0.1 * n for n in range(33)]], measured=True)
    assert table.seconds(0, 100) == pytest.approx(11.0)
    assert table.seconds(0, 9000) == pytest.approx(901.0)


def test_a_guess_takes_its_scale_from_the_first_step() -> None:
    costs = Costs.guess()
    assert costs.verify.is_guess
    costs.verify.refresh(0, 1, 0.5)
    assert costs.verify.seconds(0, 1) == pytest.approx(0.5, rel=0.1)
    assert costs.verify.seconds(0, 5) == pytest.approx(0.5 * 1.15 / 1.03, rel=0.1)
    assert costs.draft_s("anything", 0, 1) == pytest.approx(0.05, rel=0.1)


def test_steps_teach_their_own_cell_and_the_machines_speed() -> None:
    table = CostTable([interpolate({1: 1.0, 33: 2.0})] * 2, measured=True)
    random = Random(0)
    for _ in range(300):
        table.refresh(0, 1, 2.0 * random.gauss(1, 0.05))
        table.refresh(0, 5, 5.0 * random.gauss(1, 0.05))
    assert table.seconds(0, 1) == pytest.approx(2.0, rel=0.08)
    assert table.seconds(0, 5) == pytest.approx(5.0, rel=0.08)
    assert table.seconds(0, 9) >= table.seconds(0, 5)  # a wider pass never looks cheaper
    assert table.seconds(1, 1) == pytest.approx(2.0, rel=0.08)  # no context has shown otherwise
    known = table.seconds(0, 1), table.seconds(0, 33)
    for _ in range(100):
        table.refresh(0, 1, 2.0 * known[0])
    slower = table.seconds(0, 1) / known[0], table.seconds(0, 33) / known[1]
    assert slower == pytest.approx((2.0, 2.0), rel=0.3)  # a machine slows down as a whole


def test_a_disturbed_step_changes_little() -> None:
    table = CostTable([interpolate({1: 1.0, 33: 2.0})], measured=True)
    for _ in range(50):
        table.refresh(0, 1, 1.0)
    table.refresh(0, 1, 1000.0)
    assert table.seconds(0, 1) < 1.1
    table.refresh(0, 1, 0.0)
    table.refresh(0, 1, -1.0)  # a clock that went backwards
    assert table.seconds(0, 1) > 0.9


def test_what_the_measurement_left_out_is_added_everywhere() -> None:
    table = CostTable([[1.0 + 0.01 * n for n in range(129)]], measured=True)
    for _ in range(16):
        table.refresh(0, 5, 1.55)
        table.refresh(0, 32, 1.82)
    row = table.row(0, 128)
    assert [row[n] for n in (1, 5, 16, 96)] == pytest.approx([1.51, 1.55, 1.66, 2.46], rel=0.08)


def test_what_was_measured_in_a_busy_moment_is_too_dear_by_a_factor() -> None:
    table = CostTable([[1.0 + 0.01 * n for n in range(129)]], measured=True)
    for _ in range(16):
        table.refresh(0, 50, 0.9)
    found = [table.seconds(0, n) for n in (1, 50, 100)]
    assert found == pytest.approx([0.606, 0.9, 1.2], rel=0.08)


def test_a_table_far_too_dear_is_right_after_a_few_steps() -> None:
    table = CostTable([[7.0 + 0.07 * n for n in range(129)]], measured=True)
    for n in (3, 5, 5, 4, 5, 5, 3, 5):
        table.refresh(0, n, 1.0 + 0.01 * n)
    assert [table.seconds(0, n) for n in (1, 5, 9)] == pytest.approx([1.01, 1.05, 1.09], rel=0.2)


def test_where_much_is_known_a_cheap_count_says_nothing_about_the_others() -> None:
    table = CostTable([[1.0 + 0.05 * n for n in range(33)]], measured=True)
    for _ in range(32):
        table.refresh(0, 1, 1.05)
    for _ in range(8):
        table.refresh(0, 9, 1.1)
    assert table.seconds(0, 9) == pytest.approx(1.1, rel=0.05)
    assert table.seconds(0, 1) == pytest.approx(1.05, rel=0.05)


def test_between_two_visited_counts_lies_a_line() -> None:
    table = CostTable([[1.0] * 33], measured=True)
    for _ in range(16):
        table.refresh(0, 2, 1.0)
        table.refresh(0, 8, 1.4)
    assert table.seconds(0, 5) == pytest.approx(1.2, rel=0.08)


def test_plain_steps_of_a_large_batch_do_not_make_drafts_free() -> None:
    # 0.3 a sequence, of which 0.2 was measured, beside 0.02 a token: 8 sequences have drafted 3
    # each, then 32 come.
    table = CostTable([[1.0 + 0.02 * n for n in range(129)]], measured=True, each_s=0.2)

    def took(num_sequences: int, num_tokens: int) -> float:
        return 1.0 + 0.02 * num_tokens + 0.3 * num_sequences

    for _ in range(64):
        for num_sequences, num_tokens in ((8, 8), (8, 32), (32, 32)):
            batch = batch_bucket(num_sequences)
            table.refresh(0, num_tokens, took(num_sequences, num_tokens), batch)
    row = table.row(0, 64, batch_bucket(32))
    assert 0.6 < table.scale * (row[64] - row[32]) < 1.0
    row = table.row(0, 64, batch_bucket(8))
    assert table.scale * (row[32] - row[8]) == pytest.approx(0.48, rel=0.1)


def test_a_few_steps_of_a_probe_do_not_price_what_is_wider() -> None:
    table = CostTable([[1.0 + 0.1 * n for n in range(65)]], measured=True)
    for _ in range(200):
        table.refresh(0, 8, 1.8)
    table.refresh(0, 10, 3.0, num_steps=4)  # in a slow moment
    assert table.seconds(0, 32) == pytest.approx(4.2, rel=0.05)


def test_a_token_of_context_has_its_price_inside_a_bucket() -> None:
    table = CostTable([[1.0] * 9], measured=True, context_s=0.001)
    middle = int(bucket_context(0))
    assert table.off_middle_s(0, 0, middle) == 0.0
    assert table.off_middle_s(0, 0, middle + 100) == pytest.approx(0.1)
    assert table.off_middle_s(0, 2, 4 * middle - 200) == pytest.approx(-0.2)  # of four sequences


def test_what_context_costs_is_read_off_the_measurement() -> None:
    points = {64: {1: 1.0, 9: 1.2}, 1064: {1: 1.5, 9: 1.7}}
    assert verify_table(points).context_s == pytest.approx(0.0005)
    assert verify_table({64: {1: 1.0, 9: 1.2}}).context_s == 0.0


# --- on disk ----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path / "costs"


IDENTITY: dict[str, object] = {"model": "a", "threads": [1, 2]}


def example() -> Costs:
    costs = Costs(verify_table({64: {1: 1.0, 5: 2.0}}))
    costs.drafts["ngram"] = draft_table({1: {1: 0.1}}, 16)
    return costs


def test_saved_costs_come_back(folder: Path) -> None:
    assert cost_cache.load(IDENTITY) is None
    cost_cache.save(IDENTITY, example())
    found = cost_cache.load(IDENTITY)
    assert found is not None
    assert found.verify.rows == example().verify.rows
    assert found.drafts["ngram"].rows == example().drafts["ngram"].rows
    assert cost_cache.load({**IDENTITY, "model": "b"}) is None
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
        lambda record: json.dumps(record | {"costs": {"verify": [[1.0]], "drafts": {}}}),
        lambda record: json.dumps(record).replace("1.0", "NaN"),
        lambda record: json.dumps(record).replace("1.0", '"1"'),
    ],
)
def test_stale_and_damaged_files_are_ignored(folder: Path, damage: object) -> None:
    cost_cache.save(IDENTITY, example())
    (path,) = folder.iterdir()
    assert callable(damage)
    path.write_text(damage(json.loads(path.read_text())))
    assert cost_cache.load(IDENTITY) is None


def test_the_folder_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OUTRIDER_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cost_cache.cache_folder() == tmp_path / "outrider" / "costs"


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "file"))
    cost_cache.save(IDENTITY, example())
    assert cost_cache.load(IDENTITY) is None


def test_prices_of_all_counts_recover_from_a_slow_moment_of_the_machine() -> None:
    """Else the K in use alone would become cheap again, and stay for ever."""
    true = [2.0 + 0.1 * n for n in range(17)]
    table = CostTable([true] * NUM_CONTEXT_BUCKETS, measured=True)
    for slowness, counts in ((1.0, (1, 5, 9)), (3.0, (5,)), (1.0, (5,))):
        for step in range(100):
            count = counts[step % len(counts)]
            table.refresh(0, count, slowness * true[count])
    for count in (1, 5, 9):
        assert table.seconds(0, count) == pytest.approx(true[count], rel=0.2)
