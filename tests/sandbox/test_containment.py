"""Code that tries to get out. Each case works outside of a sandbox, and prints that it got there."""

import asyncio
import os
import socket
import subprocess
import sys
import threading

import pytest

from roost.sandbox.execution import Fault
from roost.sandbox.sandbox import Sandbox
from tests.limits import HANG_S
from tests.sandbox.playground import PATIENT, REACHED, executed, outside, ran

SECRET = "the key to everything"


@pytest.fixture
def surroundings(tmp_path):
    """Things that are worth reaching: files, servers, a process."""
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    victim = subprocess.Popen(
        [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"SECRET": SECRET, "PATH": os.environ["PATH"]}
    )
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagram,
    ):
        udp.bind(("127.0.0.1", 0))
        stream.bind(str(tmp_path / "stream"))
        stream.listen()
        datagram.bind(str(tmp_path / "datagram"))
        yield {
            "secret": str(secret),
            "folder": str(tmp_path),
            "tcp": tcp.getsockname()[1],
            "udp": udp.getsockname()[1],
            "victim": victim.pid,
        }
    victim.communicate(b"\n", timeout=HANG_S)


def filled(code, surroundings):
    """The code with the names of things to reach; what it prints when it did."""
    for name, value in surroundings.items():
        code = code.replace(f"<{name}>", str(value))
    return f"{code}\nprint('REACH' + 'ED')\n"


READING = {
    "a file": "assert 'key' in open('<secret>').read()",
    "accounts": "assert 'root' in open('/etc/passwd').read()",
    "a listing": "import os; assert 'secret.txt' in os.listdir('<folder>')",
    "by a symbolic link": "import os; os.symlink('<secret>', 'link'); assert 'key' in open('link').read()",
    "by a hard link": "import os; os.link('<secret>', '<folder>/hard'); assert 'key' in open('<folder>/hard').read()",
    "by the root of a process": "assert 'key' in open('/proc/self/root<secret>').read()",
    "by the folder of a process": "import os; os.chdir('/proc/self/cwd'); assert 'key' in open('<secret>').read()",
    "by a path upwards": "import os; os.chdir('<folder>'); assert 'key' in open('secret.txt').read()",
    "by a descriptor of the folder": "import os\nat = os.open('<folder>', os.O_PATH)\n"
    "assert b'key' in os.read(os.open('secret.txt', os.O_RDONLY, dir_fd=at), 99)",
    "by a descriptor reopened": "import os\nat = os.open('<secret>', os.O_PATH)\n"
    "assert 'key' in open(f'/proc/self/fd/{at}').read()",
    "variables of another process": "assert 'key' in open('/proc/<victim>/environ').read()",
    "variables of the parent": "import os; open(f'/proc/{os.getppid()}/environ').read()",
    "own memory as a file": "open('/proc/self/mem', 'rb')",
    "the machine's settings": "open('/proc/sys/kernel/hostname').read()",
    "devices": "import os; assert os.listdir('/dev')",
    "with the C library": "import ctypes\nassert ctypes.CDLL(None).open(b'<secret>', 0) >= 0",
}
WRITING = {
    "a new file": "open('<folder>/new', 'w').write('a')",
    "an old file": "open('<secret>', 'a').write('a')",
    "deleting": "import os; os.remove('<secret>')",
    "moving away": "import os; os.rename('<secret>', '<folder>/moved')",
    "moving in": "import os; open('<folder>/mine', 'w').close(); os.rename('<folder>/mine', '<secret>')",
    "a new folder": "import os; os.mkdir('<folder>/new')",
    "a symbolic link": "import os; os.symlink('/', '<folder>/link')",
    "emptying": "import os; os.truncate('<secret>', 0)",
    "emptying to read": "import os; os.open('<secret>', os.O_RDONLY | os.O_TRUNC)",
    "emptying to neither read nor write": "import os; os.open('<secret>', 3 | os.O_TRUNC)",
    "the mode": "import os; os.chmod('<secret>', 0o640); assert os.stat('<secret>').st_mode & 0o777 == 0o640",
    "the time": "import os; os.utime('<secret>', (1, 1)); assert os.stat('<secret>').st_mtime == 1",
    "a fifo": "import os; os.mkfifo('<folder>/fifo')",
}
NETWORK = {
    "TCP": "import socket; socket.create_connection(('127.0.0.1', <tcp>))",
    "UDP": "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'a', ('127.0.0.1', <udp>))",
    "names": "import socket; socket.gethostbyname('localhost')\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
    "listening": "import socket; socket.create_server(('127.0.0.1', 0))",
    "a Unix socket": "import socket; socket.socket(socket.AF_UNIX).connect('<folder>/stream')",
    "a Unix datagram": "import socket as s; s.socket(s.AF_UNIX, s.SOCK_DGRAM).sendto(b'a', '<folder>/datagram')",
    "datagrams of a pair": "import socket; a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    "a.sendto(b'a', '<folder>/datagram')",
    "netlink": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "asyncio": "import asyncio; asyncio.run(asyncio.open_connection('127.0.0.1', <tcp>))",
    "with the C library": "import ctypes; assert ctypes.CDLL(None).socket(2, 1, 0) >= 0",
}
PROCESSES = {
    "os.system": "import os; assert os.system('true') == 0",
    "subprocess": "import subprocess; subprocess.run(['true'], check=True)",
    "fork": "import os\nif os.fork() == 0: os._exit(0)",
    "vfork by ctypes": "import ctypes, os\npid = ctypes.CDLL(None).syscall(<clone>, 17, 0, 0, 0, 0)\n"
    "if pid == 0: os._exit(0)\nassert pid > 0",
    "posix_spawn": "import os; os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)",
    "multiprocessing": "import multiprocessing as m; p = m.get_context('fork').Process(target=print); p.start()\n"
    "p.join(); assert p.exitcode == 0",
    "asking about others": "import os; os.kill(<victim>, 0)",
    "signals to others": "import os, signal; os.kill(<victim>, signal.SIGCONT)",
    "signals to the parent": "import os; os.kill(os.getppid(), 18)",
    "signals to the group": "import os; os.killpg(0, 18)",
    "signals by a descriptor": "import os, signal; signal.pidfd_send_signal(os.pidfd_open(<victim>), 18)",
    "signals by ownership": "import fcntl, os; r, w = os.pipe(); fcntl.fcntl(r, fcntl.F_SETOWN, <victim>)",
    "limits of others": "import resource; resource.prlimit(<victim>, resource.RLIMIT_CORE)",
    "priorities of others": "import os; os.setpriority(os.PRIO_PROCESS, <victim>, 5)",
    "memory of others": "import ctypes\nclass Piece(ctypes.Structure): _fields_ = [('at', ctypes.c_void_p), "
    "('size', ctypes.c_size_t)]\nmaps = open('/proc/<victim>/maps').readline()\n"
    "space = ctypes.create_string_buffer(8)\n"
    "here, there = Piece(ctypes.addressof(space), 8), Piece(int(maps.split('-')[0], 16), 8)\n"
    "assert ctypes.CDLL(None).process_vm_readv(<victim>, ctypes.byref(here), 1, ctypes.byref(there), 1, 0) == 8",
    "unlimited files": "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (r.getrlimit(r.RLIMIT_NOFILE)[1],) * 2)\n"
    "assert r.getrlimit(r.RLIMIT_NOFILE)[0] > 100",
    "memory without a name": "import os; os.memfd_create('a')",
    "shared memory": "import ctypes; assert ctypes.CDLL(None).shmget(0, 4096, 0o600) >= 0",
}
CASES = [
    pytest.param(code, id=f"{kind}: {name}")
    for kind, cases in {"reading": READING, "writing": WRITING, "network": NETWORK, "processes": PROCESSES}.items()
    for name, code in cases.items()
]


