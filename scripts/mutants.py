"""Mutation tests: are small faults in the product found by the tests, and by the fast ones?

    python scripts/mutants.py list                                      # the mutants of the seed, as a patch each
    python scripts/mutants.py trace --out /tmp/trace -- -n 3 --dist loadfile --all
    python scripts/mutants.py kill --trace /tmp/trace --out /tmp/killed.json [--fast /tmp/fast.txt]
    python scripts/mutants.py table --before /tmp/before.json --after /tmp/killed.json

`trace` runs the tests in a copy of the checkout in which every function that can be mutated records the tests that
execute it, also in the processes that a test starts. `kill` applies one mutant after the other to a copy and runs only
the tests that execute its function, those of its package and the quickest first, until one fails or a time limit ends.
`--tree` names another checkout, such as an earlier version, and `--mutants` the mutants.json of its trace, because the
seed chooses others as soon as functions are added or moved. A mutant is found again by its file, function, and source
text. In place of a test that is no longer there, the tests of its function, file or folder run.
"""

from __future__ import annotations

import argparse
import ast
import collections
import concurrent.futures
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

ROOT = Path(__file__).resolve().parent.parent
SEED = 33
PER_PACKAGE = 5
CANDIDATES = 15  # of each package are traced, so that an equivalent mutant can be replaced without another trace
PACKAGES = (
    *("runtime/coordinator", "runtime/workers", "runtime/worker", "runtime/launcher", "training/checkpoint"),
    *("training/data", "runs", "runs/upload", "plan", "system", "emulated_sdk/_pod", "emulated_sdk/poptorch/device"),
)
MUTANTS = "mutants.json"  # in the folder of a trace
COLLECT_S = 300.0
# Mutants that no test can find, with the reason.
EQUIVALENT: Dict[str, str] = {
    "raypod/runtime/launcher/reaper.py:Reaper.run: selector.unregister(0) -> pass #0": "saves CPU time only",
    "raypod/runtime/launcher/supervision.py:Signals.__init__: False -> True #0": "`handled` sets it, too",
    "raypod/training/checkpoint/snapshots.py:SnapshotMemory.place: 0 -> 1 #0": "Linux knows the start of this process",
    "raypod/emulated_sdk/poptorch/device/execute/weight_update.py:NoUpdate.scales: "
    "return Scales(1.0, 1.0) -> return None #0": "read for the gradients and the scale of a training only",
    "raypod/system/remote/store.py:Digests.__init__: 0 -> 1 #0": "without checksums, the size of the parts is not used",
    "raypod/training/data/packed_samples.py:_encoded: False -> True #0": "`form_of` has refused arrays of objects",
}

_COMPARISONS = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
}
# Without the division: of most expressions with a slash, the operands are paths.
_OPERATORS = {ast.Add: "-", ast.Sub: "+", ast.Mult: "//", ast.FloorDiv: "*", ast.Mod: "+"}
_IGNORED = shutil.ignore_patterns(".git", ".venv", "site", "__pycache__", ".*_cache", "*.egg-info", "build")
_APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT


