"""What is counted about the tree, and the ledger of what still breaks a rule.

    python -m architecture.scan        writes ledger.json from the tree as it is

Run it from the root with PYTHONPATH=src:tests. The ledger may only shrink: a commit that makes it
longer needs a reason in its message.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "outrider"
TESTS = ROOT / "tests"
LEDGER = Path(__file__).parent / "ledger.json"

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60
# Names of proposers that mean something else there.
HEADS = {
    "mtp",
    "dflash",
    "eagle",
    "eagle3",
    "medusa",
    "mlp",
    "p-eagle",
}  # kinds of heads, which are formats and recipes as well
OTHER_MEANINGS = {
    "model/": HEADS,
    "train/": HEADS | {"early-exit"},
    "cli/train.py": HEADS | {"early-exit"},
    "testing.py": HEADS,
    "export/": HEADS,
    "cli/generate.py": {"prediction"},  # fields of requests
    "llm.py": {"prediction"},
    "server/": {"prediction", "suffix"},
    "bench/workloads.py": {"prediction"},
    "integrations/vllm/front.py": {"prediction"},
    "integrations/vllm/mapping.py": HEADS,  # methods of vLLM
    "bench/peers/": {"ngram"},
}
KERNELS = {"cuda/kernels.py", "cuda/cycle_kernels.py"}  # Triton: one program is one function

# A package or module may import those of its own line and of the lines above.
ORDER = (
    "errors parameters events __version__",
    "contracts draft_plans registry",
    "config server_config options",
    "native",
    "noise sampling layout statistics origins",
    "cuda kv verifiers",
    "model grammar",
    "policy",
    "proposers theory",
    "executors",
    "engine",
    "llm testing",
    "outrider",  # the package itself: `from outrider import LLM`
    "server prove bench doctor plan train learn export plots integrations",
    "cli __main__",
)
LEVELS = {unit: level for level, line in enumerate(ORDER) for unit in line.split()}


@cache
def modules() -> dict[str, Path]:
    """Every module by its dotted name below `outrider`; the package itself is ""."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """(module below `outrider`, name) of every import of ours, also inside functions; name is ""
    for a whole module. Imports under TYPE_CHECKING cost nothing and do not count."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for other in child.orelse:
                yield from imports(other)
        elif isinstance(child, ast.ImportFrom):
            if not child.level and (child.module or "").split(".")[0] == "outrider":
                for alias in child.names:
                    yield (child.module or "").removeprefix("outrider").lstrip("."), alias.name
        elif isinstance(child, ast.Import):
            for alias in child.names:
                if alias.name.split(".")[0] == "outrider":
                    yield alias.name.removeprefix("outrider").lstrip("."), ""
        else:
            yield from imports(child)


def imported(module: str) -> set[str]:
    """The modules of ours that a module imports."""
    found = set()
    for source, name in imports(tree(modules()[module])):
        inner = f"{source}.{name}".lstrip(".")
        if inner in modules():
            found.add(inner)
        elif source or name not in ("", "__version__"):
            found.add(source)
    return found - {module}


def unit(module: str) -> str:
    return module.split(".")[0] or "outrider"


def level(module: str) -> int:
    assert unit(module) in LEVELS, f"give {unit(module)!r} a place in scan.ORDER"
    return LEVELS[unit(module)]


def edges_upwards() -> list[str]:
    """Imports against ORDER."""
    found = []
    for module in modules():
        if module == "":
            continue  # it imports its names on first use
        for other in imported(module):
            if level(other) > level(module):
                found.append(f"{module} -> {other or 'outrider'}")
    return sorted(found)


def cycles() -> list[str]:
    """Groups of modules that import each other, with imports inside functions counted."""
    reached = {module: _reached(module) for module in modules() if module}
    groups = {
        " ".join(sorted(m for m in reached if m in reached[module] and module in reached[m]))
        for module in reached
        if module in reached[module]
    }
    return sorted(groups)


def _reached(module: str) -> set[str]:
    found: set[str] = set()
    todo = [module]
    while todo:
        for other in imported(todo.pop()):
            if other and other not in found:
                found.add(other)
                todo.append(other)
    return found