@pytest.mark.skipif(sys.platform != "linux", reason="what holds it is Linux's")
@pytest.mark.parametrize("code", CASES)
def test_there_is_no_way_out(code, surroundings, tmp_path):
    surroundings["clone"] = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    before = sorted(tmp_path.iterdir())
    (execution,) = executed(filled(code, surroundings))
    assert REACHED not in execution.output
    assert execution.error == Fault.RAISED, execution.output
    assert SECRET not in execution.output
    assert sorted(tmp_path.iterdir()) == before
    assert (tmp_path / "secret.txt").read_text() == SECRET
    assert (tmp_path / "secret.txt").stat().st_mode & 0o777 == 0o600
    apart = tmp_path / "apart"
    apart.mkdir()
    assert REACHED in outside(filled(code, surroundings), cwd=apart)  # the control: nothing else was in its way


@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import os; os.execv('/bin/true', ['true'])", id="becoming another program"),
        pytest.param("import os, sys; os.execv(sys.executable, [sys.executable, '-c', '1'])", id="a new interpreter"),
        pytest.param("import socket; socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)", id="raw packets"),
        pytest.param("import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", id="raw frames"),
        pytest.param("import socket; socket.getaddrinfo('example.org', 80)", id="names of the world"),
        pytest.param("import os; os.setuid(0)", id="becoming root"),
        pytest.param("import os; os.chroot('.')", id="another root"),
        pytest.param("import ctypes, os\nif ctypes.CDLL(None, use_errno=True).unshare(0x10000000): "
                     "raise OSError(ctypes.get_errno(), '')", id="a namespace"),
        pytest.param("import ctypes\nif ctypes.CDLL(None).ptrace(0, 0, 0, 0): raise OSError", id="being traced"),
        pytest.param("import ctypes\nif ctypes.CDLL(None).prctl(1, 0, 0, 0, 0): raise OSError", id="outliving"),
        pytest.param("import ctypes\nif ctypes.CDLL(None).mount(b'', b'.', b'tmpfs', 0, 0): raise OSError", id="mount"),
        pytest.param("import ctypes\nif ctypes.CDLL(None).syscall(425, 1, 0) < 0: raise OSError", id="io_uring"),
        pytest.param("import ctypes, os\nfile, size = os.open('a', os.O_RDWR | os.O_CREAT), ctypes.c_long(1 << 20)\n"
                     "if ctypes.CDLL(None).fallocate(file, 1, ctypes.c_long(0), size): raise OSError",
                     id="room beyond a file's end"),
    ],
)  # fmt: skip
def test_calls_of_the_kernel_are_refused(code):
    execution, after = executed(code, "print('alive')")
    assert execution.error == Fault.RAISED, execution.output
    assert after.output == "alive\n"


