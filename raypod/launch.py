"""`raypod launch [options] PROGRAM [ARGS...]`: run any program in every instance, as poprun does, on Ray."""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before the imports below: an interrupt of them is one line, as that of `raypod launch`
    from raypod.__main__ import main as run_command

    sys.exit(run_command(["launch", *sys.argv[1:]]))

import contextlib
import dataclasses
import os
import re
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Dict, List, Optional, Sequence

from raypod.errors import ConfigError
from raypod.observe.status.endpoint import published
from raypod.observe.status.launch_status import LaunchFile, LaunchStatus, routes_of
from raypod.observe.status.token_server import TokenServer, check_port
from raypod.plan import tables
from raypod.plan.cluster import Cluster, cluster_of, cluster_of_file, read_cluster
from raypod.plan.cluster_file import is_network
from raypod.plan.layout import LAUNCH_OPTIONS
from raypod.plan.placement import Sizes, check_ilds, place
from raypod.runtime.launcher import options
from raypod.runtime.launcher.options import Request, parse_mpi_arguments, without_values
from raypod.runtime.launcher.output import Console, Output
from raypod.runtime.launcher.programs import Programs, partition
from raypod.runtime.launcher.ray_hosts import RayHosts
from raypod.runtime.launcher.supervision import Signals, StdinForwarder, Supervision
from raypod.system.command_line import CLOSED_PIPE, check_utf8, current_folder, discard, report_errors, show
from raypod.system.files import create_folder, create_numbered_folder
from raypod.system.redaction import Redaction
from raypod.system.sdk import Sdk, sdk_for_programs, without_horovod

_PROG = "raypod launch"


parser = options.parser


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command and return its exit code.

    Returns:
        The exit code of the first program that failed (128 + n if signal n killed it), else 0; 128 + n if signal n
        ended the launch; 2 for a mistake in the options; 1 if a host was lost or the launch itself failed.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    caller = dict(os.environ)  # importing Ray adds variables
    signals = Signals()
    with signals.handled():
        return report_errors(lambda: _launch(words, caller, signals))


def _launch(words: Sequence[str], caller: Dict[str, str], signals: Signals) -> int:
    request, query = options.parse(words)
    if query is not None:
        show(options.usage(_PROG) if query == "help" else _version())
        return 0
    arguments = parse_mpi_arguments(request)
    sdk, sdk_path = sdk_for_programs(request.device)
    threads = 0 if sdk.has_ipus else 1  # emulated results depend on the thread count; 0: all cores of a host
    if request.strict and sdk.has_ipus:
        _say("--strict has no effect: the programs use the real SDK")
    _check(request, request.host_subnet or arguments.network)
    _check_files(request)
    if request.program:
        check_port(request.status_port)
    sizes = Sizes(request.num_replicas, request.num_instances, request.ipus_per_replica)
    placement = place(_cluster(request), sizes, threads)
    in_file = placement.cluster.vipu
    num_ilds = request.num_ilds or (in_file.link_domains if in_file else None)
    check_ilds(placement, num_ilds)
    if not (request.program or request.print_topology or request.export_config):
        raise ConfigError(f"no program to launch: {_PROG} [options] PROGRAM [ARGS...] (--help lists options)")
    if request.print_topology:
        show(tables.render_topology(placement, num_ilds))
    if not request.program:
        _export(request)
        return 0
    missing = arguments.missing(caller)
    if missing:
        _say(f"-x {', '.join(missing)}: not set here, so the programs do not get it")
    folder = current_folder()
    check_utf8({"--run-dir": request.run_dir})
    programs = Programs(request, placement, arguments, caller, folder, sdk_path, os.isatty(2))
    return _run(programs, sdk, signals)


def _run(programs: Programs, sdk: Sdk, signals: Signals) -> int:
    """Start the hosts, run the programs on them, and clean up."""
    request, placement = programs.request, programs.placement
    status = LaunchStatus(placement, request.program)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(TokenServer(routes_of(status), request.status_port))
        needed = placement
        if request.offline_mode:
            needed = dataclasses.replace(placement, sizes=dataclasses.replace(placement.sizes, ipus_per_replica=0))
        hosts = RayHosts(needed, request.cluster, request.start_timeout)
        stack.callback(hosts.close)
        hosts.join(_say)
        stack.enter_context(signals.handled())  # a signal may have been lost while Ray started
        hosts.open()
        # Not before `join`, which ends this process without cleanup if Ray hangs, and only on reserved hosts.
        variables = stack.enter_context(partition(request, placement, sdk.has_ipus, programs.caller, _say))
        stack.callback(hosts.kill)
        programs = dataclasses.replace(programs, partition=variables, interpreters=hosts.interpreters)
        facts = hosts.connect(
            request.host_subnet or programs.arguments.network or placement.cluster.data_network,
            placement.sizes.num_instances,
        )
        for line in hosts.warnings:
            _say(f"warning: {line}")
        if sdk.has_ipus and without_horovod():
            _say(sdk.line)
        folder = _claim_run_folder(request)
        write_options(without_values(request), Path(folder, LAUNCH_OPTIONS), "--run-dir")
        status.run_dir = folder
        hosts_of = [spec.host for spec in placement.instances]
        file = stack.enter_context(LaunchFile(Path(folder), _command(programs), hosts_of))
        stack.enter_context(published(server, Path(folder), file))
        _export(request)
        only = request.only_output_from_instance
        output = Output(folder, placement.sizes.num_instances, Console(bar_instance=only or 0), only)
        stack.callback(output.close)
        hosts.start(programs.by_host(facts), request.grace, f"{folder}/logs")
        _log_start(programs, sdk, hosts, folder)
        with signals.handled(record=True):
            forwarder = StdinForwarder(hosts.write_stdin)
            stack.callback(forwarder.close)
            try:
                return Supervision(hosts, placement, output, signals, request.grace, status.add).run()
            except BrokenPipeError:
                file.exit_code = CLOSED_PIPE
                for stream in (sys.stdout, sys.stderr):
                    discard(stream)
                return CLOSED_PIPE


