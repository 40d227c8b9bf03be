"""Messages: what arrives equals what was sent, and what is large is neither copied nor pickled."""

import dataclasses
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from roost.transport.device_tensors import DeviceNotVisible, DeviceTensors, opened_tensor
from roost.transport.host_tensors import MIN_BUFFER
from roost.transport.message import LONG_STRING, pack, unpack
from tests.grid import grid

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def sent(obj, **options):
    """The object as another process would get it: from buffers of its own."""
    message = pack(obj)
    assert all(view.format == "B" and view.ndim == 1 and view.contiguous for view in message.buffers)
    return unpack(message.header, [bytearray(view) for view in message.buffers], **options)


def bits(tensor):
    return tensor.detach().contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    ),
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.complex64, torch.complex128),
]
SHAPES = [(), (0,), (0, 3), (1,), (7,), (50, 60), (4, 5, 60)]


@grid("shape", SHAPES, ids=str)
@grid("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype(dtype, shape):
    tensor = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(shape)
    arrived = sent({"x": tensor})["x"]
    assert (arrived.dtype, arrived.shape, arrived.device.type) == (dtype, tensor.shape, "cpu")
    assert torch.equal(bits(arrived), bits(tensor))


BASE = torch.arange(6400.0).reshape(80, 80)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(BASE.t(), id="transposed"),
        pytest.param(BASE[::2, 1::3], id="with steps"),
        pytest.param(BASE[10:], id="with an offset"),
        pytest.param(torch.ones(1, 5).expand(4000, 5), id="expanded"),
        pytest.param(torch.randn(2, 8, 9, 9).to(memory_format=torch.channels_last), id="channels last"),
        pytest.param(torch.randn(700, dtype=torch.complex64).conj(), id="conjugate"),
        pytest.param(torch.randn(700, dtype=torch.complex64).conj().imag, id="negative"),
    ],
)
def test_tensors_of_every_layout_arrive_contiguous(tensor):
    arrived = sent([tensor])[0]
    assert arrived.is_contiguous()
    assert torch.equal(arrived, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.eye(3).to_sparse(), id="sparse"),
        pytest.param(torch.zeros(3, device="meta"), id="meta"),
        pytest.param(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), id="nested"),
    ],
)
def test_other_tensors_are_pickled_as_torch_does_it(tensor):
    arrived = sent([tensor])[0]
    assert (type(arrived), arrived.layout, arrived.device) == (type(tensor), tensor.layout, tensor.device)


def test_gradients_stay_behind_and_parameters_stay_parameters():
    leaf = torch.ones(500, requires_grad=True)
    objects = [
        leaf,
        leaf * 2,
        torch.nn.Parameter(torch.ones(500)),
        torch.nn.Parameter(torch.ones(3), requires_grad=False),
    ]
    arrived = sent([*objects, torch.nn.Parameter(torch.ones(9, dtype=torch.bfloat16))])
    assert [(type(one) is torch.nn.Parameter, one.requires_grad) for one in arrived] == [
        (False, False),
        (False, False),
        (True, True),
        (True, False),
        (True, True),
    ]
    assert arrived[1].grad_fn is None
    assert torch.equal(arrived[1], torch.full((500,), 2.0))


def test_a_module_keeps_its_tied_parameters():
    module = torch.nn.Sequential(torch.nn.Linear(40, 40), torch.nn.Linear(40, 40))
    module[1].weight = module[0].weight
    message = pack(module)
    assert len(message.buffers) == 1
    arrived = unpack(message.header, message.buffers)
    assert arrived[1].weight is arrived[0].weight
    assert torch.equal(arrived[0].bias, module[0].bias)


ARRAY = np.arange(6400.0).reshape(80, 80)


@pytest.mark.parametrize(
    ("array", "buffers"),
    [
        pytest.param(ARRAY, 1, id="contiguous"),
        pytest.param(np.asfortranarray(ARRAY), 1, id="Fortran order"),
        pytest.param(ARRAY[::2, ::3], 1, id="with steps"),
        pytest.param(ARRAY[::-1], 1, id="backwards"),
        pytest.param(np.array(3.0), 0, id="no dimension"),
        pytest.param(np.zeros((0, 4)), 0, id="no rows"),
        pytest.param(np.arange(10), 0, id="small"),
        pytest.param(np.array([{"a": 1}, None, "x"], dtype=object), 0, id="objects"),
        pytest.param(np.arange(2000).astype("M8[s]"), 1, id="times"),
        pytest.param(np.arange(2000).astype("m8[us]")[::2], 1, id="durations with steps"),
        pytest.param(np.array("2020-02-02", dtype="M8[D]"), 0, id="one time"),
        pytest.param(np.zeros(900, dtype=[("a", "i4"), ("b", "f8")]), 1, id="records"),
        pytest.param(np.array(["a", "bc"] * 300), 1, id="text"),
        pytest.param(np.arange(1000, dtype=">i4"), 1, id="big-endian"),
    ],
)
def test_arrays(array, buffers):
    message = pack([array])
    assert len(message.buffers) == buffers
    arrived = unpack(message.header, [bytearray(view) for view in message.buffers])[0]
    assert (arrived.dtype, arrived.shape) == (array.dtype, array.shape)
    assert np.array_equal(arrived, array)
    assert arrived.flags.writeable


