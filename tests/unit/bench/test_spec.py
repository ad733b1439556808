"""`bench spec`: chats through the template, answers that end, means over categories."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest

import gguf_files
from outrider import LLM
from outrider.bench import spec as bench
from outrider.bench.contenders import make_jobs
from outrider.bench.decode import ours
from outrider.bench.peers import find_peers
from outrider.bench.settings import Peers, Settings
from outrider.bench.spec import ALL_CATEGORIES, SIX_CATEGORIES, spec
from outrider.bench.workloads import CATEGORIES, SIX, Prompt, load_category, parse_prompts
from outrider.errors import RequestError, UnknownName
from outrider.testing import write_tiny_llama

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("spec") / "tiny", vocab_size=128)
    path = folder / "tokenizer_config.json"
    held = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(held | {"chat_template": TEMPLATE}))
    return folder


def test_every_category_has_twenty_chats_that_end_with_the_user() -> None:
    for name in CATEGORIES:
        prompts = load_category(name).prompts
        assert len({prompt.text for prompt in prompts}) == 20
        assert all(prompt.messages[-1]["role"] == "user" for prompt in prompts)
    assert all(len(prompt.messages) == 3 for prompt in load_category("chat").prompts)
    with pytest.raises(UnknownName, match="mathematics"):
        load_category("maths")


def test_messages_go_through_the_template_of_the_model(model: Path) -> None:
    engine = LLM(str(model)).engine
    line = '{"messages": [{"role": "user", "content": "a b"}]}'
    [chat, text] = parse_prompts(f"{line}\na b\n", "file")
    assert chat.ids(engine.tokenizer) == engine.tokenizer.encode(
        "<user>a b\n<assistant>", special=False
    )
    assert text == Prompt("a b")
    jobs = make_jobs(engine, [chat, text], 8)
    assert [job.params.ignore_eos for job in jobs] == [False, True]
    assert [list(job.ends) for job in jobs] == [sorted(engine.tokenizer.eos_ids), []]
    for wrong in ('{"messages": []}', '{"messages": [{"role": "user"}]}', '{"messages": 3}'):
        with pytest.raises(RequestError, match="line 1 of file"):
            parse_prompts(wrong, "file")


def test_means_are_over_all_categories_and_outputs_are_identical(model: Path) -> None:
    engine = LLM(str(model)).engine
    settings = Settings(max_tokens=8, repeats=1, num_prompts=1)
    contenders = ours(engine, ["ngram"], [2])
    parts = list(spec(engine, contenders, [], CATEGORIES, [0.0, 0.8], settings, lambda what: None))
    assert len(parts) == 2 * len(CATEGORIES) + 1
    *rows, means = parts
    assert len(means) == 2 * 2 * 2  # temperatures, means, contenders
    of_six = [r for part in rows for r in part if r["workload"] in SIX and r["temperature"] == 0.0]
    drafted = [r["tokens_per_s"] for r in of_six if r["contender"] == "ngram K=2"]
    [mean] = [
        row
        for row in means
        if (row["workload"], row["temperature"], row["contender"])
        == (SIX_CATEGORIES, 0.0, "ngram K=2")
    ]
    assert mean["tokens_per_s"] == pytest.approx(prod(drafted) ** (1 / len(SIX)))
    assert mean["is_exact"]
    assert {row["workload"] for row in means} == {SIX_CATEGORIES, ALL_CATEGORIES}


def test_transformers_runs_a_gguf_target(model: Path, tmp_path: Path) -> None:
    path = str(gguf_files.from_folder(model, tmp_path / "model.gguf"))
    engine = LLM(path).engine
    [peer] = find_peers(path, None, Peers(transformers=True))
    settings = Settings(max_tokens=8, repeats=1)
    rows = peer.rows(engine, [load_category("json-records", 1)], settings, lambda what: None)
    assert {row["identical_to_ours"] for row in rows} == {"1/1"}


def test_a_budget_of_time_is_divided_among_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(bench, "perf_counter", lambda: now[0])
    budget = bench.Budget(minutes=1, num_places=3, most=20)
    assert budget.begin(lambda: 2.0) == 10  # 20 s for each
    now[0] = 50.0  # five seconds for each prompt, not two
    budget.end()
    assert budget.begin(lambda: 2.0) == 1
    now[0] = 51.0
    budget.end()
    assert budget.begin(lambda: 2.0) == 9
    assert bench.Budget(None, 3, most=20).begin(lambda: 2.0) == 20
