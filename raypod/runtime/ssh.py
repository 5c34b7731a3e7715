"""Run commands on the hosts of a cluster file over ssh, without Ray, on all hosts in parallel.

The key of a new host is added to the user's known_hosts; a changed key is refused. Ray's launcher does not check
keys. A host with an address of this machine is reached without ssh. Output is decoded as UTF-8; bytes of another
encoding become backslash escapes.
"""

from __future__ import annotations

import binascii
import contextlib
import dataclasses
import json
import shlex
import struct
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, TypeVar

from raypod.errors import ClusterError
from raypod.plan.cluster import Host, Ssh
from raypod.system.interfaces import interface_addresses
from raypod.system.log_files import last_line

HEAD_KEY_PATH = "~/ray_bootstrap_key.pem"  # where `ray up` copies the operator's ssh key
_MAX_KEY_BYTES = 1 << 16
_OPENSSH, _MAGIC = b"-----BEGIN OPENSSH PRIVATE KEY-----", b"openssh-key-v1\0"
_PEM = (b"-----BEGIN ENCRYPTED PRIVATE KEY-----", b"Proc-Type: 4,ENCRYPTED")
CONNECT_S = 8
SLACK_S = 30.0  # for ssh and Python to start on a host, beyond the time of the program itself
_END_S = 10.0  # for the first command of a pipe to end after the second one
_MAX_PARALLEL = 64
_DENIED = "Permission denied"
_NO_CONNECTION, _NO_COMMAND = 255, 127  # exit codes of ssh, of a shell

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a command, or the reason why it did not start."""

    exit_code: int
    output: str
    error: str  # the last line of stderr; "" on success

    @property
    def succeeded(self) -> bool:
        """Whether the exit code is 0."""
        return self.exit_code == 0

    def json_object(self, key: str) -> Optional[Dict[str, Any]]:
        """Return the last JSON object with `key` on one line of the output; None if there is none.

        Login shells and ssh servers print other text before and after it.
        """
        for line in reversed(self.output.splitlines()):
            at = line.find("{")
            while at >= 0:
                with contextlib.suppress(ValueError, RecursionError):
                    found, _ = json.JSONDecoder().raw_decode(line, at)
                    if key in found:
                        return dict(found)
                at = line.find("{", at + 1)
        return None

    @property
    def excerpt(self) -> str:
        """The beginning of the output in one line, for messages."""
        return repr(" ".join(self.output.split())[:80])


def run_on(host: Host, ssh: Ssh, words: Sequence[str], stdin: str = "", timeout_s: float = 60.0) -> Result:
    """Run a command on a host, without a terminal and without prompts."""
    command = _command_on(host, ssh, words)
    try:
        done = subprocess.run(
            command,
            input=stdin.encode(),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Result(124, "", f"no answer within {timeout_s:g} s")
    except OSError as error:
        return Result(127, "", f"{command[0]}: {error.strerror}")
    result = _result(done.returncode, done.stdout, done.stderr)
    is_refused = result.exit_code == _NO_CONNECTION and not is_local(host)
    hint = passphrase_hint(result.error, ssh) if is_refused else ""
    return dataclasses.replace(result, error=result.error + hint)


@contextlib.contextmanager
def started(host: Host, ssh: Ssh, words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command on a host within the context; its stdin ends when the context ends, or this process."""
    with subprocess.Popen(
        _command_on(host, ssh, words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C ends it with this process, not before
    ) as process:
        assert process.stdin is not None, "it is a pipe"
        try:
            yield process
        finally:
            with contextlib.suppress(OSError):  # it has ended
                process.stdin.close()
            try:
                process.wait(timeout=_END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def pipe(source: Tuple[Host, Sequence[str]], target: Tuple[Host, Sequence[str]], ssh: Ssh, timeout_s: float) -> Result:
    """Run two commands, each on its host; the output of the first one is the input of the second one.

    Returns:
        The result of the second one; its error is that of the first one if only that failed.
    """
    commands = [_command_on(host, ssh, words) for host, words in (source, target)]
    with contextlib.ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
        first = stack.enter_context(
            subprocess.Popen(commands[0], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors[0])
        )
        second = stack.enter_context(
            subprocess.Popen(commands[1], stdin=first.stdout, stdout=subprocess.PIPE, stderr=errors[1])
        )
        assert first.stdout is not None, "it is a pipe"
        first.stdout.close()  # otherwise the first one never finds out that the second one has ended
        try:
            output, _ = second.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            first.kill()
            second.kill()
            return Result(124, "", f"no answer within {timeout_s:g} s")
        try:
            first.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            first.kill()
            first.wait()
        for error in errors:
            error.seek(0)
        result = _result(second.returncode, output, errors[1].read())
        sent = _result(first.returncode, b"", errors[0].read())
    return result if result.error else dataclasses.replace(result, error=sent.error)


def pass_through(host: Host, ssh: Ssh, words: Sequence[str]) -> int:
    """Run a command on a host in the environment of `ray up`, with this process's stdin and output.

    See `login_command` for the words. There is no timeout, but ssh detects a dead connection.

    Returns:
        The exit code of the command.

    Raises:
        ClusterError: The host cannot be reached, or does not have the command; ssh's own message precedes it.
    """
    shell = login_command(words)
    terminal = ["-t"] if sys.stdin.isatty() and sys.stdout.isatty() else []
    code = subprocess.run([*ssh_command(host, ssh, terminal or ["-T"]), shell], check=False).returncode
    if code == _NO_CONNECTION:
        hint = passphrase_hint(_DENIED, ssh)  # ssh has printed the cause
        cause = f"; if the key was refused{hint}" if hint else ""
        raise ClusterError(f"host {host.name} is unreachable over ssh, or the connection was lost{cause}")
    if code == _NO_COMMAND:
        raise ClusterError(
            f"host {host.name} has no {words[0]}: setup_commands of the cluster file install it, run by `raypod up`"
        )
    return code


def login_command(words: Sequence[str]) -> str:
    """Return a shell command that runs `words` in the environment of `ray up`, a login shell.

    A leading `~/` in a word is the home folder on the host.
    """
    # Drop bash's warnings about the missing terminal, but keep the command's stderr.
    command = " ".join("~/" + shlex.quote(word[2:]) if word.startswith("~/") else shlex.quote(word) for word in words)
    return f"bash --login -i -c {shlex.quote(f'source ~/.bashrc; exec {command} 2>&3')} 3>&2 2>/dev/null"


def ssh_command(host: Host, ssh: Ssh, terminal: Sequence[str] = ("-T",)) -> List[str]:
    """Return the ssh command line without the remote command."""
    options = ["BatchMode=yes", f"ConnectTimeout={CONNECT_S}", "StrictHostKeyChecking=accept-new", "LogLevel=ERROR"]
    options += ["ServerAliveInterval=5", "ServerAliveCountMax=3"]
    if ssh.proxy_command:
        options.append(f"ProxyCommand={ssh.proxy_command}")
    words = ["ssh", *terminal, *(word for option in options for word in ("-o", option))]
    key = _key(ssh)
    if key is not None:
        words += ["-i", str(key), "-o", "IdentitiesOnly=yes"]
    return [*words, "--", f"{ssh.user}@{host.address}" if ssh.user else host.address]


def _key(ssh: Ssh) -> Optional[Path]:
    keys = [Path(key).expanduser() for key in (ssh.private_key, HEAD_KEY_PATH) if key]
    return next((key for key in keys if key.is_file()), None)


def passphrase_hint(error: str, ssh: Ssh) -> str:
    """Return the end of a message for a key that ssh, which must not ask here, cannot decrypt; "" for other causes."""
    key = _key(ssh) if _DENIED in error else None
    if key is None or not has_passphrase(str(key)):
        return ""
    return f" ({key} has a passphrase, and no ssh agent here has the key: eval $(ssh-agent); ssh-add {key})"


def is_local(host: Host) -> bool:
    """Return whether the address of a host belongs to this machine."""
    return host.address == "localhost" or host.address in interface_addresses().values()


def map_hosts(hosts: Sequence[Host], work: Callable[[Host], T]) -> Dict[str, T]:
    """Call `work` for all hosts in parallel; return the results by host name, in order."""
    if not hosts:
        return {}
    with ThreadPoolExecutor(min(_MAX_PARALLEL, len(hosts))) as pool:
        return dict(zip((host.name for host in hosts), pool.map(work, hosts)))


def _command_on(host: Host, ssh: Ssh, words: Sequence[str]) -> List[str]:
    """Return the command line that runs `words` on a host."""
    return list(words) if is_local(host) else [*ssh_command(host, ssh), shlex.join(words)]


def _result(exit_code: int, stdout: bytes, stderr: bytes) -> Result:
    """Return the result of a command that has ended."""
    output = stdout.decode(errors="backslashreplace")
    if exit_code == 0:
        return Result(0, output, "")
    return Result(exit_code, output, last_line(stderr.decode(errors="backslashreplace")) or f"exit code {exit_code}")


def has_passphrase(path: str) -> bool:
    """Return whether an ssh key is encrypted: without an agent, ssh that must not ask cannot use it.

    False for a file that is missing, or of another format.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            lines = [line.strip() for line in file.read(_MAX_KEY_BYTES).splitlines()]
        if lines[:1] != [_OPENSSH]:
            return any(line in _PEM for line in lines)
        content = binascii.a2b_base64(b"".join(line for line in lines if not line.startswith(b"-----")))
        (size,) = struct.unpack_from(">I", content, len(_MAGIC))
    except (OSError, RuntimeError, ValueError, struct.error):  # RuntimeError: no home folder
        return False
    at = len(_MAGIC) + 4
    return content.startswith(_MAGIC) and content[at : at + size] != b"none"  # the cipher: PROTOCOL.key of OpenSSH
