"""`raypod up FILE` and `down FILE`: start and stop Ray on all hosts of a cluster file; one `up` at a time.

`ray up` returns when the head runs and does not report missing workers; `up` waits for all hosts. `ray down` stops only
the head, and every other Ray on that host; `down` stops this cluster on all hosts and nothing else.

A process on the head holds a lock for as long as its ssh connection lasts, so that none stays when `up` is killed.
After a lost network, sshd can keep the connection for hours: the message names the process.

`up --no-restart` on a machine on which the cluster was not started joins the running head: Ray's launcher starts it
again, in spite of --no-restart, unless its state file on this machine says that the head runs with the settings of the
cluster file. And `file_mounts` replaces the head's token by that of this machine.
"""

from __future__ import annotations

import contextlib
import getpass
import importlib
import io
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence
from urllib.parse import quote

import yaml

from raypod.errors import ClusterError, ConfigError, RunError
from raypod.plan import shipped
from raypod.plan.cluster import Cluster, Host, cluster_from, raise_mistakes, read_file
from raypod.plan.cluster_file import ClusterFile
from raypod.pod import autoscaler_hosts, collect_copies, file_checks, started, stop_cluster, stop_runs
from raypod.runtime import ssh
from raypod.runtime.workers import ray_admission
from raypod.runtime.workers.ray_session import private_tmpdir
from raypod.system.command_line import FlagParser, say
from raypod.system.files import read_object, replace_file
from raypod.system.private import make_private

_STOP_TIMEOUT_S = 60.0
_SOURCE = "~/raypod/source/raypod"  # where the cluster files of this repository copy raypod


def up_parser() -> FlagParser:
    parser = _parser(_up, "up", "Start Ray on all hosts of a cluster file, and wait until all have joined.")
    parser.add_argument(
        "--wait-hosts", type=float, default=120.0, metavar="S", help="timeout for all hosts to join [120]"
    )
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="S", help="timeout of `ray up` itself [1800]")
    parser.add_argument("--no-restart", action="store_true", help="do not restart a running Ray")
    parser.add_argument(
        "--stop-runs", action="store_true", help="stop active runs and launches first, trainings with a checkpoint"
    )
    return parser


def _up(args: Namespace) -> int:
    """Start Ray with token authentication on all hosts of a cluster file, and wait until all have joined."""
    if args.no_restart and args.stop_runs:
        raise ConfigError("--no-restart ends no run: omit --stop-runs (raypod up --help lists all flags)")
    began_s = time.monotonic()
    file = _own_file(args.file)
    mistakes = [*file_checks.access_errors(file), *file_checks.key_errors(file), *file_checks.launch_errors(file)]
    raise_mistakes(args.file, mistakes)
    cluster = cluster_from(file, args.file)
    for warning in file_checks.launch_warnings(file):
        say(f"{args.file}, {warning}")
    joins = args.no_restart and stop_runs.is_running(cluster, file)
    if joins:
        take_token(cluster, file, say)
    _prepare_token(file_checks.token_source(file))
    _check_ssh(cluster)
    with cluster_lock(cluster, say):
        return _start(args, cluster, file, began_s, joins)


def _start(args: Namespace, cluster: Cluster, file: ClusterFile, began_s: float, joins: bool) -> int:
    """Start Ray, or only copy the sources, while no other `raypod up` does. It `joins` a running head."""
    _check_folders(cluster, file)
    if not args.no_restart:
        stop_runs.make_way(cluster, file, args.stop_runs, say)
        if args.stop_runs:  # otherwise the start commands refuse to stop what is left
            _stop_processes(cluster, cluster.hosts[:1])
    flags = ["--no-config-cache", *(["--no-restart"] if args.no_restart else [])]
    workers = [host.address for host in cluster.hosts[1:]]
    if args.no_restart:
        if joins:
            note_running_head(cluster, args.file, Path(_temp_folder(), "ray"))
        failed = _change_workers(cluster, file, autoscaler_hosts.KEEP, workers)
    else:
        _remove_launcher_state(cluster)
    _run_ray("up", args.file, flags, {"RAY_UP_enable_autoscaler_v2": "0"}, args.timeout)
    if args.no_restart:  # only now: a new host gets the files that the launcher has copied to the head
        _change_workers(cluster, file, autoscaler_hosts.AGAIN, failed)
        _change_workers(cluster, file, autoscaler_hosts.ADD, workers)
    started.wait_for_hosts(cluster, file, args.wait_hosts, began_s, say)
    say(f"{cluster.name}: Ray runs on all {len(cluster.hosts)} hosts")
    started.compare_sources(cluster, file, f"raypod up {args.file}", "compare" if args.no_restart else "record", say)
    started.check_python(cluster, file, say)
    train = _train_hint(cluster, file, Path(args.file))
    collect_copies.collect(cluster, train, say)
    say(f"next: raypod doctor --cluster {args.file}; then, {train}")
    return 0


