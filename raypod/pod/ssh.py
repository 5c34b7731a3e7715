"""Commands on the hosts of a cluster file before (and after) Ray runs there: over ssh, on all of them at once.

The key of a host that is seen for the first time is kept in the user's known_hosts, and another one of that host is
refused; Ray's launcher checks none. A host whose address is one of this machine's own is reached without ssh.
"""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Callable, Dict, List, Sequence, TypeVar

from raypod.errors import ClusterError
from raypod.host.interfaces import interface_addresses
from raypod.plan.cluster import Host, Ssh
from raypod.pod.file_checks import KEY_ON_A_HEAD

CONNECT_S = 8
_AT_ONCE = 64
_NO_CONNECTION, _NO_COMMAND = 255, 127  # exit codes of ssh, of a shell

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Done:
    """A command that ended, or why it did not begin."""

    exit_code: int
    output: str
    complaint: str  # the last line of its stderr; "" if all went well

    @property
    def went_well(self) -> bool:
        """Whether it ended with 0."""
        return self.exit_code == 0


def run_on(host: Host, ssh: Ssh, words: Sequence[str], stdin: str = "", timeout_s: float = 60.0) -> Done:
    """Run a command on a host, without a terminal and without questions."""
    command = list(words) if is_here(host) else [*connection(host, ssh), shlex.join(words)]
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Done(124, "", f"no answer within {timeout_s:g} s")
    except OSError as error:
        return Done(127, "", f"{command[0]}: {error.strerror}")
    said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    complaint = said[-1] if done.returncode and said else f"exit code {done.returncode}" if done.returncode else ""
    return Done(done.returncode, done.stdout, complaint)


def pass_through(host: Host, ssh: Ssh, words: Sequence[str]) -> int:
    """Run a command in the environment in which `ray up` starts Ray on a host; its output is this process's own, and
    so is its exit code. It lasts as long as the command; ssh ends it where the host falls silent. `~/` is the host's.

    Raises:
        ClusterError: the host cannot be reached, or does not have the command; the line before says more.
    """
    # Bash complains where an interactive shell has no terminal; the command's own words on stderr pass.
    command = " ".join("~/" + shlex.quote(word[2:]) if word.startswith("~/") else shlex.quote(word) for word in words)
    shell = f"bash --login -i -c {shlex.quote(f'source ~/.bashrc; exec {command} 2>&3')} 3>&2 2>/dev/null"
    terminal = ["-t"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    code = subprocess.run([*connection(host, ssh, terminal or ["-T"]), shell], check=False).returncode
    if code == _NO_CONNECTION:
        raise ClusterError(f"host {host.name} cannot be reached over ssh, or was lost")
    if code == _NO_COMMAND:
        raise ClusterError(
            f"host {host.name} has no {words[0]}: `python -m raypod up` runs setup_commands, which make it"
        )
    return code


def connection(host: Host, ssh: Ssh, terminal: Sequence[str] = ("-T",)) -> List[str]:
    """The words of ssh up to the command."""
    options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_S}", "StrictHostKeyChecking=accept-new", "LogLevel=ERROR"]
    options += ["ServerAliveInterval=5", "ServerAliveCountMax=3"]
    if ssh.proxy_command:
        options.append(f"ProxyCommand={ssh.proxy_command}")
    words = ["ssh", *terminal, *(word for option in options for word in ("-o", option))]
    keys = [Path(key).expanduser() for key in (ssh.private_key, KEY_ON_A_HEAD) if key]
    for key in [key for key in keys if key.is_file()][:1]:
        words += ["-i", str(key), "-o", "IdentitiesOnly=yes"]
    return [*words, f"{ssh.user}@{host.address}" if ssh.user else host.address]


def is_here(host: Host) -> bool:
    """Whether a host is this machine, by its address."""
    return host.address == "localhost" or host.address in interface_addresses().values()


def on_all(hosts: Sequence[Host], work: Callable[[Host], T]) -> Dict[str, T]:
    """Do something for all hosts at the same time; the results by host, in order."""
    if not hosts:
        return {}
    with ThreadPoolExecutor(min(_AT_ONCE, len(hosts))) as pool:
        return dict(zip((host.name for host in hosts), pool.map(work, hosts)))
