"""Mailboxes and channels of a node, when those who use them come, go and come back."""

import asyncio

import pytest

from roost.transport.context import Address, PeerLost
from roost.transport.mailboxes import MAILBOX_SIZE, ChannelClosed, NodeQueues
from roost.transport.shared_memory import Packet, SegmentRef, from_frames, to_frames

A, B, C = (Address(name, 0) for name in ("actor", "rollout", "reward"))
KEY = "default"


def packet(number):
    return Packet(str(number).encode())


class Queues(NodeQueues):
    """Queues that remember what they dropped."""

    def __init__(self, maxsize=0):
        self.dropped = []
        super().__init__(lambda packet: self.dropped.append(int(packet.header)))
        self.open_channel("c", maxsize)

    def mail(self, to, sender, number):
        return self.deliver(to, sender, "message", packet(number))

    def fetch(self, to, sender):
        return self.collect(to, sender, "message")

    def into(self, sender, number, weight=1, key=KEY):
        return self.put("c", key, sender, weight, packet(number))

    def out(self, receiver, target=None, key=KEY):
        return self.get("c", key, receiver, target)


def numbers(future):
    return [int(packet.header) for packet in future.result()]


async def tick():
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_mailbox_is_of_one_pair_and_kind():
    async def case():
        queues = Queues()
        queues.mail(A, B, 1)
        queues.mail(A, C, 2)
        queues.deliver(A, B, "broadcast", packet(3))
        queues.mail(A, B, 4)
        assert numbers(queues.fetch(A, C)) == [2]
        assert numbers(queues.fetch(A, B)) == [1]
        assert numbers(queues.fetch(A, B)) == [4]
        assert numbers(queues.collect(A, B, "broadcast")) == [3]
        assert not queues.fetch(B, A).done()

    asyncio.run(case())


def test_a_sender_that_is_far_ahead_waits():
    async def case():
        queues = Queues()
        assert all(queues.mail(A, B, number) is None for number in range(MAILBOX_SIZE))
        wait = queues.mail(A, B, MAILBOX_SIZE)
        assert not wait.done()
        assert numbers(queues.fetch(A, B)) == [0]
        assert wait.done()

    asyncio.run(case())


def test_what_a_lost_sender_has_sent_can_be_received_and_then_it_is_lost():
    async def case():
        queues = Queues()
        queues.mail(A, B, 1)
        queues.lose(B, "killed", False)
        assert numbers(queues.fetch(A, B)) == [1]
        for _ in range(2):
            with pytest.raises(PeerLost, match="rollout:0 is gone: killed"):
                queues.fetch(A, B).result()
        with pytest.raises(PeerLost, match="rollout:0 is gone: killed"):
            queues.fetch(C, B).result()

    asyncio.run(case())


def test_who_waits_for_a_message_of_a_lost_sender_knows():
    async def case():
        queues = Queues()
        waiting, other = queues.fetch(A, B), queues.fetch(A, C)
        queues.lose(B, "killed", True)
        with pytest.raises(PeerLost, match="rollout:0 is gone"):
            waiting.result()
        assert not other.done()

    asyncio.run(case())


def test_a_full_mailbox_whose_receiver_dies_frees_its_messages_and_its_senders():
    async def case():
        queues = Queues()
        for number in range(MAILBOX_SIZE):
            queues.mail(A, B, number)
        waiting = queues.mail(A, B, 99)
        queues.lose(A, "killed", False)
        with pytest.raises(PeerLost, match="actor:0 is gone: killed"):
            waiting.result()
        assert queues.dropped == list(range(MAILBOX_SIZE))
        with pytest.raises(PeerLost):
            queues.mail(A, B, 100)

    asyncio.run(case())


@pytest.mark.parametrize("back", [A, B], ids=["the receiver", "the sender"])
def test_who_comes_back_meets_no_old_messages(back):
    async def case():
        queues = Queues()
        queues.mail(A, B, 1)
        queues.mail(C, B, 2)
        queues.mail(B, C, 3)
        queues.lose(back, "killed", True)
        assert queues.lost(back) is not None
        queues.restarted(back)
        assert queues.lost(back) is None
        assert sorted(queues.dropped) == ([1] if back == A else [1, 2, 3])
        queues.mail(A, B, 4)
        assert numbers(queues.fetch(A, B)) == [4]

    asyncio.run(case())


