"""`python -m raypod up FILE` and `down FILE`: `ray up` and `ray down` without their traps.

`ray up` is done when the head is; a worker that does not come is never an error. `ray down` ends the head alone, and
every other Ray on it. Here both are about the hosts of the file, all of them, and nothing else.
"""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Dict, List, Sequence

from raypod.cli import FlagParser
from raypod.errors import ClusterError, RunError
from raypod.fleet import gcs, ray_admission
from raypod.plan.cluster import Cluster, Host, cluster_from, read_file, refuse
from raypod.pod import file_checks, ssh, stop_cluster

_STOP_BOUND_S = 60.0
_LONGEST_LINE = 240
_RAYS_OWN = re.compile(r"\d{4}-\d\d-\d\d |Shared connection|Warning: Permanently")  # lines of its launcher, and of ssh
_SSH_SLACK_S = 30.0
_SOURCE = "~/raypod/source/raypod"  # where the files that are shipped bring raypod


def up(argv: Sequence[str]) -> int:
    """Start Ray on all hosts of a file, closed by a token, and wait until all of them are there."""
    parser = _parser("up", "Start Ray on all hosts of a cluster file, and wait until all of them are there.")
    parser.add_argument("--wait-hosts", type=float, default=120.0, metavar="S", help="how long to wait for them [120]")
    parser.add_argument("--timeout", type=float, default=1800.0, metavar="S", help="bound of `ray up` itself [1800]")
    parser.add_argument("--no-restart", action="store_true", help="leave a Ray that runs as it is")
    args = parser.parse_args(argv)
    file = read_file(args.file)
    refuse(args.file, [*file_checks.mistakes_of_access(file), *file_checks.mistakes_for_launch(file)])
    cluster = cluster_from(file, args.file)
    for advice in file_checks.advice_for_launch(file):
        _say(f"{args.file}, {advice}")
    _prepare_token(file_checks.token_source(file))
    _look(cluster)
    flags = ["--no-config-cache", *(["--no-restart"] if args.no_restart else [])]
    if not args.no_restart:
        _forget(cluster)
    _ray("up", args.file, flags, {"RAY_UP_enable_autoscaler_v2": "0"}, args.timeout)
    _wait(cluster, args.wait_hosts, file_checks.tls_variables(file))
    _say(f"{cluster.name}: Ray runs on all {len(cluster.hosts)} hosts")
    has_source = _SOURCE in (file.top.value("file_mounts") or {})
    where = f"on {cluster.hosts[0].name}" + (f" in {Path(_SOURCE).parent}" if has_source else "")
    _say(
        f"next: python -m raypod doctor --cluster {args.file}; then, {where}: "
        f"{cluster.python} -m raypod.train --cluster {args.file}"
    )
    return 0


def down(argv: Sequence[str]) -> int:
    """End what runs of a cluster on all hosts of its file, and nothing else."""
    args = _parser("down", "End Ray on all hosts of a cluster file.").parse_args(argv)
    file = read_file(args.file)
    refuse(args.file, file_checks.mistakes_of_access(file))
    cluster = cluster_from(file, args.file)
    if not file_checks.is_marked(file):
        mark = f"{stop_cluster.MARK}={cluster.name}"
        _say(f"{args.file}: the start commands do not export {mark}: workers end by themselves, within a minute")
        _ray("down", args.file, [], {}, 300.0)
        return 0
    head, workers = cluster.hosts[:1], cluster.hosts[1:]
    stopped = {**_stop(cluster, head), **_stop(cluster, workers)}  # in this order: the head would start workers again
    told = {name: json.loads(done.output) for name, done in stopped.items() if done.output.startswith("{")}
    bad = [
        f"{name}: {told[name]['left']} processes are left" if name in told else f"{name}: {done.complaint}"
        for name, done in stopped.items()
        if not done.went_well
    ]
    if told.get(head[0].name, {}).get("others"):
        _say(f"{head[0].name}: another Ray runs there and goes on; `ray down` would have ended it")
    elif head[0].name in told:
        _ray("down", args.file, [], {}, 300.0)  # nothing runs there any more; Ray's launcher forgets the cluster
    if bad:
        raise RunError("\n  ".join([f"{cluster.name} is not down on {len(bad)} of {len(stopped)} hosts", *bad]))
    _say(f"{cluster.name}: nothing of it runs on its {len(cluster.hosts)} hosts")
    return 0


def _parser(verb: str, description: str) -> FlagParser:
    parser = FlagParser(prog=f"raypod {verb}", description=description)
    parser.add_argument("file", metavar="FILE", help="the cluster file")
    return parser


def _prepare_token(path: Path) -> None:
    ray = ray_admission.ray_version()
    if not ray:
        raise ClusterError("Ray is not installed here, and its launcher starts the hosts: pip install 'ray[default]'")
    done = ray_admission.ensure_token(path)  # older Ray ignores it; the file is mounted all the same
    if not ray_admission.has_tokens(ray):
        _say(ray_admission.NO_TOKEN.format(ray))
    elif done:
        _say(done)


