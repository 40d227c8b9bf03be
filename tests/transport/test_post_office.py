"""Mailboxes and channels of a node, when those who use them come, go and come back."""

import asyncio

import pytest

from roost.transport.failure import Address, PeerLost
from roost.transport.mailboxes import MAILBOX_SIZE, ChannelClosed, PostOffice
from roost.transport.shared_memory import Packet, SegmentRef, from_frames, to_frames

A, B, C = (Address(name, 0) for name in ("actor", "rollout", "reward"))
KEY = "default"


def parcel(number):
    return Packet(str(number).encode())


class Office(PostOffice):
    """A post office that remembers what it dropped."""

    def __init__(self, maxsize=0):
        self.dropped = []
        super().__init__(lambda parcel: self.dropped.append(int(parcel.header)))
        self.open_channel("c", maxsize)

    def mail(self, to, sender, number):
        return self.deliver(to, sender, "message", parcel(number))

    def fetch(self, to, sender):
        return self.collect(to, sender, "message")

    def into(self, sender, number, weight=1, key=KEY):
        return self.put("c", key, sender, weight, parcel(number))

    def out(self, receiver, target=None, key=KEY):
        return self.get("c", key, receiver, target)


def numbers(future):
    return [int(parcel.header) for parcel in future.result()]


async def tick():
    for _ in range(3):
        await asyncio.sleep(0)


def test_a_mailbox_is_of_one_pair_and_kind():
    async def case():
        office = Office()
        office.mail(A, B, 1)
        office.mail(A, C, 2)
        office.deliver(A, B, "broadcast", parcel(3))
        office.mail(A, B, 4)
        assert numbers(office.fetch(A, C)) == [2]
        assert numbers(office.fetch(A, B)) == [1]
        assert numbers(office.fetch(A, B)) == [4]
        assert numbers(office.collect(A, B, "broadcast")) == [3]
        assert not office.fetch(B, A).done()

    asyncio.run(case())


def test_a_sender_that_is_far_ahead_waits():
    async def case():
        office = Office()
        assert all(office.mail(A, B, number) is None for number in range(MAILBOX_SIZE))
        wait = office.mail(A, B, MAILBOX_SIZE)
        assert not wait.done()
        assert numbers(office.fetch(A, B)) == [0]
        assert wait.done()

    asyncio.run(case())


def test_what_a_lost_sender_has_sent_can_be_received_and_then_it_is_lost():
    async def case():
        office = Office()
        office.mail(A, B, 1)
        office.lose(B, "killed", False)
        assert numbers(office.fetch(A, B)) == [1]
        for _ in range(2):
            with pytest.raises(PeerLost, match="rollout:0 is gone: killed"):
                office.fetch(A, B).result()
        with pytest.raises(PeerLost, match="rollout:0 is gone: killed"):
            office.fetch(C, B).result()

    asyncio.run(case())


def test_who_waits_for_a_message_of_a_lost_sender_knows():
    async def case():
        office = Office()
        waiting, other = office.fetch(A, B), office.fetch(A, C)
        office.lose(B, "killed", True)
        with pytest.raises(PeerLost, match="rollout:0 is gone"):
            waiting.result()
        assert not other.done()

    asyncio.run(case())


def test_a_full_mailbox_whose_receiver_dies_frees_its_messages_and_its_senders():
    async def case():
        office = Office()
        for number in range(MAILBOX_SIZE):
            office.mail(A, B, number)
        waiting = office.mail(A, B, 99)
        office.lose(A, "killed", False)
        with pytest.raises(PeerLost, match="actor:0 is gone: killed"):
            waiting.result()
        assert office.dropped == list(range(MAILBOX_SIZE))
        with pytest.raises(PeerLost):
            office.mail(A, B, 100)

    asyncio.run(case())


@pytest.mark.parametrize("back", [A, B], ids=["the receiver", "the sender"])
def test_who_comes_back_meets_no_old_messages(back):
    async def case():
        office = Office()
        office.mail(A, B, 1)
        office.mail(C, B, 2)
        office.mail(B, C, 3)
        office.lose(back, "killed", True)
        assert office.lost(back) is not None
        office.find_again(back)
        assert office.lost(back) is None
        assert sorted(office.dropped) == ([1] if back == A else [1, 2, 3])
        office.mail(A, B, 4)
        assert numbers(office.fetch(A, B)) == [4]

    asyncio.run(case())


def test_keys_are_queues_of_their_own_and_each_has_the_limit():
    async def case():
        office = Office(maxsize=1)
        assert office.into(A, 1, key="x") is None
        assert office.into(A, 2, key=("y", 2)) is None
        assert office.into(A, 3, key="x") is not None
        assert office.is_full("c", "x")
        assert not office.is_full("c", "z")
        assert office.sizes("c") == {"x": 1, ("y", 2): 1}, "asking makes no queue"
        assert numbers(office.out(B, key=("y", 2))) == [2]

    asyncio.run(case())


