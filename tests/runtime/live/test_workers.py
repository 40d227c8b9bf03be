"""Workers on a live cluster: where they are, what they see, and what calls on them give."""

import asyncio
import os

import pytest

import roost
from roost import LaunchOptions, NodePlacementStrategy, PackedPlacementStrategy, WaitedTooLong, Worker, WorkerFailed

PLACE = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "ROOST_VISIBLE_DEVICES")


class Scout(Worker):
    def __init__(self, word="hello"):
        super().__init__()
        self.word = word

    def variables(self, *names):
        return {name: os.environ.get(name) for name in names}

    def devices(self):
        return self.accelerators, self.hardware_type, self.has_accelerator

    def echo(self, value, times=1):
        return [self.word, self._rank, value, times]

    def sleep(self, seconds):
        import time

        time.sleep(seconds)
        return os.getpid()

    def until_there(self, path):
        import time

        while not path.exists():
            time.sleep(0.01)
        return os.getpid()

    def rank_if_main_thread(self):
        import threading

        return self._rank if threading.current_thread() is threading.main_thread() else None

    def size_of(self, array):
        return array.nbytes


class Talker(Worker):
    def __init__(self):
        super().__init__()
        self.gate = asyncio.Event()

    async def wait_for_gate(self):
        await self.gate.wait()
        return "open"

    async def open(self):
        self.gate.set()

    def rank(self):
        return self._rank


@pytest.fixture(scope="module")
def scouts(shared_cluster):
    group = Scout.create_group("hi").launch(
        shared_cluster, name="scout", placement_strategy=PackedPlacementStrategy(4, 7, num_hardware_per_process=2)
    )
    yield group
    group.close()


def test_a_worker_is_not_made_by_calling_it():
    with pytest.raises(RuntimeError, match=r"Scout.create_group"):
        Scout()


def test_environment(scouts):
    first, second = scouts.variables(*PLACE).wait()
    assert first == {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "ROOST_VISIBLE_DEVICES": "4,5",
    }
    assert (second["RANK"], second["ROOST_VISIBLE_DEVICES"]) == ("1", "6,7")


def test_master_port_is_shared_and_belongs_to_the_group(scouts, shared_cluster):
    ports = {each["MASTER_PORT"] for each in scouts.variables("MASTER_PORT").wait()}
    assert len(ports) == 1
    other = Scout.create_group().launch(shared_cluster, name="other", placement_strategy=NodePlacementStrategy([0]))
    assert other.variables("MASTER_PORT").wait()[0]["MASTER_PORT"] not in ports
    other.close()


def test_devices_in_the_middle_of_a_node_are_the_planned_ones(scouts):
    assert scouts.devices().wait() == [(("4", "5"), "accelerator", True), (("6", "7"), "accelerator", True)]


def test_without_isolation_a_worker_finds_its_device_by_local_rank(shared_cluster):
    group = Scout.create_group().launch(
        shared_cluster, name="open", placement_strategy=PackedPlacementStrategy(4, 7), isolate_accelerator=False
    )
    seen = group.variables("ROOST_VISIBLE_DEVICES", "LOCAL_RANK", "LOCAL_WORLD_SIZE").wait()
    assert [each["ROOST_VISIBLE_DEVICES"] for each in seen] == ["4,5,6,7"] * 4
    assert [each["LOCAL_RANK"] for each in seen] == ["0", "1", "2", "3"]
    assert {each["LOCAL_WORLD_SIZE"] for each in seen} == {"4"}
    group.close()


def test_a_launch_may_say_otherwise_than_its_plan_what_workers_see(shared_cluster):
    plan = roost.plan({"cluster": {"num_nodes": 1, "component_placement": {"actor": "2-3"}}}, shared_cluster)
    options = LaunchOptions(isolate_accelerator=False)
    whole = shared_cluster.launch(plan, {"actor": Scout}, {"actor": options})["actor"]
    part = Scout.create_group().launch(shared_cluster, plan["actor"], name="part", isolate_accelerator=False)
    for group in (whole, part):
        seen = [each["ROOST_VISIBLE_DEVICES"] for each in group.variables("ROOST_VISIBLE_DEVICES").wait()]
        assert len(seen) == 2
        assert all("," in devices for devices in seen)
        group.close()


def test_results_come_in_rank_order_with_durations(scouts):
    result = scouts.echo("x", times=2)
    assert result.wait() == [["hi", 0, "x", 2], ["hi", 1, "x", 2]]
    assert result.done()
    assert len(result.durations()) == 2
    assert result.consume_duration() == max(result.durations())


