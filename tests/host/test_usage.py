from __future__ import annotations

from pathlib import Path

from raypod.host.usage import HostMeter

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    400 kB\nBuffers: 1 kB\n"
NETWORK = """Inter-|   Receive                            |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo
    lo: 900 0 0 0 0 0 0 0 900 0 0 0 0 0 0 0
  eth0:   5 0 0 0 0 0 0 0   7 0 0 0 0 0 0 0
  ib0: 10 0 0 0 0 0 0 0 20 0 0 0 0 0 0 0
"""


def write_proc(folder: Path, busy: int, idle: int) -> None:
    (folder / "net").mkdir(exist_ok=True)
    (folder / "stat").write_text(f"cpu  {busy} 0 0 {idle} 0 0 0 0 5 5\ncpu0 1 1 1 1\n")
    (folder / "meminfo").write_text(MEMINFO)
    (folder / "net" / "dev").write_text(NETWORK)


def test_usage_of_a_host(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    now = [10.0]
    monkeypatch.setattr("raypod.host.usage.time.monotonic", lambda: now[0])
    write_proc(tmp_path, busy=100, idle=100)
    meter = HostMeter(tmp_path, tmp_path)
    first = meter.measure()
    assert first is not None
    assert first.cpu_share is None
    assert (first.memory_used_bytes, first.memory_total_bytes) == (600 * 1024, 1000 * 1024)
    assert (first.network_received_bytes, first.network_sent_bytes) == (15, 27)
    assert 0 < first.disk_used_bytes <= first.disk_total_bytes
    write_proc(tmp_path, busy=130, idle=110)
    assert meter.measure() is first  # too soon
    now[0] += 1
    second = meter.measure()
    assert second is not None
    assert second.cpu_share == 0.75


def test_a_host_without_proc_has_no_usage(tmp_path: Path) -> None:
    assert HostMeter(tmp_path / "none", tmp_path).measure() is None


def test_this_host_has_a_usage() -> None:
    usage = HostMeter().measure()
    assert usage is not None
    assert 0 < usage.memory_used_bytes < usage.memory_total_bytes