def _look(cluster: Cluster) -> None:
    """Refuse at once where `ray up` would try for minutes; and note the keys of the hosts, which it does not check."""
    found = ssh.on_all(cluster.hosts, lambda host: ssh.run_on(host, cluster.ssh, ["true"], timeout_s=_SSH_SLACK_S))
    bad = {name: done.complaint for name, done in found.items() if not done.went_well}
    if cluster.hosts[0].name in bad:
        raise ClusterError(f"the head {cluster.hosts[0].name} cannot be reached: {bad[cluster.hosts[0].name]}")
    for name, complaint in bad.items():
        _say(f"host {name} cannot be reached (yet): {complaint}")


def _ray(verb: str, path: str, flags: List[str], variables: Dict[str, str], timeout_s: float) -> None:
    """Run a command of Ray's launcher; what it says goes into a file, which stays if it fails."""
    began = time.monotonic()
    handle, log = tempfile.mkstemp(prefix=f"raypod-ray-{verb}-", suffix=".log")
    _say(f"ray {verb} {path} (what it says: {log})")
    command = [sys.executable, "-m", "ray.scripts.scripts", verb, "-y", *flags, path]
    environment = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONUNBUFFERED": "1",
        "RAY_TMPDIR": str(_temp_folder()),
    }
    environment.update(variables)
    with os.fdopen(handle, "wb") as file:
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
            raise RunError(f"ray {verb} {path}: not done within {timeout_s:g} s (--timeout); see {log}") from None
    if done.returncode:
        raise RunError(
            f"ray {verb} {path} failed: {_last_words(Path(log).read_text(errors='replace'))}; all of it: {log}"
        )
    Path(log).unlink()
    _say(f"ray {verb} {path}: done in {time.monotonic() - began:.0f} s")


def _temp_folder() -> Path:
    """Where Ray's launcher keeps its notes: /tmp/ray, unless that belongs to somebody else, its first user."""
    if "RAY_TMPDIR" in os.environ:
        return Path(os.environ["RAY_TMPDIR"])
    common = Path(tempfile.gettempdir())
    if not (common / "ray").exists() or os.access(str(common / "ray"), os.W_OK | os.X_OK):
        return common
    own = common / f"ray-{getpass.getuser()}"
    own.mkdir(mode=0o700, exist_ok=True)
    return own


def _forget(cluster: Cluster) -> None:
    """Have the hosts set up anew: by its notes Ray holds them for ready, though they may have new disks since."""
    with contextlib.suppress(FileNotFoundError):
        (_temp_folder() / "ray" / f"cluster-{cluster.name}.state").unlink()


def _last_words(log: str) -> str:
    """The line that says why, as far as one does: what a command on a host said last, else Ray's own."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    failed = [at for at, line in enumerate(lines) if "New status: update-failed" in line]
    said = [line for line in lines[: (failed or [0])[-1]] if not _RAYS_OWN.match(line)]
    telling = [line for line in lines if "Error" in line and "click.exceptions" not in line]
    rest = [line for line in lines if "VINFO" not in line]  # the commands of ssh, at length
    return (said or telling or rest or ["nothing"])[-1][:_LONGEST_LINE]


def _wait(cluster: Cluster, within_s: float, tls: Sequence[str]) -> None:
    """Wait until the head's GCS knows all hosts; asked on the head, where its port is open."""
    head, names = cluster.hosts[0], [host.address for host in cluster.hosts]
    words = ["env", *tls, "python3", "-", str(cluster.gcs_address), str(within_s), *names]
    done = ssh.run_on(head, cluster.ssh, words, Path(gcs.__file__).read_text(), within_s + _SSH_SLACK_S)
    if not done.went_well:
        raise RunError(f"cannot ask {head.name} which hosts are there: {done.complaint}")
    answer = json.loads(done.output)
    if not answer["missing"]:
        return
    reasons = ssh.on_all(
        [host for host in cluster.hosts if host.address in answer["missing"]], lambda host: _why_missing(host, cluster)
    )
    told = "\n  ".join(f"{name}: {reason}" for name, reason in reasons.items())
    gcs_said = f" ({answer['told']})" if answer["told"] else ""
    raise RunError(
        f"{cluster.name}: {len(reasons)} of {len(cluster.hosts)} hosts did not come within {within_s:g} s "
        f"(--wait-hosts){gcs_said}\n  {told}"
    )


def _why_missing(host: Host, cluster: Cluster) -> str:
    done = ssh.run_on(host, cluster.ssh, ["true"], timeout_s=_SSH_SLACK_S)
    if not done.went_well:
        return done.complaint
    # The head starts the workers; RAY_TMPDIR is that of the files that are shipped, or Ray's own.
    logs = "/ray/session_latest/logs/monitor.out"
    command = f"tail -qn 400 /tmp/ray-$(id -un){logs} /tmp{logs} 2>/dev/null"
    log = ssh.run_on(cluster.hosts[0], cluster.ssh, ["bash", "-c", command], timeout_s=_SSH_SLACK_S).output
    return f"can be reached; of starting Ray there the head's {logs} says last: {_last_words(log)}"


def _stop(cluster: Cluster, hosts: Sequence[Host]) -> Dict[str, ssh.Done]:
    words, program = ["python3", "-", cluster.name], Path(stop_cluster.__file__).read_text()
    return ssh.on_all(hosts, lambda host: ssh.run_on(host, cluster.ssh, words, program, _STOP_BOUND_S))


def _say(text: str) -> None:
    print(f"raypod: {text}", file=sys.stderr, flush=True)  # noqa: T201 - the command line's own output