def test_nothing_of_the_trainer_is_inherited(monkeypatch, tmp_path):
    monkeypatch.setenv("SECRET_KEY", SECRET)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        (execution,) = executed(
            "import os, sys\nprint(os.environ, sys.path, sys.argv)\n"
            "for number in range(64):\n  try: os.fstat(number)\n  except OSError: pass\n  else: print('fd', number)"
        )
    assert SECRET not in execution.output and str(tmp_path) not in execution.output
    assert execution.output.count("fd ") == 4  # input, output, errors and the connection


def test_one_sandbox_cannot_reach_another():
    async def run():
        one, other = await asyncio.gather(Sandbox.start(), Sandbox.start())
        async with one, other:
            described = await one.execute("import os\nopen('a', 'w').write('mine')\nprint(os.getcwd(), os.getpid())")
            folder, pid = described.output.split()
            tries = [f"open('{folder}/a').read()", f"import os; os.kill({pid}, 9)", f"open('/proc/{pid}/environ')"]
            return [(await other.execute(code)).error for code in tries], await one.execute("print('alive')")

    errors, after = ran(run())
    assert errors == [Fault.RAISED] * 3
    assert after.output == "alive\n"


RACE = """
import os, signal, socket
reached = set()
for turn in range(200):
    for what, attack in (
        ("read", lambda: open({folder!r} + "/mine").read()),
        ("written", lambda: open({folder!r} + "/mine", "a").write("spoilt")),
        ("renamed", lambda: os.rename({folder!r} + "/mine", "theirs")),
        ("linked", lambda: open(os.symlink({folder!r} + f"/mine", f"link{{turn}}") or f"link{{turn}}").read()),
        ("listed", lambda: os.listdir({folder!r})),
        ("killed", lambda: os.kill({pid}, signal.SIGKILL)),
        ("memory", lambda: open("/proc/{pid}/mem", "rb").read(1)),
        ("descriptors", lambda: os.listdir("/proc/{pid}/fd")),
        ("socket", lambda: socket.socket(socket.AF_UNIX).connect("\\0roost")),
        ("shared memory", lambda: open("/dev/shm/roost-race", "w").write("x")),
    ):
        try:
            attack()
        except OSError:
            continue
        reached.add(what)
    open("mine", "w").write(str(turn))
print(sorted(reached), open("mine").read(), mark)
"""


def test_two_sandboxes_that_race_to_spoil_each_other_do_not():
    """Both attack at once, again and again, while each goes on with its own files and variables."""

    async def run():
        one, other = await asyncio.gather(Sandbox.start(PATIENT), Sandbox.start(PATIENT))
        async with one, other:
            begin = "import os\nmark = {!r}\nopen('mine', 'w').write(mark)\nprint(os.getcwd(), os.getpid())"
            described = await asyncio.gather(one.execute(begin.format("one")), other.execute(begin.format("other")))
            places = [execution.output.split() for execution in described]
            attacks = [RACE.format(folder=folder, pid=pid) for folder, pid in reversed(places)]
            return await asyncio.gather(one.execute(attacks[0]), other.execute(attacks[1]))

    assert [execution.output for execution in ran(run())] == ["[] 199 one\n", "[] 199 other\n"]


def test_two_sandboxes_that_start_and_end_at_once_keep_apart():
    """One is closed, and another started, while a third is at work: each has its own folder and process."""

    async def run():
        async with await Sandbox.start(PATIENT) as steady:
            await steady.execute("kept = 0")
            for number in range(5):
                passing = await Sandbox.start(PATIENT)
                at_work = asyncio.create_task(steady.execute("kept += 1\nopen('kept', 'w').write(str(kept))"))
                _, _, following = await asyncio.gather(at_work, passing.close(), Sandbox.start(PATIENT))
                async with following:
                    seen = await following.execute("import os; print(os.listdir('.'), 'kept' in globals())")
                    assert seen.output == "[] False\n", number
            return (await steady.execute("print(kept, open('kept').read())")).output

    assert ran(run()) == "5 5\n"


def test_a_listening_server_hears_nothing():
    heard = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept():
            connection, _ = server.accept()
            heard.set()
            connection.close()

        thread = threading.Thread(target=accept)
        thread.start()
        port = server.getsockname()[1]
        (execution,) = executed(f"import socket; socket.create_connection(('127.0.0.1', {port}))")
        assert not heard.is_set() and "PermissionError" in execution.output
        socket.create_connection(("127.0.0.1", port)).close()  # the control
        thread.join(timeout=HANG_S)
        assert heard.is_set()