def long_files() -> list[str]:
    return [
        _name(path)
        for path in modules().values()
        if len(path.read_text(encoding="utf-8").splitlines()) > MAX_FILE_LINES
    ]


def long_functions() -> list[str]:
    found = []
    for path in modules().values():
        if _name(path) in KERNELS:
            continue
        for node in ast.walk(tree(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if (node.end_lineno or 0) - start + 1 > MAX_FUNCTION_LINES:
                    found.append(f"{_name(path)}: {node.name}")
    return sorted(found)


def _name(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def spelled_proposers() -> list[str]:
    """Files that spell a proposer's name in a string, other than the registry and its own file."""
    from outrider.registry import proposer_names

    names = set(proposer_names())
    found = set()
    for path in modules().values():
        own = path.stem.replace("_", "-") if path.parent.name == "proposers" else None
        if _name(path) == "registry.py":
            continue
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Constant) or node.value not in names - {own}:
                continue
            if not _means_something_else(_name(path), str(node.value)):
                found.add(f"{_name(path)}: {node.value}")
    return sorted(found)


def _means_something_else(file: str, name: str) -> bool:
    return any(file.startswith(place) and name in n for place, n in OTHER_MEANINGS.items())


def first_import() -> list[str]:
    """The modules of ours that `from outrider import LLM` loads, in a fresh interpreter."""
    code = "import sys\nfrom outrider import LLM\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "src")},
    )
    return [name for name in done.stdout.split() if name.split(".")[0] == "outrider"]


# --- the tests ------------------------------------------------------------------------------------


def files_of_tests() -> list[Path]:
    return [path for path in sorted(TESTS.rglob("*.py")) if path.parent.name != "architecture"]


def private_names() -> Counter[str]:
    """Names with a leading underscore that tests import from us, read of an object, or patch."""
    found: Counter[str] = Counter()
    for path in files_of_tests():
        for node in ast.walk(tree(path)):
            found.update(name for name in _names(node) if _is_private(name))
    return found


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "outrider":
        return [alias.name for alias in node.names]
    if isinstance(node, ast.Attribute):
        is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        return [] if is_own or ast.unparse(node) == "os._exit" else [node.attr]
    if isinstance(node, ast.Call) and _called(node) in ("setattr", "getattr", "delattr"):
        words = [a.value for a in node.args if isinstance(a, ast.Constant)]
        return [str(word).split(".")[-1] for word in words]
    return []


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _is_private(name: str) -> bool:
    return name.startswith("_") and len(name) > 1 and not name.startswith("__")


def private_modules() -> list[str]:
    """Modules with a leading underscore that tests import from."""
    found = set()
    for path in files_of_tests():
        for source, name in imports(tree(path)):
            for module in (source, f"{source}.{name}"):
                if module in modules() and _is_private(module.split(".")[-1]):
                    found.add(module)
    return sorted(found)


def uses_of_parts() -> int:
    """`engine.parts` in tests: an attribute of an expression that ends with engine or core."""
    count = 0
    for path in files_of_tests():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and node.attr == "parts":
                count += ast.unparse(node.value).lower().rstrip("()").endswith(("engine", "core"))
    return count


# --- the ledger -----------------------------------------------------------------------------------

LISTS = {
    "edges upwards": edges_upwards,
    "import cycles": cycles,
    "long files": long_files,
    "long functions": long_functions,
    "spelled proposers": spelled_proposers,
    "private modules in tests": private_modules,
}


@cache
def counts() -> dict[str, int]:
    names = private_names()
    return {
        "modules of the first import": len(first_import()),
        "private names in tests": len(names),
        "uses of private names in tests": sum(names.values()),
        "uses of Engine.parts in tests": uses_of_parts(),
    }


def read() -> dict[str, Any]:
    ledger: dict[str, Any] = json.loads(LEDGER.read_text(encoding="utf-8"))
    return ledger


def main() -> None:
    ledger = {"counts": counts()} | {name: found() for name, found in LISTS.items()}
    LEDGER.write_text(json.dumps(ledger, indent=1) + "\n", encoding="utf-8")
    for name, count in private_names().most_common():
        print(count, name)


if __name__ == "__main__":
    main()