def test_arrays_in_an_array_of_objects_have_buffers():
    array = np.empty(2, dtype=object)
    array[:] = [torch.ones(1000), np.ones(1000)]
    message = pack(array)
    assert [view.nbytes for view in message.buffers] == [4000, 8000]


LONG = LONG_STRING + 1


@pytest.mark.parametrize(
    ("obj", "buffers"),
    [
        pytest.param(b"a" * LONG, 1, id="bytes"),
        pytest.param(bytearray(b"b" * LONG), 1, id="bytearray"),
        pytest.param("ä" * LONG, 1, id="text"),
        pytest.param({"a": [b"a" * LONG, {"b": (bytearray(LONG), 1)}], "c": "d"}, 2, id="deep"),
        pytest.param([b"a" * 100, b"b" * 70_000], 0, id="short"),
        pytest.param(list(range(200_000)), 0, id="many numbers"),
        pytest.param([list(range(100_000)), b"c" * LONG, "x" * 90_000, b"d" * LONG], 2, id="mixed with frames"),
        pytest.param([b"", "", (), {}, None, 1.5], 0, id="empty"),
    ],
)
def test_long_strings_have_buffers_however_deep(obj, buffers):
    message = pack(obj)
    assert len(message.buffers) == buffers
    arrived = unpack(message.header, [bytes(view) for view in message.buffers])
    assert arrived == obj
    assert type(arrived) is type(obj)


def test_strings_and_tensors_keep_their_order_and_identity():
    text, tensor = b"t" * LONG, torch.arange(1000)
    obj = {"first": tensor, "text": text, "second": torch.ones(400), "again": [text, tensor]}
    message = pack(obj)
    assert [view.nbytes for view in message.buffers] == [8000, LONG, 1600]
    arrived = unpack(message.header, message.buffers)
    assert arrived["again"][0] is arrived["text"]
    assert arrived["again"][1] is arrived["first"]
    assert torch.equal(arrived["second"], obj["second"])


def test_nothing_large_is_copied():
    tensor, array, half = torch.zeros(16 << 20), np.zeros(8 << 20), torch.zeros(32 << 20, dtype=torch.bfloat16)
    text = bytes(64 << 20)
    message = pack({"tensor": tensor, "array": array, "half": half, "text": text})
    addresses = [np.frombuffer(view, np.uint8).ctypes.data for view in message.buffers]
    assert addresses[:3] == [tensor.data_ptr(), array.ctypes.data, half.data_ptr()]
    assert message.buffers[3].obj is text
    assert len(message.header) < 1000
    assert message.nbytes == len(message.header) + 4 * (64 << 20)
    received = [bytearray(view) for view in message.buffers]
    arrived = unpack(message.header, received)
    starts = [np.frombuffer(buffer, np.uint8).ctypes.data for buffer in received]
    assert starts[:3] == [arrived["tensor"].data_ptr(), arrived["array"].ctypes.data, arrived["half"].data_ptr()]
    received[0][0:4] = np.float32(2.5).tobytes()
    assert arrived["tensor"][0] == 2.5
    arrived["array"][0] = 1.0
    assert received[1][7] == 0x3F


def test_the_buffers_keep_the_memory_of_what_was_packed():
    views = pack(torch.full((100_000,), 7.0)[::2]).buffers  # a copy that nobody else holds
    torch.zeros(100_000)
    assert np.all(np.frombuffer(views[0], np.float32) == 7.0)


def test_an_array_on_a_buffer_that_cannot_be_written_to_cannot_either():
    message = pack(np.arange(1000))
    assert not unpack(message.header, [bytes(view) for view in message.buffers]).flags.writeable


