"""The setters of `Options` for logging, profiling and debug information."""

from __future__ import annotations

from typing import List, TypeVar

from poptorch.options.base import OptionsDict, is_integer, names, path_text

_Self = TypeVar("_Self", bound="DiagnosticOptions")


class DiagnosticOptions(OptionsDict):
    """Mixin of `Options`, which defines the default values."""

    def showCompilationProgressBar(self: _Self, show: bool = True) -> _Self:
        """Show a progress bar on stderr during compilation."""
        self.set(show_compilation_progress_bar=show)
        return self

    def relaxOptimizerAttributesChecks(self: _Self, relax: bool = True) -> _Self:
        """Do not warn about optimizer attributes that the device ignores."""
        self.set(relax_optimizer_checks=relax)
        return self

    def logDir(self: _Self, log_dir: str) -> _Self:
        """Set the directory of logs."""
        self.set(log_dir=path_text("log_dir", log_dir))
        return self

    def modelName(self: _Self, name: str) -> _Self:
        """Set the name of the model in profiles."""
        self.set(model_name=name)
        return self

    def maxRepeatLogs(self: _Self, max_lines: int | None) -> _Self:
        """Set how often a log line may repeat; None for no limit."""
        is_limit = max_lines is None or (is_integer(max_lines) and max_lines >= 0)
        assert is_limit, f"Option 'max_repeat_logs' must be a number of lines or None, got {max_lines!r}"
        self.checkIsFrozen("max_repeat_logs")
        self._values["max_repeat_logs"] = max_lines
        return self

    def logCycleCount(self: _Self, log_cycle_count: bool) -> _Self:
        """Enable `PoplarExecutor.cycleCount()`."""
        self.set(log_cycle_count=log_cycle_count)
        return self

    def enableProfiling(self: _Self, profile_dir: str | None = None) -> _Self:
        """Set the profile directory. No effect: the emulated device writes no profile."""
        self.createOrSet(profile_dir=path_text("profile_dir", profile_dir or "."))
        return self

    def disableModuleNamescope(self: _Self) -> _Self:
        """Leave module names out of debug names."""
        self.set(module_namescope_enabled=False)
        return self

    def sourceLocationExcludes(self: _Self, excludes: List[str]) -> _Self:
        """Set the paths that are left out of source locations."""
        self.set(source_location_excludes=names("source_location_excludes", excludes))
        return self

    def appendToLocationExcludes(self: _Self, *excludes: str) -> _Self:
        """Add paths that are left out of source locations."""
        further = names("source_location_excludes", excludes)
        self.set(source_location_excludes=[*self.source_location_excludes, *further])
        return self