def test_keys_are_queues_of_their_own_and_each_has_the_limit():
    async def case():
        queues = Queues(maxsize=1)
        assert queues.into(A, 1, key="x") is None
        assert queues.into(A, 2, key=("y", 2)) is None
        assert queues.into(A, 3, key="x") is not None
        assert queues.is_full("c", "x")
        assert not queues.is_full("c", "z")
        assert queues.sizes("c") == {"x": 1, ("y", 2): 1}, "asking makes no queue"
        assert numbers(queues.out(B, key=("y", 2))) == [2]

    asyncio.run(case())


@pytest.mark.parametrize("key", [KEY, "never used before"])
def test_a_closed_channel_gives_its_leftovers_first(key):
    async def case():
        queues = Queues()
        queues.into(A, 1, key=key)
        queues.into(A, 2, key=key)
        queues.close_channel("c")
        with pytest.raises(ChannelClosed, match="channel c is closed"):
            queues.into(A, 3, key=key)
        assert numbers(queues.out(B, 9, key=key)) == [1, 2]
        with pytest.raises(ChannelClosed, match="channel c is closed"):
            queues.out(B, key=key).result()
        with pytest.raises(ChannelClosed, match="channel c is closed"):
            queues.out(B, key="another").result()

    asyncio.run(case())


def test_who_waits_at_an_empty_channel_for_a_lost_producer_knows():
    async def case():
        queues = Queues()
        queues.into(A, 1)
        batch = queues.out(B, 5)
        queues.lose(A, "killed", False)
        with pytest.raises(PeerLost, match="actor:0 is gone: killed"):
            batch.result()
        assert numbers(queues.out(C)) == [1], "what the batch had taken stays for others"
        with pytest.raises(PeerLost, match="actor:0 is gone: killed"):
            queues.out(C)

    asyncio.run(case())


def test_a_batch_that_a_lost_producer_cannot_complete_fails_whenever_it_is_asked_for():
    async def case():
        queues = Queues()
        queues.into(A, 1)
        queues.lose(A, "killed", False)
        with pytest.raises(PeerLost, match="actor:0 is gone: killed"):
            queues.out(B, 4).result()
        assert numbers(queues.out(B)) == [1], "what is left stays for others"

    asyncio.run(case())


def test_a_producer_that_died_leaves_its_items():
    async def case():
        queues = Queues()
        queues.into(A, 1)
        queues.lose(A, "killed", False)
        assert numbers(queues.out(B)) == [1]

    asyncio.run(case())


def test_who_waits_at_a_full_channel_for_a_lost_consumer_knows():
    async def case():
        queues = Queues(maxsize=1)
        queues.into(A, 1)
        queues.out(B)
        queues.into(A, 2)
        waiting = queues.into(A, 3)
        queues.lose(B, "killed", False)
        with pytest.raises(PeerLost, match="rollout:0 is gone"):
            waiting.result()
        with pytest.raises(PeerLost, match="rollout:0 is gone"):
            queues.into(A, 4)
        assert numbers(queues.out(C)) == [2], "who comes new can take what is there"

    asyncio.run(case())


def test_channels_go_on_without_one_that_will_be_back():
    async def case():
        queues = Queues(maxsize=1)
        queues.into(A, 1)
        assert numbers(queues.out(B)) == [1]
        waiting = queues.out(B)
        queues.lose(A, "killed", True)
        later = queues.out(C)  # not only who waited already may go on waiting
        assert not waiting.done()
        assert not later.done()
        queues.restarted(A)
        queues.into(A, 2)
        queues.into(A, 3)
        assert (numbers(waiting), numbers(later)) == ([2], [3])
        queues.lose(B, "killed", True)
        queues.into(A, 4)
        assert not queues.into(A, 5).done()

    asyncio.run(case())


