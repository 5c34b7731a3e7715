"""Tables of text that fit a width: columns are left out by priority, and one column takes the rest of the line."""

from __future__ import annotations

import dataclasses
from typing import List, Sequence, Tuple

from rich.cells import cell_len
from rich.text import Text

GAP = 2
_LEAST_FLEXIBLE = 12
Cell = Tuple[str, str]  # text, style


@dataclasses.dataclass(frozen=True)
class Column:
    """A column. Those of the highest `rank` are left out first; rank 0 stays."""

    title: str
    cells: Sequence[Cell]
    rank: int = 0
    right: bool = False
    flexible: bool = False  # gets what is left of the width, and is cut to it
    most: int = 40  # characters

    @property
    def natural_width(self) -> int:
        """The width without cutting, at most `most`."""
        widest = max([cell_len(self.title), *(cell_len(text) for text, _ in self.cells)])
        return min(widest, self.most)


def table(columns: Sequence[Column], width: int, ascii_only: bool = False) -> List[Text]:
    """Return the header and the rows, each at most `width` wide."""
    shown = [each for each in columns if each.title or any(text for text, _ in each.cells)]
    while _least_width(shown) > width and any(each.rank for each in shown):
        worst = max(shown, key=lambda each: each.rank)
        shown = [each for each in shown if each is not worst]
    fixed = sum(each.natural_width for each in shown if not each.flexible) + GAP * (len(shown) - 1)
    rest = max(0, width - fixed)
    widths = [rest if each.flexible else each.natural_width for each in shown]
    header = _row([(each.title, "dim") for each in shown], shown, widths, ascii_only)
    body = [_row(list(cells), shown, widths, ascii_only) for cells in zip(*(each.cells for each in shown))]
    return [fitted(line, width, ascii_only) for line in (header, *body)]


def fitted(line: Text, width: int, ascii_only: bool = False) -> Text:
    """Return a line cut to a width."""
    line.truncate(max(0, width), overflow="crop" if ascii_only else "ellipsis")
    return line


def _least_width(columns: Sequence[Column]) -> int:
    widths = [min(_LEAST_FLEXIBLE, each.natural_width) if each.flexible else each.natural_width for each in columns]
    return sum(widths) + GAP * (len(columns) - 1)


def _row(cells: Sequence[Cell], columns: Sequence[Column], widths: Sequence[int], ascii_only: bool) -> Text:
    line = Text(no_wrap=True)
    for index, ((text, style), column, width) in enumerate(zip(cells, columns, widths)):
        cell = fitted(Text(text, style=style), width, ascii_only)
        padding = " " * max(0, width - cell_len(cell.plain))
        line.append(" " * GAP if index else "")
        line.append(padding if column.right else "")
        line.append_text(cell)
        line.append("" if column.right else padding)
    return line