class Mutant(NamedTuple):
    """Replace `old`, the `number`-th occurrence of this text in a function, by `new`."""

    package: str
    file: str
    function: str
    old: str
    new: str
    number: int

    @property
    def name(self) -> str:
        """A name that is equal in all versions that contain the mutated text."""
        return f"{self.file}:{self.function}: {_one_line(self.old)} -> {_one_line(self.new)} #{self.number}"

    @property
    def place(self) -> str:
        """The file and the function."""
        return f"{self.file}:{self.function}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def functions(tree: ast.AST, prefix: str = "") -> Iterator[Tuple[str, Any]]:
    """Yield the qualified name and the node of each function, without those within functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def _nodes(function: Any) -> Iterator[ast.AST]:
    """Yield the nodes of a body, without annotations, and without f-strings, whose positions are wrong before 3.12."""
    waiting: List[ast.AST] = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, ast.JoinedStr):
            children = [child for child in ast.iter_child_nodes(node) if child is not getattr(node, "annotation", None)]
            waiting += reversed(children)


def _replacement(node: ast.AST, source: str) -> str:
    """Return the mutated text of a node; "" if it has none."""

    def text(part: ast.AST) -> str:
        return ast.get_source_segment(source, part) or ""

    def comparison(node: Any) -> str:
        return f"({text(node.left)} {_COMPARISONS[type(node.ops[0])]} {text(node.comparators[0])})"

    def connective(node: Any) -> str:
        word = " or " if isinstance(node.op, ast.And) else " and "
        return f"({word.join(f'({text(value)})' for value in node.values)})"

    def constant(node: Any) -> str:
        return str(not node.value if isinstance(node.value, bool) else node.value + 1)

    replacements: List[Tuple[Any, Callable[[Any], bool], Callable[[Any], str]]] = [
        (ast.Compare, lambda node: len(node.ops) == 1, comparison),
        (ast.BoolOp, bool, connective),
        (ast.UnaryOp, lambda node: isinstance(node.op, ast.Not), lambda node: f"({text(node.operand)})"),
        (
            ast.BinOp,
            lambda node: type(node.op) in _OPERATORS,
            lambda node: f"(({text(node.left)}) {_OPERATORS[type(node.op)]} ({text(node.right)}))",
        ),
        (ast.Constant, lambda node: isinstance(node.value, (bool, int)), constant),
        (ast.IfExp, bool, lambda node: f"({text(node.orelse)} if {text(node.test)} else {text(node.body)})"),
        (ast.Return, lambda node: not isinstance(node.value, (ast.Constant, type(None))), lambda node: "return None"),
        (ast.Expr, lambda node: isinstance(node.value, ast.Call), lambda node: "pass"),
        (ast.Break, bool, lambda node: "continue"),
        (ast.Continue, bool, lambda node: "break"),
    ]
    matching = (make for kind, applies, make in replacements if isinstance(node, kind) and applies(node))
    return next((make(node) for make in matching), "")


def mutations(package: str, file: str, name: str, function: Any, source: str) -> Iterator[Mutant]:
    """Yield the mutants of a function."""
    segment = ast.get_source_segment(source, function) or ""
    for node in _nodes(function):
        old, new = ast.get_source_segment(source, node) or "", _replacement(node, source)
        if new and old:
            offset = _offset(source, node) - _offset(source, function)
            yield Mutant(package, file, name, old, new, segment.count(old, 0, offset + len(old) - 1))


def _offset(source: str, node: Any) -> int:
    lines = source.splitlines(keepends=True)[: node.lineno]
    return sum(map(len, lines[:-1])) + len(lines[-1].encode()[: node.col_offset].decode())


def candidates(tree: Path, package: str) -> List[Mutant]:
    """Return mutants of a package, each of another function, in the order of the seed."""
    order = random.Random(f"{SEED} {package}")
    found: List[Tuple[Path, str, Any]] = []
    for path in sorted((tree / "raypod" / package).rglob("*.py")):
        named = list(functions(ast.parse(path.read_text())))
        counts = collections.Counter(name for name, _ in named)  # a property and its setter have one name
        found += [(path, name, function) for name, function in named if counts[name] == 1]
    order.shuffle(found)
    mutants: List[Mutant] = []
    for path, name, function in found:
        options = list(mutations(package, path.relative_to(tree).as_posix(), name, function, path.read_text()))
        # A function that returns nothing is the easiest to find: it is taken only where there is no other mutant.
        options = [each for each in options if each.new != "return None"] or options
        mutant = order.choice(options) if options else None
        if mutant is not None:
            mutants.append(mutant)
        if len(mutants) == CANDIDATES:
            break
    return mutants


def _mutants(file: Optional[Path], tree: Path) -> List[Mutant]:
    if file is None:
        return [mutant for package in PACKAGES for mutant in candidates(tree, package)]
    return [Mutant(*each) for each in json.loads(file.read_text())]


def _first(mutants: Sequence[Mutant]) -> List[Mutant]:
    """Return the mutants of each package that are tested."""
    found = [mutant for mutant in mutants if mutant.name not in EQUIVALENT]
    return [mutant for package in PACKAGES for mutant in [m for m in found if m.package == package][:PER_PACKAGE]]


def _function(mutant: Mutant, source: str) -> Tuple[Any, str]:
    function = dict(functions(ast.parse(source))).get(mutant.function)
    return function, ast.get_source_segment(source, function) or "" if function else ""


def is_in(mutant: Mutant, tree: Path) -> bool:
    """Whether a checkout has the text of a mutant; prints a line if not."""
    path = tree / mutant.file
    found = path.exists() and _function(mutant, path.read_text())[1].count(mutant.old) > mutant.number
    if not found:
        print(f"left out, because it was moved or changed: {mutant.name}")
    return found


def apply(mutant: Mutant, tree: Path) -> None:
    """Write the mutated file."""
    path = tree / mutant.file
    source = path.read_text()
    function, segment = _function(mutant, source)
    at = -1
    for _ in range(mutant.number + 1):
        at = segment.index(mutant.old, at + 1)
    mutated = segment[:at] + mutant.new + segment[at + len(mutant.old) :]
    begin = _offset(source, function)
    changed = source[:begin] + mutated + source[begin + len(segment) :]
    ast.parse(changed)
    path.write_text(changed)


def instrument(mutants: Sequence[Mutant], tree: Path, trace: Path) -> None:
    """Insert a record of the executing test into the functions of the mutants."""
    by_file: Dict[str, Set[str]] = {}
    for mutant in mutants:
        by_file.setdefault(mutant.file, set()).add(mutant.function)
    for file, names in by_file.items():
        path = tree / file
        lines = path.read_text().splitlines()
        nodes = dict(functions(ast.parse(path.read_text())))
        for name, node in sorted(((name, nodes[name]) for name in names), key=lambda each: -each[1].body[-1].lineno):
            first = next(each for each in (*node.body, None) if each is not node.body[0] or not _is_docstring(each))
            if first is not None and first.lineno > node.lineno:
                lines.insert(first.lineno - 1, " " * first.col_offset + f"_mutants_record({f'{file}:{name}'!r})")
        body = ast.parse(path.read_text()).body
        at = next(each.end_lineno for each in body if _is_docstring(each) or isinstance(each, ast.ImportFrom))
        future = [number for number, line in enumerate(lines, 1) if line.startswith("from __future__")]
        lines.insert(future[0] if future else at, _RECORD.format(trace=str(trace), flags=_APPEND))
        path.write_text("\n".join([*lines, ""]))


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


_RECORD = """