@pytest.mark.parametrize("will_restart", [True, False], ids=["comes back", "is gone"])
def test_a_consumer_that_dies_with_half_a_batch_leaves_it_to_the_others(will_restart):
    async def case():
        queues = Queues()
        queues.into(A, 1)
        dying, other = queues.out(B, 3), queues.out(C, 3)
        queues.lose(B, "killed", will_restart)
        queues.into(A, 2)
        queues.into(A, 3)
        await tick()
        assert dying.cancelled()
        assert numbers(other) == [1, 2, 3]

    asyncio.run(case())


def test_the_same_loss_told_often_does_not_pile_up():
    async def case():
        queues = Queues()
        queues.lose(A, "killed", False)
        depths = []
        for _ in range(4):
            with pytest.raises(PeerLost) as caught:
                queues.mail(A, B, 1)
            depths.append(len(caught.traceback))
        assert len(set(depths)) == 1

    asyncio.run(case())


def test_parcels_survive_the_socket():
    packets = [
        Packet(b"empty"),
        Packet(b"inline", (b"a", memoryview(b"bc"), b"")),
        Packet(b"segment", (), SegmentRef(1, 2, 3, 4), ((0, 3), (64, 1)), True),
        Packet(b"last", (b"z",)),
    ]
    assert from_frames(*to_frames(packets)) == packets
    assert from_frames(*to_frames([])) == []


PARTNERS = {
    "the only one is lost": ([A], [A], True),
    "all are lost": ([A, B], [A, B], True),
    "one of two is lost": ([A, B], [A], False),
    "nobody came yet": ([], [A], False),
}


@pytest.mark.parametrize("partners, lost, ends", PARTNERS.values(), ids=PARTNERS)
@pytest.mark.parametrize("when", ["waits already", "comes later"])
def test_a_wait_at_a_channel_ends_when_nobody_is_left_to_end_it(partners, lost, ends, when):
    async def case():
        gets, puts = Queues(), Queues(maxsize=1)
        for partner in partners:
            gets.into(partner, 1)
            gets.out(C)
            puts.into(C, 1)
            puts.out(partner)
        puts.into(C, 2)
        waits = [lambda: gets.out(C), lambda: puts.into(C, 3)]
        if when == "waits already":
            begun = [wait() for wait in waits]
            waits = [begun[0].result, begun[1].result]
        for who in lost:
            gets.lose(who, "killed", False)
            puts.lose(who, "killed", False)
        for wait in waits:
            if ends:
                with pytest.raises(PeerLost, match="is gone: killed"):
                    wait()
            elif when == "waits already":
                with pytest.raises(asyncio.InvalidStateError):
                    wait()
            else:
                assert not wait().done()

    asyncio.run(case())


def test_a_forgotten_worker_is_no_reason_to_wait_or_to_stop():
    async def case():
        queues = Queues()
        queues.into(A, 1)
        queues.into(B, 2)
        assert numbers(queues.out(C, 2)) == [1, 2]
        waiting = queues.out(C)
        queues.lose(A, "killed", False)
        queues.forget(B)
        assert not waiting.done()
        queues.forget(A)
        assert queues.lost(A) is None
        later = queues.out(C)
        queues.into(A, 3)
        queues.into(A, 4)
        assert (numbers(waiting), numbers(later)) == ([3], [4])

    asyncio.run(case())


def test_mailboxes_are_dropped_when_empty():
    async def case():
        queues = Queues()
        queues.mail(A, B, 1)
        assert numbers(queues.fetch(A, B)) == [1]
        assert not queues._mailboxes
        waiting = queues.fetch(A, B)
        queues.mail(A, B, 2)
        assert numbers(waiting) == [2]
        queues.fetch(A, C).cancel()
        await tick()
        assert not queues._mailboxes
        queues.lose(B, "killed", False)
        with pytest.raises(PeerLost):
            queues.fetch(A, B).result()
        assert not queues._mailboxes

    asyncio.run(case())
