"""A sidecar process without a model, as good or bad as its first argument says. Used by test_sidecar.py."""

from __future__ import annotations

import os
import sys
import threading
import time

import zmq

from ooospec.sidecar import protocol
from ooospec.sidecar.process import READY
from ooospec.sidecar.protocol import Done, Function, Hello, SlotValue, Submit, Welcome


def answer(kind: str, message: Submit) -> list[bytes]:
    number = message.request
    if kind == "garbage":
        return [
            b"\xff\x00nonsense",
            b"",
            protocol.encoder.encode(["s", number, 99, 99, 50, "x"]),
            protocol.encoder.encode({"a": 1}),
        ]
    if kind == "stranger":
        number += 1000
    value = message.dialogue[-1].text if message.dialogue else "?"
    if message.only >= 0 and kind == "deaf":
        return []
    if message.slot >= 0:
        replies = [
            SlotValue(number, message.only, message.slot, 80, message.written.strip('"') + "slo"),
            Done(number),
        ]
        return [protocol.encoder.encode(reply) for reply in replies]
    if message.only >= 0:
        replies = [SlotValue(number, message.only, 0, 80, value.split()[-1]), Done(number, 1, 2, 1)]
        return [protocol.encoder.encode(reply) for reply in replies]
    replies = [Function(number, (0,), (90,)), SlotValue(number, 0, 0, 80, value), Done(number, 1, 2, 3)]
    if kind == "error":
        replies = [Done(number, 0, 0, 0, "ValueError: no")]
    return [protocol.encoder.encode(reply) for reply in replies]


def main(kind: str) -> None:
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    print(f"{READY}tcp://127.0.0.1:{port}", flush=True)
    while True:
        client, data = socket.recv_multipart()
        message = protocol.to_sidecar.decode(data)
        if isinstance(message, Hello):
            socket.send_multipart([client, protocol.encoder.encode(Welcome("fake"))])
        elif isinstance(message, Submit):
            if kind == "suicide":
                socket.send_multipart([client, protocol.encoder.encode(Function(message.request, (0,), (90,)))])
                os.kill(os.getpid(), 9)
            if kind == "hang":
                time.sleep(3600)
            for part in answer(kind, message):
                socket.send_multipart([client, part])


if __name__ == "__main__":
    main(sys.argv[1])