def test_small_tensors_stay_in_the_header_and_can_be_written_to():
    message = pack([torch.zeros(MIN_BUFFER // 4 - 1), torch.zeros(MIN_BUFFER // 4)])
    assert [view.nbytes for view in message.buffers] == [MIN_BUFFER]
    small, _ = unpack(message.header, message.buffers)
    small.fill_(1)
    assert unpack(message.header, message.buffers)[0].sum() == 0


@dataclasses.dataclass
class Step:
    tokens: torch.Tensor
    note: str


def test_objects_that_hold_tensors():
    message = pack({"steps": [Step(torch.arange(1000), "a"), Step(torch.arange(3), "b")], "kind": Step})
    assert len(message.buffers) == 1
    arrived = unpack(message.header, message.buffers)
    assert arrived["kind"] is Step
    assert [(step.note, step.tokens.tolist()) for step in arrived["steps"]][1] == ("b", [0, 1, 2])


def test_what_has_no_name_elsewhere_is_sent_by_value():
    @dataclasses.dataclass
    class Local:
        value: torch.Tensor

    factor = torch.full((1000,), 3.0)
    message = pack({"f": lambda x: x * factor, "local": Local(torch.ones(1000)), "text": b"z" * LONG})
    assert sorted(view.nbytes for view in message.buffers) == [4000, 4000, LONG]
    arrived = unpack(message.header, message.buffers)
    assert arrived["f"](2).sum() == 6000
    assert arrived["local"].value.sum() == 1000
    assert arrived["text"] == b"z" * LONG


def run(code, *arguments):
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_classes_of_main_arrive_where_main_is_another(tmp_path):
    code = """
import pathlib, sys
from enum import Enum
from roost.transport.message import pack
class Colour(Enum):
    RED = 1
class Reward:
    def __init__(self, scale): self.scale = scale
    def __call__(self, x): return shifted(x) * self.scale
def shifted(x): return x + 1
message = pack([Reward(3), Colour.RED])
pathlib.Path(sys.argv[1]).write_bytes(message.header)
"""
    run(code, str(tmp_path / "header"))
    reward, colour = unpack((tmp_path / "header").read_bytes(), [])
    assert reward(2) == 9
    assert colour.name == "RED"


def test_libraries_are_not_imported_for_messages_without_them():
    code = """
import sys
from roost.transport.message import pack, unpack
before = {"torch", "ray", "numpy"} & sys.modules.keys()
message = pack({"a": [1, "b"]})
assert unpack(message.header, message.buffers) == {"a": [1, "b"]}
assert not before - {"numpy"}, before
assert {"torch", "ray", "numpy"} & sys.modules.keys() == before
"""
    run(code)


class Refuses:
    def __reduce__(self):
        raise TypeError("this stays here")


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        pytest.param(lambda: pack(1, device_route="ftp"), ValueError, "'stage' or 'ipc', not 'ftp'", id="route"),
        pytest.param(lambda: pack([Refuses()]), TypeError, "this stays here", id="refuses to be pickled"),
        pytest.param(lambda: unpack(b"\x07abc", []), pickle.UnpicklingError, "not 0x07", id="not a header"),
        pytest.param(lambda: unpack(pack(ARRAY).header, []), pickle.UnpicklingError, "buffers", id="a buffer short"),
        pytest.param(
            lambda: DeviceTensors("ipc").reduce(torch.ones(3), None),
            ValueError,
            "on cpu .*'stage'",
            id="no device memory",
        ),
        pytest.param(
            lambda: opened_tensor("00000000-1111-2222-3333-444444444444", ()),
            DeviceNotVisible,
            "on device 00000000-1111-2222-3333-444444444444, and this process sees",
            id="a device not visible",
        ),
    ],
)
def test_errors(act, error, message):
    with pytest.raises(error, match=message):
        act()


class Staged:
    """Stands for a tensor on a device, of which there may be none here: it is taken apart as one would be."""

    def __init__(self, tensor, is_trained=None):
        self.parts = DeviceTensors("stage").reduce(tensor, is_trained)

    def __reduce__(self):
        return self.parts


@pytest.mark.parametrize("device", [None, "cpu", "meta"], ids=str)
def test_only_what_came_from_a_device_goes_to_one(device):
    obj = [Staged(torch.ones(1000, dtype=torch.bfloat16)), Staged(torch.ones(3), True), torch.ones(1000), b"z" * LONG]
    staged, parameter, own, text = sent(obj, device=device)
    assert (staged.device.type, staged.dtype) == (device or "cpu", torch.bfloat16)
    assert (type(parameter), parameter.device.type) == (torch.nn.Parameter, device or "cpu")
    assert own.device.type == "cpu"
    assert text == b"z" * LONG
