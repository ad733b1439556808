"""The prompts of benchmarks/proposers.py: five kinds of work for a small model of Python code."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Workload:
    """`predictions`: what a caller could guess of each output; empty where there is no guess."""

    name: str
    prompts: list[str]
    temperature: float = 0.0
    num_tokens: int = 100
    predictions: list[str] = field(default_factory=list)

    def prediction(self, index: int) -> str:
        return self.predictions[index] if self.predictions else ""


CODE = [
    '''import os
import json


class ConfigReader:
    """Reads settings from a file."""

    def __init__(self, path):
        self.path = path
        self.values = {}

    def load(self):
''',
    '''def merge_sorted(left, right):
    """Merge two sorted lists into one."""
    result = []
    i = 0
    j = 0
''',
    """import unittest


class TestCalculator(unittest.TestCase):
    def setUp(self):
        self.calculator = Calculator()

    def test_add(self):
        self.assertEqual(self.calculator.add(1, 2), 3)

""",
    """class Node(object):
    def __init__(self, name, parent=None):
        self.name = name
        self.parent = parent
        self.children = []

    def add_child(self, child):
""",
    """from setuptools import setup


def read(filename):
    with open(filename) as handle:
        return handle.read()


def parse_version(text):
""",
    """def check_type(value, expected, name="value"):
    if not isinstance(value, expected):
        raise TypeError("{} must be {}, not {}".format(name, expected, type(value)))


def check_range(value, low, high, name="value"):
""",
]

PROSE = [
    '''def connect(host, port, timeout=10):
    """Open a connection to the server.

    The connection is kept open until it is closed by the caller. If the server does not answer
    within the given time,
''',
    '''"""Tools for reading and writing archives.

This module provides a simple interface to archives of files. An archive can be opened for reading
or for writing, and
''',
    '''class Cache:
    """A cache that forgets what was not used for a long time.

    Every entry has a size. When the sum of all sizes is larger than the limit, the entries that
''',
    '''# Licensed under the Apache License, Version 2.0 (the "License");
# you may not use this file except in compliance with the License.

"""Schedules jobs.

A job is a function together with the time at which it should run. The scheduler
''',
]

FUNCTIONS = [
    (
        """def load_records(path, delimiter=",", encoding="utf-8"):
    records = []
    with open(path, encoding=encoding) as handle:
        header = handle.readline().strip().split(delimiter)
        for number, line in enumerate(handle, start=2):
            line = line.strip()
            if not line:
                continue
            fields = line.split(delimiter)
            if len(fields) != len(header):
                raise ValueError("line %d has %d fields" % (number, len(fields)))
            record = dict(zip(header, fields))
            record["line"] = number
            records.append(record)
    return records
""",
        ("records", "rows", "items"),
    ),
    (
        """def send_request(self, method, url, params=None, data=None, headers=None):
    request_headers = dict(self.headers)
    if headers is not None:
        request_headers.update(headers)
    if params is not None:
        url = url + "?" + urlencode(params)
    self.logger.debug("sending %s request to %s", method, url)
    response = self.session.request(method, url, data=data, headers=request_headers)
    if response.status_code == 401:
        self.refresh_token()
        response = self.session.request(method, url, data=data, headers=request_headers)
    if response.status_code >= 400:
        self.logger.error("request to %s failed with %d", url, response.status_code)
        raise RequestError(response.status_code, response.text)
    return response.json()
""",
        ("response", "answer", "reply"),
    ),
    (
        """def find_path(graph, start, goal):
    queue = deque([start])
    previous = {start: None}
    while queue:
        current = queue.popleft()
        if current == goal:
            break
        for neighbor in graph[current]:
            if neighbor not in previous:
                previous[neighbor] = current
                queue.append(neighbor)
    if goal not in previous:
        return None
    path = []
    current = goal
    while current is not None:
        path.append(current)
        current = previous[current]
    path.reverse()
    return path
""",
        ("queue", "pending", "nodes"),
    ),
    (
        """def build_parser(self):
    parser = argparse.ArgumentParser(description=self.description)
    parser.add_argument("source", help="the file to read")
    parser.add_argument("target", help="the file to write")
    parser.add_argument("--encoding", default="utf-8", help="the encoding of both files")
    parser.add_argument("--verbose", action="store_true", help="print every line")
    parser.add_argument("--force", action="store_true", help="overwrite the target")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--upper", action="store_true", help="convert to upper case")
    group.add_argument("--lower", action="store_true", help="convert to lower case")
    return parser
""",
        ("parser", "options", "flags"),
    ),
]

RECORDS = [
    """[
  {"id": 1, "name": "Anna", "email": "anna@example.com", "active": true, "roles": ["admin"]},
  {"id": 2, "name": "Bernd", "email": "bernd@example.com", "active": false, "roles": ["user"]},
  {"id": 3, "name": "Clara",""",
    """{
  "name": "tools",
  "version": "1.2.0",
  "dependencies": [
    {
      "name": "requests",
      "version": "2.31.0",
      "optional": false
    },
    {
      "name": "numpy",""",
    """{"type": "FeatureCollection", "features": [
{"type": "Feature", "properties": {"name": "A"}, "geometry": {"type": "Point", "at": [0.0, 1.0]}},
{"type": "Feature", "properties": {"name": "B"}, "geometry": {"type": "Point", "at": [1.0, 2.0]}},
""",
]


def rename(function: str, names: tuple[str, str, str]) -> tuple[str, str]:
    """A function as it was, with one name changed, and the beginning of a second change.

    So small a model copies what it has seen twice. Also returned: the last version.
    """
    first, second, third = names
    versions = [function, function.replace(first, second), function.replace(first, third)]
    lines = versions[2].splitlines(keepends=True)
    cut = max(3, next(i for i, line in enumerate(lines) if third in line) + 1)
    seen = "\n\n".join(f"# version {i}\n{text}" for i, text in enumerate(versions[:2], 1))
    return f"{seen}\n\n# version 3\n{''.join(lines[:cut])}", versions[2]


def workloads() -> list[Workload]:
    edits = [rename(*function) for function in FUNCTIONS]
    return [
        Workload(name="code completion", prompts=CODE),
        Workload(name="prose", prompts=PROSE),
        Workload(
            name="edit",
            prompts=[prompt for prompt, _ in edits],
            predictions=[function for function, _ in FUNCTIONS],
        ),
        Workload(name="JSON", prompts=RECORDS),
        Workload(name="code, T = 1", prompts=CODE, temperature=1.0),
    ]
