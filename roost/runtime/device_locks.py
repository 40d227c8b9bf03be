"""Locks on devices that several workers share: one holder at a time, first come first served, freed with its holder."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from roost.runtime.address import Address


@dataclass(frozen=True, slots=True, eq=False)
class _Waiter:
    who: Address
    devices: frozenset[int]
    future: asyncio.Future[None]


class DeviceLocks:
    """The locks of one node's devices.

    Whoever wants several devices gets them at once or waits for all of them, so two workers cannot each hold half. A
    holder may take the same devices again; they are free when it has given them back as often.
    """

    def __init__(self) -> None:
        self._holders: dict[int, tuple[Address, int]] = {}  # device -> holder, how often it took it
        self._waiting: deque[_Waiter] = deque()

    def acquire(self, who: Address, devices: Iterable[int]) -> asyncio.Future[None]:
        waiter = _Waiter(who, frozenset(devices), asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._grant()
        if not waiter.future.done():
            waiter.future.add_done_callback(self._given_up)
        return waiter.future

    def _given_up(self, future: asyncio.Future[None]) -> None:
        if future.cancelled():
            self._grant()  # others may have waited behind it for devices that are free

    def release(self, who: Address, devices: Iterable[int]) -> None:
        given = frozenset(devices)
        for device in sorted(given):
            holder, _ = self._holders.get(device, (None, 0))
            if holder != who:
                raise ValueError(f"{who} gives back the lock of device {device}, which {holder or 'nobody'} holds")
        for device in given:
            count = self._holders[device][1]
            if count > 1:
                self._holders[device] = (who, count - 1)
            else:
                del self._holders[device]
        self._grant()

    def release_all(self, who: Address) -> tuple[int, ...]:
        """Free what a worker that is gone has held, and forget what it waited for."""
        freed = tuple(sorted(device for device, (holder, _) in self._holders.items() if holder == who))
        for device in freed:
            del self._holders[device]
        self._waiting = deque(waiter for waiter in self._waiting if waiter.who != who)
        self._grant()
        return freed

    def holders(self, devices: Iterable[int]) -> dict[int, Address]:
        """Who holds which of these devices."""
        return {device: self._holders[device][0] for device in sorted(set(devices)) if device in self._holders}

    def _grant(self) -> None:
        """Serve those who can be served; who comes later must not overtake on a device that somebody waits for."""
        claimed: set[int] = set()
        still: deque[_Waiter] = deque()
        for waiter in self._waiting:
            if waiter.future.done():
                continue  # it gave up
            is_own = all(self._holders.get(device, (waiter.who, 0))[0] == waiter.who for device in waiter.devices)
            holds_some = any(device in self._holders for device in waiter.devices)
            # A holder that comes again does not queue behind those who wait for it: that would never end.
            if is_own and (holds_some or not waiter.devices & claimed):
                for device in waiter.devices:
                    self._holders[device] = (waiter.who, self._holders.get(device, (waiter.who, 0))[1] + 1)
                waiter.future.set_result(None)
            else:
                claimed |= waiter.devices
                still.append(waiter)
        self._waiting = still