def test_methods_run_in_the_main_thread(scouts):
    assert scouts.rank_if_main_thread().wait() == [0, 1]


def test_some_ranks(scouts):
    assert scouts.execute_on(1).echo(0).wait() == [["hi", 1, 0, 1]]
    assert [each[1] for each in scouts.execute_on([1, 0]).echo(0).wait()] == [1, 0]
    assert len(scouts.echo(0).wait()) == 2
    with pytest.raises(ValueError, match="has no rank 2; it has 0 to 1"):
        scouts.execute_on(2)
    with pytest.raises(AttributeError, match="no public method shout"):
        scouts.execute_on(0).shout  # noqa: B018


def test_results_can_be_awaited(scouts):
    async def call():
        return await scouts.echo(1), await scouts.execute_on(0).echo(2)

    first, second = asyncio.run(call())
    assert len(first) == 2
    assert second == [["hi", 0, 2, 1]]


def test_a_wait_is_bounded_and_can_be_taken_up_again(scouts, tmp_path):
    go_on = tmp_path / "go on"
    result = scouts.until_there(go_on)
    with pytest.raises(WaitedTooLong, match=r"scout.until_there did not answer within 0.05 s on ranks \[0, 1\]"):
        result.wait(timeout=0.05)
    assert not result.done()
    go_on.touch()
    assert len(set(result.wait())) == 2


def test_large_arguments_reach_every_rank(scouts):
    import numpy as np

    assert scouts.size_of(np.zeros(1_000_000, np.uint8)).wait() == [1_000_000, 1_000_000]


def test_asynchronous_methods_run_side_by_side(shared_cluster):
    group = Talker.create_group().launch(shared_cluster, name="talker", placement_strategy=NodePlacementStrategy([0]))
    waiting = group.wait_for_gate()
    assert group.rank().wait() == [0]
    assert not waiting.done()
    group.open().wait()
    assert waiting.wait() == ["open"]
    group.close()


def test_default_placement_is_every_accelerator(shared_cluster):
    group = Scout.create_group().launch(shared_cluster)
    assert group.world_size == 8
    assert group.name == "Scout"
    group.close()


@pytest.mark.parametrize("name", ["a:b", "a/b", "..", "driver"])
def test_unfit_names(shared_cluster, name):
    with pytest.raises(ValueError, match="cannot be called"):
        Scout.create_group().launch(shared_cluster, name=name, placement_strategy=NodePlacementStrategy([0]))


def test_a_name_is_used_once(scouts, shared_cluster):
    with pytest.raises(ValueError, match="there is a group scout already"):
        Scout.create_group().launch(shared_cluster, name="scout", placement_strategy=NodePlacementStrategy([0]))


class Hiding(Worker):
    def close(self):
        pass


def test_a_method_must_not_hide_a_groups_own(shared_cluster):
    with pytest.raises(ValueError, match=r"Hiding.close would hide"):
        Hiding.create_group().launch(shared_cluster, name="hiding", placement_strategy=NodePlacementStrategy([0]))


def test_a_closed_group_says_so(shared_cluster):
    group = Scout.create_group().launch(shared_cluster, name="brief", placement_strategy=NodePlacementStrategy([0]))
    group.wait_ready()
    group.close()
    with pytest.raises(RuntimeError, match="brief is closed"):
        group.echo(1)
    again = Scout.create_group().launch(shared_cluster, name="brief", placement_strategy=NodePlacementStrategy([0]))
    assert again.echo(1).wait() == [["hello", 0, 1, 1]]
    again.close()


def test_logs_of_every_worker_are_in_one_folder(shared_cluster, scouts):
    class Loud(Worker):
        def speak(self):
            print(f"I am {self._rank}")
            os.system("echo from a child")

    group = Loud.create_group().launch(shared_cluster, name="loud", placement_strategy=NodePlacementStrategy([0, 0]))
    group.speak().wait()
    texts = [(shared_cluster.log_dir / "loud" / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert texts == ["I am 0\nfrom a child\n", "I am 1\nfrom a child\n"]
    group.close()


def test_failures_that_are_handled_do_not_disturb_others(shared_cluster, scouts):
    class Failing(Worker):
        def fail(self):
            raise KeyError("lost")

    group = Failing.create_group().launch(shared_cluster, name="bad", placement_strategy=NodePlacementStrategy([0]))
    with pytest.raises(WorkerFailed) as caught:
        group.fail().wait()
    assert isinstance(caught.value.__cause__, KeyError)
    assert len(scouts.sleep(4.0).wait()) == 2
    group.close()
