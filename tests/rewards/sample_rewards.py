"""Rewards as a user would write them, imported by path in the tests and in worker processes."""

from __future__ import annotations

import os
import time


class AwkwardError(Exception):
    """Cannot be unpickled: its constructor takes two arguments."""

    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def obedient(inputs, scale=1.0):
    """Does what the completion says."""
    return [_obey(row.completion_text, scale) for row in inputs]


def _obey(text, scale):
    if text == "hang":
        while True:
            time.sleep(0.01)
    if text == "hang in C":
        return float(9 ** (9**9) % 7)
    if text == "raise":
        raise ValueError("I was told to")
    if text == "raise awkwardly":
        raise AwkwardError("this", "that")
    if text == "die":
        os._exit(3)
    if text == "eat memory":
        return float(len(bytearray(2**40)))
    if text == "decline":
        return None
    if text == "infinite":
        return float("inf")
    if text == "pid":
        return float(os.getpid())
    return float(text) * scale


def too_few(inputs):
    return [1.0] * (len(inputs) - 1)


def only_batches_of_one(inputs):
    if len(inputs) > 1:
        raise RuntimeError("one at a time, please")
    return [1.0]


not_callable = 3
