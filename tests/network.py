"""Hosts with addresses of their own: network namespaces of this machine on one bridge."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

NETWORK = "10.213.77"
NAMES = Path("/etc/netns")  # where `ip netns exec` looks for files that a namespace sees in /etc


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True)


def can_make_namespaces():
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"roost-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made.returncode == 0


class Network:
    """Namespaces by the names of their hosts, each with the last number of its address."""

    def __init__(self, hosts):
        self.hosts, self._prefix = hosts, f"roost-{os.getpid()}"
        switch = self._space("switch")
        for name in ("switch", *hosts):
            ip("netns", "add", self._space(name))
            ip("-n", self._space(name), "link", "set", "lo", "up")
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for name, number in hosts.items():
            space = self._space(name)
            ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", f"to-{name}", "netns", switch)
            ip("-n", switch, "link", "set", f"to-{name}", "master", "bridge", "up")
            ip("-n", space, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            # As on Debian: a host's own name leads to loopback.
            known = {other: "127.0.1.1" if other == name else self.address(other) for other in hosts}
            (NAMES / space).mkdir(parents=True)
            lines = ["127.0.0.1 localhost", *(f"{address} {other}" for other, address in known.items())]
            (NAMES / space / "hosts").write_text("\n".join(lines) + "\n")

    def _space(self, host):
        return f"{self._prefix}-{host}"

    def address(self, host):
        return f"{NETWORK}.{self.hosts[host]}"

    def command(self, host, *words):
        return ["ip", "netns", "exec", self._space(host), *map(str, words)]

    def pids(self, host):
        found = subprocess.run(["ip", "netns", "pids", self._space(host)], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def kill_all(self):
        for host in self.hosts:
            for pid in self.pids(host):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue

    def close(self):
        self.kill_all()
        for name in ("switch", *self.hosts):
            subprocess.run(["ip", "netns", "del", self._space(name)], capture_output=True)
            shutil.rmtree(NAMES / self._space(name), ignore_errors=True)