_mutants_recorded = set()


def _mutants_record(place):
    import os, sys
    test = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    key = (place, test, os.getpid())
    if key in _mutants_recorded:
        return
    _mutants_recorded.add(key)
    scope = "test" if "_pytest" in sys.modules else "file"
    file = os.open({trace!r}, {flags})
    os.write(file, f"{{place}}\\t{{scope}}\\t{{test}}\\n".encode())
    os.close(file)"""


def _copy(tree: Path, folder: Path) -> Path:
    shutil.copytree(tree, folder, ignore=_IGNORED, symlinks=True)
    return folder


def _environment(copy: Path) -> Dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}


def trace(arguments: argparse.Namespace) -> None:
    """Run the tests in an instrumented copy; write which tests execute which function, and their durations."""
    arguments.out.mkdir(parents=True)
    mutants = _mutants(arguments.mutants, arguments.tree)
    (arguments.out / MUTANTS).write_text(json.dumps(mutants, indent=1))
    mutants = [mutant for mutant in mutants if is_in(mutant, arguments.tree)]
    copy = _copy(arguments.tree, Path(tempfile.mkdtemp(prefix="mutants-")) / "tree")
    instrument(mutants, copy, arguments.out / "executed")
    command = [sys.executable, "-m", "pytest", f"--junitxml={arguments.out / 'junit.xml'}", "-q", *arguments.pytest]
    subprocess.run(command, cwd=copy, env=_environment(copy), check=False)
    shutil.rmtree(copy.parent)


def read_trace(folders: Sequence[Path]) -> Tuple[Dict[str, Set[str]], Dict[str, float]]:
    """Return the tests (node ids) of each place, and the duration of each test that passed."""
    durations: Dict[str, float] = {}
    lines: Set[str] = set()
    for folder in folders:
        for case in xml.etree.ElementTree.parse(folder / "junit.xml").iter("testcase"):
            if not len(case):
                durations[_key(case.get("classname", ""), case.get("name", ""))] = float(case.get("time", "0"))
        lines.update((folder / "executed").read_text(errors="replace").splitlines())
    by_file: Dict[str, List[str]] = {}
    for name in durations:
        by_file.setdefault(name.partition("::")[0], []).append(name)
    tests: Dict[str, Set[str]] = {}
    for line in lines:
        place, scope, test = line.split("\t")
        # What a process executes that a test has started belongs to any test of the file: it may have outlived its own.
        names = by_file.get(test.partition("::")[0], []) if scope == "file" else [test] if test in durations else []
        tests.setdefault(place, set()).update(names)
    return tests, durations


def _key(module: str, name: str) -> str:
    return f"{module.replace('.', '/')}.py::{name}"


def _wider(test: str) -> List[str]:
    """Return a test, its function, its file and the folders of it."""
    file = Path(test.partition("::")[0])
    return [test, test.partition("[")[0], *map(str, (file, *file.parents))]


def _known(tree: Path) -> Set[str]:
    """Return the tests of a checkout, and what contains them."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--all", "-p", "no:cacheprovider"]
    options: Dict[str, Any] = {"capture_output": True, "text": True, "check": False, "timeout": COLLECT_S}
    found = subprocess.run(command, cwd=tree, env=_environment(tree), **options).stdout
    return {each for line in found.splitlines() if "::" in line for each in _wider(line)}