def _train_hint(cluster: Cluster, file: ClusterFile, path: Path) -> str:
    """Return where and how to train: with the path of the cluster file on the head, if `file_mounts` copies it."""
    given = (file.top.value("file_mounts") or {}).items()
    mounts = {mount: Path(str(source)).expanduser().resolve() for mount, source in given}
    folder, whole = Path(_SOURCE).parent, path.resolve()
    within = [Path(mount) / whole.relative_to(source) for mount, source in mounts.items() if _contains(source, whole)]
    copy = "" if within else f" after copying {path} there"
    where = f"on {cluster.hosts[0].name}" + (f" in {folder}" if _SOURCE in mounts else "") + copy
    there = within[0] if within else Path(path.name)
    if _SOURCE in mounts and _contains(folder, there):
        there = there.relative_to(folder)
    return f"{where}: {cluster.python} -m raypod.train --cluster {there}"


def _contains(folder: Path, path: Path) -> bool:
    return folder == path or folder in path.parents


def down_parser() -> FlagParser:
    return _parser(_down, "down", "Stop Ray on all hosts of a cluster file.")


def _down(args: Namespace) -> int:
    """Stop a cluster on all hosts of its file, and nothing else."""
    file = _own_file(args.file)
    raise_mistakes(args.file, file_checks.access_errors(file))
    cluster = cluster_from(file, args.file)
    if not file_checks.is_marked(file):
        mark = f"{stop_cluster.MARK}={cluster.name}"
        say(f"{args.file}: the start commands do not export {mark}: workers stop by themselves within a minute")
        _run_ray("down", args.file, [], {}, 300.0)
        return 0
    head, workers = cluster.hosts[:1], cluster.hosts[1:]
    stopped = _stop_processes(cluster, head)  # the head first: it would restart workers
    stopped.update(_stop_processes(cluster, workers))
    answers = {name: done.json_object("left") for name, done in stopped.items()}
    results = {name: answer for name, answer in answers.items() if answer is not None}
    bad = [
        f"{name}: {results[name]['left']} processes are left"
        if name in results
        else f"{name}: whether it runs there is unknown: {done.error}"
        for name, done in stopped.items()
        if not done.succeeded
    ]
    if results.get(head[0].name, {}).get("others"):
        say(f"{head[0].name}: another Ray cluster keeps running; `ray down` would have stopped it")
    elif head[0].name in results:
        _run_ray("down", args.file, [], {}, 300.0)  # Ray is stopped; this clears the launcher's state
    if bad:
        raise RunError("\n  ".join([f"{cluster.name} was not stopped on {len(bad)} of {len(stopped)} hosts", *bad]))
    say(f"{cluster.name}: stopped on all {len(cluster.hosts)} hosts")
    return 0


def _parser(run: Callable[[Namespace], int], verb: str, description: str) -> FlagParser:
    parser = FlagParser(run, prog=f"raypod {verb}", description=description)
    parser.add_argument("file", metavar="FILE", help="the cluster file")
    return parser


def _own_file(name: str) -> ClusterFile:
    """Return the parsed file. ClusterError for one that exists only inside raypod, with the addresses of an example."""
    file, path = read_file(name), shipped.find(name, shipped.CLUSTERS)
    if not Path(name).exists() and path.is_file():
        raise ClusterError(
            f"{name} does not exist here; `raypod files {path.name} > {path.name}` writes the one that raypod "
            "contains: edit the lines marked EDIT"
        )
    return file


def _prepare_token(path: Path) -> None:
    ray = ray_admission.ray_version()
    if not ray:
        raise ClusterError("Ray is not installed here, but its launcher is required: pip install 'raypod[pod]'")
    change = ray_admission.ensure_token(path)  # also for Ray without tokens: file_mounts copies the file
    if not ray_admission.has_tokens(ray):
        say(f"{ray_admission.NO_TOKEN.format(ray)}; {ray_admission.NO_TOKEN_REMEDY}")
    elif change:
        say(change)


