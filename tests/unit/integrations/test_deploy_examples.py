"""The deployment examples say things that our command line understands."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from outrider.cli.app import app

DEPLOY = Path(__file__).parents[3] / "examples/deploy"


def parsed(args: list[str]) -> dict[str, Any]:
    """What `outrider serve` makes of arguments; raises a usage error for wrong ones."""
    root: Any = typer.main.get_command(app)
    context = typer.Context(root)
    params: dict[str, Any] = root.get_command(context, "serve").make_context("serve", args).params
    return params


def manifest() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def test_the_unit_serves_and_has_time_to_drain() -> None:
    text = (DEPLOY / "outrider.service").read_text()
    command = re.search(r"^ExecStart=(.+)$", text, re.MULTILINE)
    assert command is not None
    program, verb, *args = shlex.split(command[1])
    assert (Path(program).name, verb) == ("outrider", "serve")
    stop = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert stop is not None
    assert int(stop[1]) > parsed(args)["drain_timeout"]


def test_the_image_serves() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    lists = {name: json.loads(found) for name, found in re.findall(r"^(\w+) (\[.+\])$", text, re.M)}
    assert lists["ENTRYPOINT"] == ["outrider", "serve"]
    assert parsed(lists["CMD"])["host"] == "0.0.0.0"


def test_the_manifest_serves_on_vllm_and_drains() -> None:
    deployment, service = manifest()
    pod = deployment["spec"]["template"]["spec"]
    container = pod["containers"][0]
    options = parsed(container["args"])
    assert options["backend"] == "vllm"
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert options["tensor_parallel_size"] == gpus
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > options["drain_timeout"] + pause
    assert container["ports"][0]["containerPort"] == options["port"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