def kill(arguments: argparse.Namespace) -> None:
    """Test the mutants, `--jobs` at a time; write for each the first test that failed."""
    tests, durations = read_trace(arguments.trace)
    fast = set(arguments.fast.read_text().splitlines()) if arguments.fast else None
    mutants = _first(_mutants(arguments.mutants or arguments.trace[0] / MUTANTS, arguments.tree))
    results: Dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    mutants = [mutant for mutant in mutants if mutant.name not in results and is_in(mutant, arguments.tree)]
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    copies: queue.Queue[Path] = queue.Queue()
    known = _known(arguments.tree)
    for number in range(arguments.jobs):
        copies.put(_copy(arguments.tree, folder / str(number)))

    def test(mutant: Mutant) -> None:
        copy = copies.get()
        original = (copy / mutant.file).read_text()
        own = f"tests/{mutant.package}/"
        selected = sorted(tests.get(mutant.place, ()), key=lambda each: (not each.startswith(own), durations[each]))
        try:
            apply(mutant, copy)
            began = time.monotonic()
            results[mutant.name] = {"package": mutant.package, "tests": len(selected)}
            suites = (
                {"all": selected}
                if fast is None
                else {
                    "fast": [each for each in selected if each in fast],
                    "all": [each for each in selected if each not in fast],
                }
            )
            for suite, names in suites.items():
                present = [next(each for each in _wider(name) if each in known) for name in names]
                killer = _first_failure(
                    list(dict.fromkeys(present)), copy, arguments.limit_s + 5 * sum(durations[each] for each in names)
                )
                if killer:
                    results[mutant.name].update(killed_by=killer, suite=suite)
                    break
            results[mutant.name]["seconds"] = round(time.monotonic() - began)
        finally:
            (copy / mutant.file).write_text(original)
            copies.put(copy)
        arguments.out.write_text(json.dumps(results, indent=1))
        print(mutant.name, results[mutant.name], flush=True)

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(test, sorted(mutants, key=lambda each: len(tests.get(each.place, ())))))
    shutil.rmtree(folder)


def _first_failure(names: List[str], copy: Path, limit_s: float) -> str:
    """Run tests until one fails. Returns its name, "time limit", "signal" and a number, or "" if none fails."""
    if not names:
        return ""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *names]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command, cwd=copy, env=_environment(copy), stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return "time limit"
        output.seek(0)
        text = output.read()
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    if code < 0:
        return f"signal {-code}"
    if code not in (0, 1) and not failed:
        raise SystemExit(f"{' '.join(command[:8])} ended with {code} after {time.monotonic() - began:.0f} s:\n{text}")
    return failed.group(1) if failed else f"exit code {code}" if code else ""


def table(arguments: argparse.Namespace) -> None:
    """Print both results as a table."""
    before, after = (json.loads(path.read_text()) for path in (arguments.before, arguments.after))
    for name, result in sorted(after.items(), key=lambda each: each[1]["package"]):
        words = [before.get(name, {}).get("killed_by", "no"), result.get("killed_by", "no"), result.get("suite", "-")]
        print("|", result["package"], "|", name, "|", " | ".join(words), "|")
    count = len(after)
    print(f"killed before: {sum('killed_by' in each for each in before.values())} of {len(before)}")
    print(f"killed after: {sum('killed_by' in each for each in after.values())} of {count}")
    print(f"by the fast tests: {sum(each.get('suite') == 'fast' for each in after.values())} of {count}")


def show(arguments: argparse.Namespace) -> None:
    """Print the mutants of the seed."""
    for mutant in _first(_mutants(arguments.mutants, arguments.tree)):
        print(mutant.name)


def main() -> None:
    """Run a subcommand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout whose tests run (default: this one)")
    parser.add_argument("--mutants", type=Path, help="a mutants.json of `trace` (default: those of the seed)")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list").set_defaults(run=show)
    tracing = commands.add_parser("trace")
    tracing.add_argument("--out", type=Path, required=True)
    tracing.add_argument("pytest", nargs="*", help="arguments of pytest, after --")
    tracing.set_defaults(run=trace)
    killing = commands.add_parser("kill")
    killing.add_argument("--trace", type=Path, nargs="+", required=True)
    killing.add_argument("--out", type=Path, required=True)
    killing.add_argument("--fast", type=Path, help="a file with the names of the fast tests, one per line")
    killing.add_argument("--limit-s", type=float, default=300.0)
    killing.add_argument("--jobs", type=int, default=2)
    killing.set_defaults(run=kill)
    comparing = commands.add_parser("table")
    comparing.add_argument("--before", type=Path, required=True)
    comparing.add_argument("--after", type=Path, required=True)
    comparing.set_defaults(run=table)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
