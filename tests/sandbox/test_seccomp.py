"""The filter's program, run as the kernel runs it: also for machines that are not at hand."""

import struct

import pytest

from roost.sandbox.inside.seccomp import ALLOW, ARCHITECTURES, ERROR, KILL, filter_program

PID = 4321
PERMISSION, NO_CALL, DONE = ERROR | 1, ERROR | 38, ERROR
THREAD = 0x3D0F00  # as the C library makes threads


def decided(machine, number, arguments=(), architecture=None):
    data = struct.pack(
        "<IIQ6Q", number, architecture or ARCHITECTURES[machine], 0, *arguments, *[0] * (6 - len(arguments))
    )
    program = list(struct.iter_unpack("=HBBI", filter_program(machine, PID)))
    at, value = 0, 0
    while True:
        code, if_true, if_false, constant = program[at]
        at += 1
        if code == 0x06:
            return constant
        if code == 0x20:
            (value,) = struct.unpack_from("<I", data, constant)
        elif code == 0x54:
            value &= constant
        else:
            at += if_true if (value == constant if code == 0x15 else value >= constant) else if_false


@pytest.mark.parametrize(
    ("calls", "arguments", "decision"),
    [
        pytest.param((0, 63), (), ALLOW, id="read"),
        pytest.param((202, 98), (), ALLOW, id="futex"),
        pytest.param((41, 198), (2, 1, 0), PERMISSION, id="socket"),
        pytest.param((42, 203), (), PERMISSION, id="connect"),
        pytest.param((59, 221), (), PERMISSION, id="execve"),
        pytest.param((101, 117), (), PERMISSION, id="ptrace"),
        pytest.param((310, 270), (), PERMISSION, id="process_vm_readv"),
        pytest.param((321, 280), (), PERMISSION, id="bpf"),
        pytest.param((298, 241), (), PERMISSION, id="perf_event_open"),
        pytest.param((250, 219), (), PERMISSION, id="keyctl"),
        pytest.param((165, 40), (), PERMISSION, id="mount"),
        pytest.param((76, 45), (), PERMISSION, id="truncate"),
        pytest.param((46, 211), (), PERMISSION, id="sendmsg"),
        pytest.param((425, 425), (), NO_CALL, id="io_uring_setup"),
        pytest.param((435, 435), (), NO_CALL, id="clone3"),
        pytest.param((9999, 9999), (), NO_CALL, id="a call of the future"),
        pytest.param((268, 53), (), DONE, id="fchmodat"),
        pytest.param((285, 47), (3, 1, 0, 1 << 40), ERROR | 95, id="fallocate"),
        pytest.param((56, 220), (THREAD,), ALLOW, id="a thread"),
        pytest.param((56, 220), (17,), PERMISSION, id="a process"),
        pytest.param((56, 220), (THREAD | 0x10000000,), PERMISSION, id="a namespace"),
        pytest.param((62, 129), (PID, 9), ALLOW, id="kill itself"),
        pytest.param((62, 129), (1, 9), PERMISSION, id="kill another"),
        pytest.param((62, 129), (2**32 - 1, 9), PERMISSION, id="kill everybody"),
        pytest.param((53, 199), (1, 1 | 0o2000000), ALLOW, id="a pair of streams"),
        pytest.param((53, 199), (1, 2), PERMISSION, id="a pair for datagrams"),
        pytest.param((44, 206), (3, 0, 0, 0, 0), ALLOW, id="send"),
        pytest.param((44, 206), (3, 0, 0, 0, 1 << 32), PERMISSION, id="send to an address"),
        pytest.param((257, 56), (0, 0, 0o1000), PERMISSION, id="empty a file that is read"),
        pytest.param((257, 56), (0, 0, 0o1003), PERMISSION, id="empty a file that is neither read nor written"),
        pytest.param((257, 56), (0, 0, 0o1101), ALLOW, id="empty a file that is written"),
        pytest.param((257, 56), (0, 0, 0o1002), ALLOW, id="empty a file that is read and written"),
        pytest.param((257, 56), (0, 0, 0o0003), ALLOW, id="neither read nor write a file"),
        pytest.param((16, 29), (0, 0x5412), ERROR | 25, id="type into a terminal"),
        pytest.param((72, 25), (0, 8), PERMISSION, id="signals by ownership"),
        pytest.param((157, 167), (1, 0), PERMISSION, id="outlive the owner"),
    ],
)
def test_calls(calls, arguments, decision):
    assert [decided(machine, number, arguments) for machine, number in zip(ARCHITECTURES, calls, strict=True)] == [
        decision
    ] * 2


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_calls_of_another_architecture_end_the_process(machine):
    assert decided(machine, 0, architecture=0x40000003) == KILL  # i386, whose numbers mean something else


@pytest.mark.parametrize(
    ("flags", "decision"),
    [
        pytest.param(0o1000, PERMISSION, id="read"),
        pytest.param(0o1003, PERMISSION, id="neither"),
        pytest.param(0o1002, ALLOW, id="write"),
    ],
)
def test_the_older_way_to_open_empties_no_file_either(flags, decision):
    assert decided("x86_64", 2, (0, flags)) == decision


def test_numbers_of_the_other_abi_of_x86_are_refused():
    assert decided("x86_64", 0x40000000) == NO_CALL