def _check_ssh(cluster: Cluster) -> None:
    """Check the connection and the ssh key of every host.

    An unreachable head raises ClusterError at once: `ray up` would retry for minutes, and it does not check keys.
    """
    found = ssh.map_hosts(cluster.hosts, lambda host: ssh.run_on(host, cluster.ssh, ["true"], timeout_s=ssh.SLACK_S))
    bad = {name: done.error for name, done in found.items() if not done.succeeded}
    if cluster.hosts[0].name in bad:
        raise ClusterError(f"the head {cluster.hosts[0].name} is unreachable: {bad[cluster.hosts[0].name]}")
    for name, error in bad.items():
        say(f"host {name} is unreachable (yet): {error}")


def _check_folders(cluster: Cluster, file: ClusterFile) -> None:
    """Create the folder of Ray's files on every host that can be reached. ClusterError if another user can use one."""
    found = file_checks.folder_problems(cluster, file, create=True)
    if found:
        lines = [f"{name}: {problem}" for name, problem in found.items()]
        raise ClusterError("\n  ".join([f"{cluster.name}: RAY_TMPDIR of the start commands is not safe", *lines]))


def _run_ray(verb: str, path: str, flags: List[str], variables: Dict[str, str], timeout_s: float) -> None:
    """Run a command of Ray's launcher; its output goes to a log file, which is kept if the command fails."""
    began = time.monotonic()
    handle, log = tempfile.mkstemp(prefix=f"raypod-ray-{verb}-", suffix=".log")
    say(f"ray {verb} {path} (log: {log})")
    command = [sys.executable, "-m", "ray.scripts.scripts", verb, "-y", *flags, path]
    own = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1", "RAY_TMPDIR": _temp_folder()}
    # The launcher executes what it finds in ray-config-HASH of TMPDIR, and in its ssh sessions.
    with os.fdopen(handle, "wb") as file, tempfile.TemporaryDirectory(prefix="raypod-ray-") as folder:
        environment = {**os.environ, **own, **variables, "TMPDIR": folder, "PATH": _path_with_private_ssh()}
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise RunError(f"ray {verb} {path}: timed out after {timeout_s:g} s (--timeout); see {log}") from None
    if done.returncode:
        cause = started.launcher_error(Path(log).read_text(errors="replace"))
        raise RunError(f"ray {verb} {path} failed: {cause}; see {log}")
    Path(log).unlink()
    say(f"ray {verb} {path}: done in {time.monotonic() - began:.0f} s")


def _path_with_private_ssh() -> str:
    program = Path(__file__).with_name("private_ssh") / "ssh"
    if not os.access(str(program), os.X_OK):
        raise ClusterError(f"{program} is not executable: chmod 755 it; otherwise other users can take over Ray's ssh")
    return os.pathsep.join([str(program.parent), os.environ.get("PATH", os.defpath)])


def _temp_folder() -> str:
    """Return the temporary folder for Ray's launcher: the common one, unless others can write to its folder `ray`."""
    common = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return private_tmpdir() if make_private(str(Path(common, "ray"))) else common


def _remove_launcher_state(cluster: Cluster) -> None:
    """Remove the state file of Ray's launcher, so that it sets all hosts up again: their disks may be new."""
    with contextlib.suppress(FileNotFoundError):
        Path(_temp_folder(), "ray", f"cluster-{cluster.name}.state").unlink()


def _change_workers(cluster: Cluster, file: ClusterFile, mode: str, workers: Sequence[str]) -> List[str]:
    """Change the workers that a running autoscaler knows, see `autoscaler_hosts`; return those that it has not started.

    RunError if it fails.
    """
    state = f"{file_checks.ray_folder(file, 'head') or '/tmp'}/ray/cluster-{shlex.quote(cluster.name)}.state"
    words = ["bash", "-c", f'exec python3 - {state} "$@"', "bash", mode, *workers]  # a shell expands it
    program = Path(autoscaler_hosts.__file__).read_text()
    done = ssh.run_on(cluster.hosts[0], cluster.ssh, words, program, ssh.SLACK_S)
    answer = done.json_object("failed")
    if answer is None:
        cause = done.error or f"no JSON in {done.excerpt}"
        raise RunError(f"cannot tell the autoscaler on {cluster.hosts[0].name} which hosts the file has: {cause}")
    return list(answer["failed"])


def _stop_processes(cluster: Cluster, hosts: Sequence[Host]) -> Dict[str, ssh.Result]:
    words, program = ["python3", "-", cluster.name], Path(stop_cluster.__file__).read_text()
    return ssh.map_hosts(hosts, lambda host: ssh.run_on(host, cluster.ssh, words, program, _STOP_TIMEOUT_S))


_READ_TOKEN = """
import json, os
path = os.path.expanduser("~/.ray/auth_token")
print(json.dumps({"token": open(path).read() if os.path.exists(path) else None}))
"""


