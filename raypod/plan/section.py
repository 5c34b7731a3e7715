"""The base class of the sections of a configuration."""

from __future__ import annotations

from typing import Any, Optional

import pydantic

MAX_TIMEOUT_S = 1e6  # larger values overflow the timers of the operating system


class Section(pydantic.BaseModel):
    """Base class of the sections: immutable; unknown keys are errors."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    @pydantic.field_validator("*", mode="before")
    @classmethod
    def _check_kind(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        """Reject empty strings, and booleans for numbers, which pydantic would convert to 0 and 1."""
        if isinstance(value, str) and not value.strip():
            raise ValueError("must not be empty; omit it for the default")
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation not in (bool, Optional[bool]):
            raise ValueError("must not be a boolean")
        return value
