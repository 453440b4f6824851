"""Groups whose ranks are on several nodes; what each rank holds true is in nodes_worker.py."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ranks_of_torch import run

UNSHARE = ("unshare", "--net", "--uts")


@pytest.mark.parametrize(
    ("nodes", "check"),
    [
        ("ab", "right"), ("aab", "right"), ("abab", "models"), ("aaab", "inside"),
        ("aabb", "late"), ("aabb", "versions"), ("aab", "options"), ("aba", "options"),
        ("abb", "absent"),
    ],
)  # fmt: skip
def test_ranks_on_several_nodes(nodes: str, check: str, tmp_path: Path, torch: Any) -> None:
    run("nodes_worker.py", len(nodes), tmp_path, "cpu", nodes, checks=[check])


def test_ranks_in_two_network_namespaces(tmp_path: Path, torch: Any) -> None:
    """Two hosts with names and an interface of their own, without FICCO_NODE."""
    nodes, here = "aabb", Path(__file__).parent
    if shutil.which("ip") is None or subprocess.run([*UNSHARE, "true"], check=False).returncode:
        pytest.skip("network namespaces cannot be made here")
    environment = os.environ | {
        "NODES_ARE_HOSTS": "1", "GLOO_SOCKET_IFNAME": "ficco0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    hosts, files = [], []
    for name in "ab":
        ranks = [rank for rank, node in enumerate(nodes) if node == name]
        words = [sys.executable, "nodes_worker.py", "cpu", nodes, str(tmp_path / "store")]
        starts = [f"{shlex.join(words)} {rank} {len(nodes)} inside & P{rank}=$!" for rank in ranks]
        waits = [f"wait $P{rank}" for rank in ranks]
        script = "; ".join([f"hostname {name}", "read go", *starts, " && ".join(waits)])
        files.append((tmp_path / f"{name}.txt").open("w+"))
        hosts.append(
            subprocess.Popen(
                [*UNSHARE, "sh", "-c", script], cwd=here, env=environment, text=True,
                stdin=subprocess.PIPE, stdout=files[-1], stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    try:
        _connect(*[host.pid for host in hosts])
        for host in hosts:
            assert host.stdin is not None
            host.stdin.write("go\n")
            host.stdin.flush()
        for host in hosts:
            host.wait(120)
        said = [file.seek(0) or file.read() for file in files]
        assert [host.returncode for host in hosts] == [0, 0], "\n".join(map(str, said))
        assert all(str(text).count("right") == 2 for text in said), said
    finally:
        for host in hosts:
            host.kill()  # its namespace, and the interface there, end with its ranks
            host.wait()
        for file in files:
            file.close()


def _connect(first: int, second: int) -> None:
    """Connect the network namespaces of two processes by a pair of interfaces."""
    for pid in (first, second):
        deadline = time.monotonic() + 20
        while os.readlink(f"/proc/{pid}/ns/net") == os.readlink("/proc/self/ns/net"):
            assert time.monotonic() < deadline, "the namespace was not made"
            time.sleep(0.01)
    ends = [f"ficco{os.getpid() % 100000}{end}" for end in "ab"]
    pair = ["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]]
    subprocess.run(pair, check=True)
    for end, pid, last in zip(ends, (first, second), (1, 2), strict=True):
        subprocess.run(["ip", "link", "set", end, "netns", str(pid)], check=True)
        inside = ["nsenter", "--net", "--target", str(pid), "ip"]
        for words in (
            ["link", "set", end, "name", "ficco0"],
            ["address", "add", f"10.9.8.{last}/24", "dev", "ficco0"],
            ["link", "set", "ficco0", "up"], ["link", "set", "lo", "up"],
        ):  # fmt: skip
            subprocess.run([*inside, *words], check=True)
