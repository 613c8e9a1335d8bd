"""Sockets between rank 0 and the other ranks of a machine, over which processes can hand each other open files."""

import secrets
import socket

from deltagram.parallel.groups import Group

_TIMEOUT = 60.0  # seconds for a rank that is already there to connect


def to_rank_zero(group: Group) -> list[socket.socket]:
    """On rank 0 a socket to each other rank, in their order; on the others the one to rank 0. Every rank calls this.

    Each message is one packet. An end that is closed, or whose process has ended, reads as an empty message.
    """
    address = group.broadcast_decision(f"\0deltagram-{secrets.token_hex(8)}")  # a name without a file
    if group.rank:
        group.barrier()  # rank 0 listens
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end.connect(address)
        end.send(bytes([group.rank]))
        return [end]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(group.size)
        listener.settimeout(_TIMEOUT)
        group.barrier()
        ends = {}
        for _ in range(group.size - 1):
            end, _ = listener.accept()
            end.settimeout(None)
            ends[end.recv(1)[0]] = end
    return [ends[rank] for rank in sorted(ends)]
