"""Write the pages of docs/reference that are made from the tables of the code: flags, commands, metrics and operators.

`python scripts/reference_pages.py` writes them; they are committed, so that links to them work in the repository, too.
tests/repository/test_documented_blocks.py fails if they differ from the code.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 92  # columns of the printed help
HELP_PYTHON = ((3, 10), (3, 12))  # argparse of other versions prints the same help in another form
_NOTE = "<!-- Written by scripts/reference_pages.py from the code; do not edit. -->"
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def flags_page() -> str:
    """Return the page of every flag of a training, in the groups of its help."""
    from raypod.plan import flags
    from raypod.plan.config import fields
    from raypod.plan.flags import flags_of

    rows: Dict[str, List[str]] = {name: [] for name in flags.GROUPS}
    for section, key, field in fields():
        *names, last = flags_of(section, key, field)
        cell = "<br>".join(f"`{name}`" for name in (*names, last))
        value = "" if last.startswith("--no-") else f" `{flags.metavar_of(key, field)}`"
        text = _cell(flags.describe(field, field.default))
        rows[flags.group_of(section, key)].append(f"| {cell}{value} | {text}<br>`{section}.{key}` |")
    parts = [
        _NOTE,
        "# Every flag",
        _filled(
            "The flags of `raypod train`, `raypod plan` and `raypod doctor`; `raypod train --help GROUP` prints those "
            "of a group. Each is also a key of a YAML file (`--config`), a word `section.key=value` of the command "
            "line, and a keyword of `raypod.fit`. In brackets: type, range and default. Options of a task are in its "
            "`--help`. `--config FILE` reads a YAML file, `--dry-run` prints the plan and ends, `--detach` trains in "
            "the background, `--take-over` continues a run that another process holds."
        ),
    ]
    for name, title in flags.GROUPS.items():
        parts += [f"## {title}", "| flag | meaning, and the key |\n|---|---|\n" + "\n".join(rows[name])]
    return "\n\n".join(parts) + "\n"


def commands_page() -> str:
    """Return the page of every subcommand, with its help as it is printed."""
    from raypod.cli.table import COMMANDS, GROUPS

    parts = [
        _NOTE,
        "# Every command",
        _filled(
            "A misspelt command or flag names the nearest one. `raypod COMMAND` is `python -m raypod COMMAND`; [the "
            "overview](overview.md) says when to use which."
        ),
    ]
    for group, commands in GROUPS.items():
        parts.append(f"## {group}")
        for name in commands:
            text = _help_of(lambda command=COMMANDS[name]: command.run(["--help"]))
            parts += [f"### raypod {name}", f"```text\n{text}\n```"]
    return "\n\n".join(parts) + "\n"


def metrics_page() -> str:
    """Return the page of every metric for Prometheus."""
    from raypod.observe.status import launch_status, prometheus

    def table(metrics: Any) -> str:
        rows = [f"| `{metric.name}` | {metric.kind} | {_cell(metric.help)} |" for metric in metrics]
        return "| metric | type | meaning |\n|---|---|---|\n" + "\n".join(rows)

    return (
        "\n\n".join(
            (
                _NOTE,
                "# Every metric",
                _filled(
                    "The metrics of the path `/metrics` of the [status endpoint](observability.md#the-status-endpoint)."
                    " [Prometheus and Grafana](../how-to/prometheus.md) describes how to read them."
                ),
                "## Of a training",
                table(prometheus.METRICS),
                "## Of a launch",
                table(launch_status.METRICS),
            )
        )
        + "\n"
    )


def operators_page() -> str:
    """Return the page of the operators that a model may use."""
    path = ROOT / "raypod/emulated_sdk/poptorch/parallel/supported_operators.py"
    spec = importlib.util.spec_from_file_location("supported_operators", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    own = {f"aten::{name}" for text in (module.LOWERED, module.DECOMPOSED, module.CPU_KERNELS) for name in text.split()}

    def names(text: str) -> str:
        return _filled(", ".join(f"`{name}`" for name in sorted(text.split())))

    return (
        "\n\n".join(
            (
                _NOTE,
                "# Supported operators",
                _filled(
                    "The operators of torch that PopTorch 3.4 takes, by their names in `aten`. In-place and `out` "
                    "variants have the same name. Any other operator in a model is a warning of the emulated SDK with "
                    "the module and the line, and with `--strict` the error `poptorch.Error`. Some operators have "
                    "limits in addition, for example a mode of `upsample`; they are reported in the same way."
                ),
                "## Lowered by PopTorch",
                names(module.LOWERED),
                "## Decomposed by torch before PopTorch meets them (inferred)",
                names(module.DECOMPOSED),
                "## Kernels of torch for the CPU that stand for the above",
                names(module.CPU_KERNELS),
                "## Of other libraries",
                _filled(
                    ", ".join(f"`{name}`" for name in sorted(module.SUPPORTED - own)) + ", and all of `poptorch::`"
                ),
            )
        )
        + "\n"
    )


PAGES: Dict[str, Callable[[], str]] = {
    "reference/flags.md": flags_page,
    "reference/commands.md": commands_page,
    "reference/metrics.md": metrics_page,
    "reference/operators.md": operators_page,
}


def can_print_help() -> bool:
    """Return whether this Python prints the help of commands in the form of the committed page."""
    return HELP_PYTHON[0] <= sys.version_info[:2] <= HELP_PYTHON[1]


@contextlib.contextmanager
def _importable() -> Iterator[None]:
    sys.path.insert(0, str(ROOT))
    try:
        yield
    finally:
        sys.path.remove(str(ROOT))


def _help_of(show: Callable[[], Any]) -> str:
    output, before = io.StringIO(), dict(os.environ)
    os.environ.update(COLUMNS=str(WIDTH), NO_COLOR="1")
    try:
        with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
            show()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return _ESCAPE.sub("", output.getvalue()).strip().replace("__main__.py", "raypod")


def _filled(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, break_long_words=False, break_on_hyphens=False)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    if not can_print_help():
        sys.exit(f"run this with Python {' to '.join('.'.join(map(str, each)) for each in HELP_PYTHON)}")
    for name, make in PAGES.items():
        with _importable():
            (ROOT / "docs" / name).write_text(make())