def _check(request: Request, network: Optional[str]) -> None:
    only, placement = request.only_output_from_instance, request.process_placement
    if only is not None and only >= request.num_instances:
        last = request.num_instances - 1
        raise ConfigError(f"--only-output-from-instance {only}: the last instance is {last}")
    if placement not in (None, "disabled", "spreadnuma"):
        raise ConfigError(f"--process-placement {placement}: must be disabled or spreadnuma")
    if network and "/" in network and not is_network(network):
        raise ConfigError(f"network {network}: must be a network in CIDR notation, as in 10.1.0.0/16, or an interface")


def _cluster(request: Request) -> Cluster:
    given = [f"--{key}" for key in ("host", "hostfile", "cluster") if getattr(request, key)]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} both list the hosts; give only one")
    if request.hostfile:
        return cluster_of_file(request.hostfile)
    return cluster_of(request.host) if request.host else read_cluster(request.cluster)


def _export(request: Request) -> None:
    if request.export_config:
        write_options(request, Path(request.export_config), "--export-config")


def _check_files(request: Request) -> None:
    """Check --run-dir and --export-config before anything is started or written.

    Raises:
        ConfigError: The run folder is not empty, or the options would overwrite a file or cannot be written.
    """
    if request.run_dir:
        _check_empty(Path(request.run_dir))
    if request.export_config:
        path = os.path.abspath(request.export_config)  # noqa: PTH100 - these functions raise no OSError
        if os.path.isdir(path) or not os.access(os.path.dirname(path), os.W_OK):  # noqa: PTH112, PTH120
            raise ConfigError(f"--export-config {path}: not a file in a folder that can be written")
        if os.path.exists(path) and not request.overwrite_config:  # noqa: PTH110
            raise ConfigError(f"--export-config {path}: the file exists; --overwrite-config replaces it")


def write_options(request: Request, path: Path, option: str) -> None:
    """Write the options as YAML for --import-config; `option` names the file in the message of a ConfigError.

    A new file is private to the user: the values of variables can be secrets.
    """
    try:
        with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600), encoding="utf-8") as file:
            file.write(options.export(request))
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from None


def _claim_run_folder(request: Request) -> str:
    """Create the run folder with a new folder `logs` in it, atomically, and return its absolute path.

    It is --run-dir, or `runs/<time>-launch-<program>`, with a number appended if that exists.

    Raises:
        ConfigError: --run-dir is not empty, or a folder cannot be created.
    """
    folder = Path(os.path.abspath(request.run_dir or _default_folder(request)))  # noqa: PTH100 - keeps symlinks
    try:
        if request.run_dir:
            _check_empty(folder)
        else:
            folder = create_numbered_folder(folder)[-1]
        create_folder(folder / "logs")
    except FileExistsError:
        raise ConfigError(_used(folder, "it contains the logs of another launch")) from None
    except OSError as error:
        raise ConfigError(
            f"cannot write to the run folder {folder}: {error.strerror}; choose another --run-dir"
        ) from None
    return str(folder)


def _check_empty(folder: Path) -> None:
    try:
        if any(folder.iterdir()):
            raise ConfigError(_used(folder, "the folder is not empty"))
    except FileNotFoundError:
        pass  # it is created later
    except OSError as error:
        raise ConfigError(_used(folder, str(error.strerror))) from None


def _used(folder: Path, why: str) -> str:
    return f"--run-dir {folder}: {why}; choose another folder, or remove this one"


def _default_folder(request: Request) -> str:
    scripts = [word for word in request.program[:4] if word.endswith((".py", ".sh"))]
    name = re.sub(r"[^\w.-]+", "-", Path((scripts or request.program)[0]).stem) or "program"
    return f"runs/{time.strftime('%Y%m%d-%H%M%S')}-launch-{name}"


def _log_start(programs: Programs, sdk: Sdk, hosts: RayHosts, folder: str) -> None:
    if programs.request.verbosity:
        _say(f"{sdk.line}; logs: {folder}/logs")
        _say("; ".join(f"{what}: {seconds:.2f} s" for what, seconds in hosts.start_seconds))
        _say("; ".join(f"PATH on {', '.join(names)} begins with {first}" for first, names in programs.paths().items()))
    if programs.request.verbosity > 1:
        for spec in programs.placement.instances:
            own = programs.changes(spec)
            shown = " ".join(f"{name}={own[name]}" for name in sorted(own))
            _say(f"instance {spec.index} on {spec.host}: {Redaction(own).clean(shown)}")


def _command(programs: Programs) -> List[str]:
    """Return the command line of the programs without secrets of their environment: it is in the run folder."""
    arguments, instances = programs.arguments, programs.placement.instances
    own = [(each.index, arguments.environment(each.index, dict(programs.caller))) for each in instances]
    given = {f"{index} {name}": value for index, variables in own for name, value in variables.items()}
    redaction = Redaction({**programs.caller, **given})
    return [redaction.clean(word) for word in programs.request.program]


def _version() -> str:
    try:
        return f"raypod {version('raypod')}"
    except PackageNotFoundError:  # imported from a source folder
        return "raypod, not installed"


def _say(text: str) -> None:
    show(f"{_PROG}: {text}", sys.stderr)
