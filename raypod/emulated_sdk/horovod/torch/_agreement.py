"""What the ranks must agree on about an operation, and how they disagree."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Tuple


class Description(NamedTuple):
    """What a rank sends to the others about an operation. All but `own` must be equal on all ranks."""

    key: str
    kind: str
    how: str  # reduction and factors, or the root
    tensors: List[List[Any]]  # dtype, shape (None: not fixed), and the name if there is one
    own: List[int]  # this rank's lengths of dimensions that are not fixed, or its splits

    def differences(self, other: Description) -> Tuple[str, str]:
        """Return the first difference as one text for each side; two empty texts if there is none."""
        if (self.kind, self.how) != (other.kind, other.how):
            return f"{self.kind} {self.how}", f"{other.kind} {other.how}"
        if len(self.tensors) != len(other.tensors):
            return f"{len(self.tensors)} tensors", f"{len(other.tensors)} tensors"
        for index, (own, others) in enumerate(zip(self.tensors, other.tensors)):
            if own != others:
                prefix = f"tensor {index} of {len(self.tensors)}: " if len(self.tensors) > 1 else ""
                return prefix + _text(own), prefix + _text(others)
        return "", ""


def disagreement(descriptions: Dict[int, Description]) -> str:
    """Return what each rank submitted, where it differs from the first rank."""
    first_rank, *others = descriptions
    first = descriptions[first_rank]
    different = next(descriptions[rank] for rank in others if first.differences(descriptions[rank]) != ("", ""))
    texts = [f"rank {first_rank}: {first.differences(different)[0]}"]
    for rank in others:
        own, other = first.differences(descriptions[rank])
        texts.append(f"rank {rank}: {other if own else f'as rank {first_rank}'}")
    return "; ".join(texts)


def _text(tensor: List[Any]) -> str:
    dtype, shape, *name = tensor
    lengths = ", ".join("*" if length is None else str(length) for length in shape)
    return "".join(f"{each}: " for each in name) + f"{dtype}[{lengths}]"
