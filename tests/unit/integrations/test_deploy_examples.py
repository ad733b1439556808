"""The deployment examples: linted, and they say things that our command line understands."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from outrider.cli.app import app

DEPLOY = Path(__file__).parents[3] / "deploy"

# Of the manifest's objects, the fields that it may use, and what each holds.
METADATA: dict[str, Any] = {"name": str, "labels": dict}
PORT: dict[str, Any] = {"name": str, "containerPort": int}
PROBE: dict[str, Any] = {
    "httpGet": {"path": str, "port": (str, int)},
    "tcpSocket": {"port": (str, int)},
    "periodSeconds": int,
    "failureThreshold": int,
    "initialDelaySeconds": int,
    "timeoutSeconds": int,
}
CONTAINER: dict[str, Any] = {
    "name": str,
    "image": str,
    "args": [str],
    "env": [{"name": str, "value": str}],
    "ports": [PORT],
    "startupProbe": PROBE,
    "readinessProbe": PROBE,
    "livenessProbe": PROBE,
    "lifecycle": {"preStop": {"exec": {"command": [str]}}},
    "resources": {"limits": dict, "requests": dict},
    "volumeMounts": [{"name": str, "mountPath": str, "readOnly": bool}],
}
VOLUME: dict[str, Any] = {
    "name": str,
    "persistentVolumeClaim": {"claimName": str, "readOnly": bool},
    "secret": {"secretName": str, "defaultMode": int},
}
POD: dict[str, Any] = {
    "terminationGracePeriodSeconds": int,
    "securityContext": {"runAsNonRoot": bool, "runAsUser": int, "fsGroup": int},
    "containers": [CONTAINER],
    "volumes": [VOLUME],
}
KINDS: dict[str, dict[str, Any]] = {
    "Deployment": {
        "apiVersion": str,
        "kind": str,
        "metadata": METADATA,
        "spec": {
            "replicas": int,
            "selector": {"matchLabels": dict},
            "template": {"metadata": METADATA, "spec": POD},
        },
    },
    "Service": {
        "apiVersion": str,
        "kind": str,
        "metadata": METADATA,
        "spec": {
            "selector": dict,
            "ports": [{"name": str, "port": int, "targetPort": (str, int)}],
        },
    },
}


def misfits(value: Any, schema: Any, where: str = "") -> list[str]:
    """Where a value has fields or types that its schema does not know."""
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            return [f"{where}: not an object"]
        found = [f"{where}.{key}: no such field" for key in value if key not in schema]
        known = [key for key in value if key in schema]
        return found + [
            m for key in known for m in misfits(value[key], schema[key], where + "." + key)
        ]
    if isinstance(schema, list):
        if not isinstance(value, list):
            return [f"{where}: not a list"]
        return [
            m for i, item in enumerate(value) for m in misfits(item, schema[0], f"{where}[{i}]")
        ]
    is_right = isinstance(value, schema) and (schema is not int or not isinstance(value, bool))
    return [] if is_right else [f"{where}: {value!r} has the wrong type"]


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
    text = (DEPLOY / "outrider.service").read_text().replace("\\\n", "")
    command = re.search(r"^ExecStart=(.+)$", text, re.MULTILINE)
    assert command is not None
    program, verb, *args = shlex.split(command[1])
    assert (Path(program).name, verb) == ("outrider", "serve")
    stop = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert stop is not None
    assert int(stop[1]) > parsed(args)["drain_timeout_s"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    """With a program that exists: systemd asks for that, too."""
    text = (DEPLOY / "outrider.service").read_text()
    unit = tmp_path / "outrider.service"
    unit.write_text(text.replace("ExecStart=/opt/outrider/bin/outrider", "ExecStart=/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_the_image_is_well_formed() -> None:
    """Known instructions, in an order that builds; not run as root; nothing left behind."""
    lines = (DEPLOY / "Containerfile").read_text().splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    names = [name for name, _ in steps]
    known = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "HEALTHCHECK", "STOPSIGNAL"}
    assert set(names) <= known | {"ENTRYPOINT", "CMD"}
    assert names[0] == "FROM"
    assert re.fullmatch(r"[\w./-]+:[\w.-]+", steps[0][1])  # pinned, not whatever is latest
    assert names.index("COPY") < max(i for i, name in enumerate(names) if name == "RUN")
    assert f"--uid {int(dict(steps)['USER'])} " in " ".join(rest for _, rest in steps)
    assert all("rm -rf /var/lib/apt/lists" in rest for _, rest in steps if "apt-get" in rest)
    assert all("--no-cache-dir" in rest for _, rest in steps if "pip install" in rest)
    assert "constraints.txt" in " ".join(rest for _, rest in steps)


def test_the_image_serves() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    lists = {name: json.loads(found) for name, found in re.findall(r"^(\w+) (\[.+\])$", text, re.M)}
    assert lists["ENTRYPOINT"] == ["outrider", "serve"]
    assert parsed(lists["CMD"])["host"] == "0.0.0.0"


def test_the_manifest_has_only_fields_that_exist() -> None:
    for thing in manifest():
        assert not misfits(thing, KINDS[thing["kind"]], thing["kind"])


def test_a_wrong_manifest_is_noticed() -> None:
    wrong = {"spec": {"replicas": "2", "selecter": {}, "ports": {}}}
    schema = {"spec": {"replicas": int, "selector": dict, "ports": [dict]}}
    assert misfits(wrong, schema) == [
        ".spec.selecter: no such field",
        ".spec.replicas: '2' has the wrong type",
        ".spec.ports: not a list",
    ]


def test_the_manifest_serves_on_vllm_and_drains() -> None:
    deployment, service = manifest()
    pod = deployment["spec"]["template"]["spec"]
    container = pod["containers"][0]
    options = parsed(container["args"])
    assert options["backend"] == "vllm"
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert options["tensor_parallel_size"] == gpus
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > options["drain_timeout_s"] + pause
    assert container["ports"][0]["containerPort"] == options["port"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    built = (DEPLOY / "Containerfile").read_text()
    assert f"-t {container['image']} " in built
    assert f"USER {pod['securityContext']['runAsUser']}\n" in built
    secret = next(volume["secret"] for volume in pod["volumes"] if "secret" in volume)
    assert secret["defaultMode"] & 0o040  # a secret's files are root's: the group must read them
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


class StandIn(ModuleType):
    """What the example needs of `ray.serve`."""

    @staticmethod
    def deployment(**options: Any) -> Any:
        def decorate(cls: Any) -> Any:
            cls.bind = classmethod(lambda own, *args: (own, args))
            cls.options = options
            return cls

        return decorate


class Asked:
    def __init__(self, **body: Any) -> None:
        self._body = body

    async def json(self) -> dict[str, Any]:
        return dict(self._body)


def test_the_ray_example_runs_but_for_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = ModuleType("ray")
    ray.serve = StandIn("ray.serve")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.serve", ray.serve)
    spec = importlib.util.spec_from_file_location("ray_serve", DEPLOY / "ray_serve.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    cls, places = example.app
    assert places == ("/models/target", "/models/draft")
    replica = cls("bundled", "bundled:draft")

    async def go() -> list[Any]:
        await replica.check_health()
        answers = [
            await replica(Asked(prompt="def f(x):", max_tokens=4)),
            await replica(Asked(max_tokens=4)),
            await replica(Asked(prompt="x", max_tokens=-1)),
        ]
        await replica.engine.close()
        return answers

    good, *bad = asyncio.run(go())
    assert good["text"]
    assert all(list(answer) == ["error"] for answer in bad)
