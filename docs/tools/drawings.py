"""Draws docs/drawings/*.svg: one step, the KV cache, the coupled rule, trees, the choice.

Colours follow the reader's light or dark setting. A test compares them with what is drawn anew.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

sys.path.append(str(Path(__file__).parent))

from results import ranked

FOLDER = Path(__file__).parents[1] / "drawings"
STYLE = """
svg { --ink: #24292f; --soft: #6e7781; --line: #afb8c1; --paper: #f6f8fa;
  --keep: #dafbe1; --kept: #1a7f37; --drop: #ffebe9; --dropped: #cf222e;
  --own: #fff8c5; --owned: #9a6700; --new: #ddf4ff; --newer: #0969da; }
@media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; --soft: #9198a1; --line: #3d444d;
  --paper: #1c2128; --keep: #12361f; --kept: #3fb950; --drop: #4a1d20; --dropped: #f85149;
  --own: #3b2e0a; --owned: #d29922; --new: #10294a; --newer: #4493f8; } }
text { font-family: system-ui, -apple-system, 'Segoe UI', sans-serif; font-size: 13px;
  fill: var(--ink); }
.mono { font-family: ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace;
  font-size: 12px; }
.soft { fill: var(--soft); } .small { font-size: 11.5px; } .bold { font-weight: 600; }
.mid { text-anchor: middle; } .end { text-anchor: end; }
rect { rx: 4px; stroke-width: 1.2; }
.box { fill: var(--paper); stroke: var(--line); }
.keep { fill: var(--keep); stroke: var(--kept); }
.drop { fill: var(--drop); stroke: var(--dropped); }
.own { fill: var(--own); stroke: var(--owned); } .new { fill: var(--new); stroke: var(--newer); }
.free { fill: none; stroke: var(--line); stroke-dasharray: 3 3; }
.frame { fill: none; stroke: var(--soft); }
.t-keep { fill: var(--kept); } .t-drop { fill: var(--dropped); } .t-own { fill: var(--owned); }
.t-new { fill: var(--newer); }
path { fill: none; stroke: var(--soft); stroke-width: 1.4; }
path.strong { stroke: var(--kept); stroke-width: 2.2; }
path.gone { stroke: var(--dropped); stroke-dasharray: 4 3; }
.head { fill: var(--soft); stroke: none; }
"""


class Picture:
    def __init__(self, width: int, height: int, title: str) -> None:
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title><style>{STYLE}</style>",
            '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
        ]

    def box(self, x: float, y: float, w: float, h: float, kind: str = "box") -> None:
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{w}" height="{h}"/>')

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self.parts.append(f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>')

    def cell(
        self, x: float, y: float, w: float, text: str, kind: str = "box", h: float = 26
    ) -> None:
        self.box(x, y, w, h, kind)
        self.text(x + w / 2, y + h / 2 + 4.3, text, "mono mid")

    def line(self, d: str, kind: str = "", arrow: bool = True) -> None:
        end = ' marker-end="url(#a)"' if arrow else ""
        self.parts.append(f'<path class="{kind}" d="{d}"{end}/>')

    def save(self, folder: Path, name: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = "\n".join([*self.parts, "</svg>", ""])
        (folder / f"{name}.svg").write_text(text, encoding="utf-8")


def one_step() -> Picture:
    """The five stages, with the tokens of one sequence going through them."""
    p = Picture(860, 470, "One step of the engine: plan, draft, forward, verify, commit")
    stages = [
        ("plan", "which sequences run,", "how many tokens of each", "scheduler"),
        ("draft", "guess a few tokens", "for each", "controller, proposers"),
        ("forward", "ONE pass of the target", "over everything", "model"),
        ("verify", "accept or reject guesses,", "add one token", "sampling, verifiers"),
        ("commit", "keep accepted K/V,", "roll back the rest", "kv, stops, events"),
    ]
    for i, (name, first, second, who) in enumerate(stages):
        x = 10 + i * 170
        p.box(x, 10, 156, 92, "new" if name == "forward" else "box")
        p.text(x + 78, 33, name, "mid bold")
        p.text(x + 78, 54, first, "mid small")
        p.text(x + 78, 70, second, "mid small")
        p.text(x + 78, 91, who, "mid small soft")
        if i:
            p.line(f"M{x - 13} 56L{x - 2} 56")
    p.text(10, 138, "One sequence in these stages (K = 4):", "bold")

    left, w = 262, 84

    def row(y: float, name: str, note: str = "") -> None:
        p.text(10, y + 17, name, "")
        if note:
            p.text(10, y + 33, note, "small soft")

    row(156, "text so far", "in the KV cache, except the last")
    for i, token in enumerate(["def", "add", "(a, b):"]):
        p.cell(left + i * w, 156, w - 8, token)
    row(206, "draft", "four guesses")
    guesses = ["return", "a", "+", "c"]
    for i, token in enumerate(guesses):
        p.cell(left + (i + 3) * w, 206, w - 8, token, "new")
    row(256, "the pass reads", "the last token and all guesses")
    for i, token in enumerate(["(a, b):", *guesses]):
        p.cell(left + (i + 2) * w, 256, w - 8, token, "box" if i == 0 else "new")
    row(306, "the target's own draw", "after each of them")
    for i, token in enumerate(["return", "a", "+", "b", "…"]):
        kind = "keep" if i < 3 else "own" if i == 3 else "free"
        p.cell(left + (i + 2) * w, 306, w - 8, token, kind)
        p.line(f"M{left + (i + 2) * w + 38} 283L{left + (i + 2) * w + 38} 304")
    for i in range(3):
        x = left + (i + 3) * w
        p.text(x - 4, 300, "=", "mid t-keep bold")
    p.text(left + 6 * w - 4, 300, "≠", "mid t-drop bold")
    row(372, "emitted", "accepted drafts, then a correction")
    for i, (token, kind) in enumerate(
        [("return", "keep"), ("a", "keep"), ("+", "keep"), ("b", "own")]
    ):
        p.cell(left + (i + 3) * w, 372, w - 8, token, kind)
    row(422, "K/V kept", "slots of rejected guesses are released")
    for i, token in enumerate(["def", "add", "(a, b):", "return", "a", "+"]):
        p.cell(left + i * w, 422, w - 8, token, "box" if i < 2 else "keep")
    p.cell(left + 6 * w, 422, w - 8, "c", "drop")
    return p


def kv_rollback() -> Picture:
    """A table of blocks before, during and after a step."""
    p = Picture(860, 330, "Reserve, write and roll back slots of the paged KV cache")
    size, gap, left = 20, 10, 168

    def x_of(slot: int) -> float:
        return left + slot * size + slot // 8 * gap

    def frame(y: float, blocks: int, freed: int = 0) -> None:
        for block in range(blocks):
            p.box(x_of(block * 8) - 3, y - 3, 8 * size + 4, 28, "frame")
        for block in range(blocks, blocks + freed):
            p.box(x_of(block * 8) - 3, y - 3, 8 * size + 4, 28, "free")

    def slots(y: float, first: int, texts: str, kind: str) -> None:
        for i, text in enumerate(texts):
            p.cell(x_of(first + i), y, size - 2, text if text != " " else "", kind, 22)

    rows = [
        (30, "before the step", "21 slots hold K/V"),
        (95, "reserve(26)", "a root and four drafts"),
        (160, "forward writes", "r root, d drafts"),
        (225, "two accepted", "root and 2 drafts stand"),
        (290, "commit(24)", "the rest is rolled back"),
    ]
    for y, name, note in rows:
        p.text(10, y + 11, name, "bold")
        p.text(10, y + 27, note, "small soft")
    frame(30, 3)
    slots(30, 0, " " * 16, "box")
    slots(30, 16, "ccccc", "box")
    slots(30, 21, "   ", "free")
    frame(95, 4)
    slots(95, 0, " " * 16, "box")
    slots(95, 16, "ccccc", "box")
    slots(95, 21, " " * 11, "free")
    frame(160, 4)
    slots(160, 0, " " * 16, "box")
    slots(160, 16, "ccccc", "box")
    slots(160, 21, "rdddd", "new")
    slots(160, 26, " " * 6, "free")
    frame(225, 4)
    slots(225, 0, " " * 16, "box")
    slots(225, 16, "ccccc", "box")
    slots(225, 21, "rdd", "keep")
    slots(225, 24, "dd", "drop")
    slots(225, 26, " " * 6, "free")
    frame(290, 3, 1)
    slots(290, 0, " " * 16, "box")
    slots(290, 16, "ccccc", "box")
    slots(290, 21, "rdd", "box")
    p.text(x_of(24) + 80, 306, "freed at once", "mid small soft")
    for block in range(4):
        p.text(x_of(block * 8), 18, f"block {block}", "small soft")
    return p


def kv_tree() -> Picture:
    """A tree in the slots, who sees whom, and the copy that makes the path contiguous."""
    p = Picture(860, 300, "A draft tree in the KV cache: attention mask and compaction")
    nodes = {0: (60, 160), 1: (150, 95), 2: (150, 225), 3: (240, 60), 4: (240, 130), 5: (240, 225)}
    names = {0: "r", 1: "a", 2: "b", 3: "c", 4: "d", 5: "e"}
    parents = {1: 0, 2: 0, 3: 1, 4: 1, 5: 2}
    path = {0, 2, 5}
    p.text(10, 24, "The draft", "bold")
    for child, parent in parents.items():
        (x1, y1), (x2, y2) = nodes[parent], nodes[child]
        kept = child in path
        p.line(f"M{x1 + 30} {y1 + 13}L{x2 - 2} {y2 + 13}", "strong" if kept else "gone", kept)
    for node, (x, y) in nodes.items():
        p.cell(x, y, 30, names[node], "keep" if node in path else "drop")
    p.text(60, 285, "b and e were accepted", "small soft")

    p.text(320, 24, "Who sees whom in the pass", "bold")
    for row in range(6):
        p.text(345, 70 + row * 28, names[row], "mono mid")
        p.text(373 + row * 28, 46, names[row], "mono mid")
        seen, node = {row}, row
        while node in parents:
            node = parents[node]
            seen.add(node)
        for column in range(6):
            kind = "new" if column in seen else "free"
            p.box(360 + column * 28, 53 + row * 28, 25, 25, kind)
    p.text(345, 240, "all rows see the whole context;", "small soft")
    p.text(345, 257, "of the new tokens only ancestors", "small soft")

    p.text(570, 24, "The slots", "bold")
    p.text(570, 60, "as written", "small soft")
    for i in range(6):
        p.cell(570 + i * 44, 70, 40, names[i], "keep" if i in path else "drop")
    p.text(570, 201, "compacted: two copies", "small soft")
    for i, node in enumerate(sorted(path)):
        p.cell(570 + i * 44, 156, 40, names[node], "keep")
    for i in range(3, 6):
        p.box(570 + i * 44, 156, 40, 26, "free")
    p.line("M678 98L639 154", "strong")
    p.line("M810 98L684 154", "strong")
    p.text(570, 236, "then committed like a chain;", "small soft")
    p.text(570, 253, "the three last slots are free again", "small soft")
    return p


def coupled() -> Picture:
    """Both models draw with the noise of the position."""
    p = Picture(860, 300, "The coupled rule: target and drafter draw with the same noise")
    p.text(10, 24, "One position, one draw of noise, named by (seed, position)", "bold")
    tokens = ["return", "yield", "pass"]
    columns = [("log q + noise (drafter)", 40, "new"), ("log p + noise (target)", 470, "keep")]
    noise = [0.9, 1.6, -0.3]
    q = [-0.7, -0.8, -2.5]
    pp = [-0.4, -1.0, -2.2]
    for (title, x, kind), log_probs in zip(columns, (q, pp), strict=True):
        p.text(x, 60, title, "")
        sums = [a + b for a, b in zip(log_probs, noise, strict=True)]
        best = sums.index(max(sums))
        for i, token in enumerate(tokens):
            y = 76 + i * 40
            p.text(x, y + 17, token, "mono")
            p.text(x + 64, y + 17, f"{log_probs[i]:+.1f} {noise[i]:+.1f} =", "mono soft")
            length = 60 + sums[i] * 28
            p.box(x + 172, y, length, 24, kind if i == best else "box")
            p.text(x + 180, y + 16.5, f"{sums[i]:+.1f}", "mono")
    p.text(40, 222, "largest: yield is drafted", "t-new")
    p.text(470, 222, "largest: yield is drawn and emitted, for any draft", "t-keep")
    p.line("M395 130L455 130")
    p.text(425, 118, "same noise", "mid small soft")
    p.text(
        10,
        262,
        "Plain decoding makes the draw on the right and nothing else. So the text is",
        "soft",
    )
    p.text(
        10, 282, "the same; the draft only decides whether a pass covers one more position.", "soft"
    )
    return p


def choice() -> Picture:
    """Which proposer: who wins a leaf, and by how much, is read from the measured table."""
    new, known = ("code completion", "prose"), ("edit", "JSON")
    leaves = [
        ("Is the output known, but not from the prompt?", ("prediction",), ("edit",)),
        ("Does the output repeat its input or itself?", ("suffix", "ngram"), known),
        (
            "Is there a small model with the same vocabulary?",
            ("draft-model", "draft-tree", "hybrid"),
            new,
        ),
        ("A small model with another vocabulary?", ("cross-vocab",), new),
        ("Can you train a head for the target?", ("eagle3", "dflash", "medusa"), new),
        ("", ("quantized", "lookahead"), new),
    ]
    p = Picture(880, 62 * len(leaves) + 70, "A decision tree for choosing a proposer")
    for i, (question, names, kinds) in enumerate(leaves):
        y = 10 + 62 * i
        (winner, speeds), *others = ranked(names, kinds)
        x = 430.0 if question else 10.0
        if question:
            p.box(10, y, 340, 40)
            p.text(180, y + 25, question, "mid")
            p.line(f"M352 {y + 20}L428 {y + 20}")
            p.text(390, y + 14, "yes", "mid small t-keep")
            p.line(f"M180 {y + 41}L180 {y + 60}")
            p.text(190, y + 56, "no", "small t-drop")
        width = 140 if question else 340
        p.box(x, y, width, 40, "keep")
        p.text(x + width / 2, y + 25, winner, "mid mono")
        measured = ", ".join(f"{k} {s:.2f}" for k, s in zip(kinds, speeds, strict=True))
        p.text(x + width + 12, y + (17 if others else 25), f"{measured} times plain", "small")
        if others:
            name, speeds = others[0]
            text = f"next: {name}, {' and '.join(f'{s:.2f}' for s in speeds)}"
            p.text(x + width + 12, y + 33, text, "small soft")
    y = 10 + 62 * len(leaves)
    p.text(10, y + 14, "Then measure on your own prompts: outrider bench decode.", "soft")
    p.text(
        10, y + 34, "Many requests at once: -k auto, which drafts less as the batch grows.", "soft"
    )
    return p


def bias() -> Picture:
    """The two-token counter-example in areas."""
    p = Picture(860, 250, "The wrong rule and the right rule on two tokens")
    scale, base = 150, 200

    def bar(x: float, parts: list[tuple[float, str, str]]) -> None:
        y = float(base)
        for height, kind, label in parts:
            y -= height * scale
            p.box(x, y, 54, height * scale, kind)
            if label:
                p.text(x + 27, y + height * scale / 2 + 4, label, "mid small")

    groups = [
        ("the target, p", [[(0.5, "box", "0.5")], [(0.5, "box", "0.5")]]),
        ("the draft, q", [[(0.9, "new", "0.9")], [(0.1, "new", "0.1")]]),
        (
            "refused: drawn from p",
            [
                [(0.5, "keep", "0.5"), (0.2, "drop", "0.2")],
                [(0.1, "keep", "0.1"), (0.2, "drop", "0.2")],
            ],
        ),
        (
            "refused: drawn from the residual",
            [[(0.5, "keep", "0.5")], [(0.1, "keep", "0.1"), (0.4, "own", "0.4")]],
        ),
    ]
    for i, (name, bars) in enumerate(groups):
        x = 20 + i * 215
        for j, parts in enumerate(bars):
            bar(x + j * 66, parts)
            p.text(x + j * 66 + 27, base + 16, f"token {j + 1}", "mid small soft")
        p.text(x + 60, base + 38, name, "mid")
    p.text(450 + 60, 30, "0.7 and 0.3: wrong", "mid t-drop bold")
    p.text(665 + 60, 30, "0.5 and 0.5: p", "mid t-keep bold")
    return p


DRAWINGS = {
    "one-step": one_step,
    "kv-rollback": kv_rollback,
    "kv-tree": kv_tree,
    "coupled": coupled,
    "choice": choice,
    "bias": bias,
}


def draw_all(folder: Path) -> None:
    for name, draw in DRAWINGS.items():
        draw().save(folder, name)


if __name__ == "__main__":
    draw_all(FOLDER)