def take_token(cluster: Cluster, file: ClusterFile, say: Callable[[str], None]) -> None:
    """Copy the token of the running head to this machine if it has none.

    Raises:
        ClusterError: this machine has another token, with which the cluster's programs could not reach it any more; or
            that of the head cannot be read.
    """
    path, head = file_checks.token_source(file), cluster.hosts[0]
    done = ssh.run_on(head, cluster.ssh, ["python3", "-"], _READ_TOKEN, ssh.SLACK_S)
    answer = done.json_object("token")
    if answer is None:
        raise ClusterError(f"cannot read the token of {head.name}: {done.error or 'no JSON in ' + done.excerpt}")
    token: Optional[str] = answer["token"]
    if token is None or not token.strip():
        return
    try:
        if path.is_file():
            if path.read_text().strip() != token.strip():
                raise ClusterError(
                    f"{path} is not the token with which {cluster.name} runs, and would replace it on {head.name}: "
                    f"copy {head.name}:~/.ray/auth_token to {path}, or let file_mounts name another file"
                )
            return
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as own:
            own.write(token)
    except (OSError, ValueError) as error:
        raise ClusterError(f"cannot use the cluster's token {path}: {error}") from None
    say(f"copied the cluster's token from {head.name} to {path} (mode 0600)")


def note_running_head(cluster: Cluster, path: str, folder: Path) -> None:
    """Tell Ray's launcher that the head runs with the settings of the cluster file `path`.

    `folder` is that of the launcher's state file. OSError if the file cannot be written.
    """
    util: Any = importlib.import_module("ray.autoscaler._private.util")
    with contextlib.redirect_stdout(io.StringIO()):  # the launcher prints the same warnings into its log
        config = util.prepare_config(yaml.safe_load(Path(path).read_text()))
    kind = config["head_node_type"]
    settings = {**config.get("head_node", {}), **config["available_node_types"][kind].get("node_config", {})}
    tags = {
        "ray-node-type": "head",
        "ray-node-status": "up-to-date",
        "ray-node-name": f"ray-{cluster.name}-head",
        "ray-user-node-type": kind,
        "ray-launch-config": util.hash_launch_conf(settings, config["auth"]),
    }
    state = folder / f"cluster-{cluster.name}.state"
    known = read_object(state)
    known[config["provider"]["head_ip"]] = {"tags": tags, "state": "running"}
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(state, json.dumps(known).encode())


_WITHIN_S = 30.0
_END_S = 5.0
_PROGRAM = """
import fcntl, json, os, sys
folder = os.path.expanduser("~/.raypod")
os.makedirs(folder, exist_ok=True)
file, holder = open(os.path.join(folder, sys.argv[1]), "a+"), ""
try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.truncate(0)
    file.write("%s; if it has ended, `kill %d` on the head" % (sys.argv[2], os.getpid()))
    file.flush()
except BlockingIOError:
    file.seek(0)
    holder = file.read() or "another command"
print(json.dumps({"holder": holder}), flush=True)
if not holder:
    sys.stdin.read()
"""


@contextlib.contextmanager
def cluster_lock(cluster: Cluster, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a cluster within the context. A head that cannot lock is a warning.

    Raises:
        ClusterError: another `raypod up` holds it; the message names it.
    """
    head = cluster.hosts[0]
    since = time.strftime("%H:%M:%S")
    owner = f"pid {os.getpid()} of {_user()} on {socket.gethostname()} (since {since} there)"
    words = ["python3", "-c", _PROGRAM, f"up-{quote(cluster.name, safe='')}.lock", owner]
    with ssh.started(head, cluster.ssh, words) as process:
        answer = _first_answer(process)
        if answer is None:
            say(f"warning: {head.name}: cannot lock {cluster.name}; no other `raypod up` may run for it now")
        elif answer["holder"]:
            raise ClusterError(
                f"{cluster.name}: another `raypod up` runs: {answer['holder']}; otherwise wait until it has ended"
            )
        yield


def _first_answer(process: subprocess.Popen[bytes]) -> Optional[Dict[str, str]]:
    """Return what the program prints; None if it fails or does not answer in time."""
    timer = threading.Timer(_WITHIN_S, process.kill)
    timer.daemon = True
    timer.start()
    try:
        assert process.stdout is not None, "it is a pipe"
        for line in process.stdout:  # a login shell prints others
            answer = ssh.Result(0, line.decode(errors="replace"), "").json_object("holder")
            if answer is not None:
                return answer
        return None
    finally:
        timer.cancel()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name
        return f"uid {os.getuid()}"