@pytest.mark.parametrize("key", [KEY, "never used before"])
def test_a_closed_channel_gives_its_leftovers_first(key):
    async def case():
        office = Office()
        office.into(A, 1, key=key)
        office.into(A, 2, key=key)
        office.close_channel("c")
        with pytest.raises(ChannelClosed, match="channel c is closed"):
            office.into(A, 3, key=key)
        assert numbers(office.out(B, 9, key=key)) == [1, 2]
        with pytest.raises(ChannelClosed, match="channel c is closed"):
            office.out(B, key=key).result()
        with pytest.raises(ChannelClosed, match="channel c is closed"):
            office.out(B, key="another").result()

    asyncio.run(case())


def test_who_waits_at_an_empty_channel_for_a_lost_producer_knows():
    async def case():
        office = Office()
        office.into(A, 1)
        batch = office.out(B, 5)
        office.lose(A, "killed", False)
        with pytest.raises(PeerLost, match="actor:0 is gone: killed"):
            batch.result()
        assert numbers(office.out(C)) == [1], "what the batch had taken stays for others"
        with pytest.raises(PeerLost, match="actor:0 is gone: killed"):
            office.out(C)

    asyncio.run(case())


def test_a_producer_that_died_leaves_its_items():
    async def case():
        office = Office()
        office.into(A, 1)
        office.lose(A, "killed", False)
        assert numbers(office.out(B)) == [1]

    asyncio.run(case())


def test_who_waits_at_a_full_channel_for_a_lost_consumer_knows():
    async def case():
        office = Office(maxsize=1)
        office.into(A, 1)
        office.out(B)
        office.into(A, 2)
        waiting = office.into(A, 3)
        office.lose(B, "killed", False)
        with pytest.raises(PeerLost, match="rollout:0 is gone"):
            waiting.result()
        with pytest.raises(PeerLost, match="rollout:0 is gone"):
            office.into(A, 4)
        assert numbers(office.out(C)) == [2], "who comes new can take what is there"

    asyncio.run(case())


def test_channels_go_on_without_one_that_will_be_back():
    async def case():
        office = Office(maxsize=1)
        office.into(A, 1)
        assert numbers(office.out(B)) == [1]
        waiting = office.out(B)
        office.lose(A, "killed", True)
        later = office.out(C)  # not only who waited already may go on waiting
        assert not waiting.done()
        assert not later.done()
        office.find_again(A)
        office.into(A, 2)
        office.into(A, 3)
        assert (numbers(waiting), numbers(later)) == ([2], [3])
        office.lose(B, "killed", True)
        office.into(A, 4)
        assert not office.into(A, 5).done()

    asyncio.run(case())


@pytest.mark.parametrize("returns", [True, False], ids=["comes back", "is gone"])
def test_a_consumer_that_dies_with_half_a_batch_leaves_it_to_the_others(returns):
    async def case():
        office = Office()
        office.into(A, 1)
        dying, other = office.out(B, 3), office.out(C, 3)
        office.lose(B, "killed", returns)
        office.into(A, 2)
        office.into(A, 3)
        await tick()
        assert dying.cancelled()
        assert numbers(other) == [1, 2, 3]

    asyncio.run(case())


def test_the_same_loss_told_often_does_not_pile_up():
    async def case():
        office = Office()
        office.lose(A, "killed", False)
        depths = []
        for _ in range(4):
            with pytest.raises(PeerLost) as caught:
                office.mail(A, B, 1)
            depths.append(len(caught.traceback))
        assert len(set(depths)) == 1

    asyncio.run(case())


def test_parcels_survive_the_socket():
    parcels = [
        Packet(b"empty"),
        Packet(b"inline", (b"a", memoryview(b"bc"), b"")),
        Packet(b"segment", (), SegmentRef(1, 2, 3, 4), ((0, 3), (64, 1)), True),
        Packet(b"last", (b"z",)),
    ]
    assert from_frames(*to_frames(parcels)) == parcels
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
        gets, puts = Office(), Office(maxsize=1)
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
        office = Office()
        office.into(A, 1)
        office.into(B, 2)
        assert numbers(office.out(C, 2)) == [1, 2]
        waiting = office.out(C)
        office.lose(A, "killed", False)
        office.forget(B)
        assert not waiting.done()
        office.forget(A)
        assert office.lost(A) is None
        later = office.out(C)
        office.into(A, 3)
        office.into(A, 4)
        assert (numbers(waiting), numbers(later)) == ([3], [4])

    asyncio.run(case())


def test_mailboxes_are_dropped_when_empty():
    async def case():
        office = Office()
        office.mail(A, B, 1)
        assert numbers(office.fetch(A, B)) == [1]
        assert not office._mailboxes
        waiting = office.fetch(A, B)
        office.mail(A, B, 2)
        assert numbers(waiting) == [2]
        office.fetch(A, C).cancel()
        await tick()
        assert not office._mailboxes
        office.lose(B, "killed", False)
        with pytest.raises(PeerLost):
            office.fetch(A, B).result()
        assert not office._mailboxes

    asyncio.run(case())
