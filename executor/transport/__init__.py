"""Transports: gloo between processes, NCCL between GPUs, threads inside one process."""

from executor.transport.base import Buffer, BufferPool, Handle, Transport
from executor.transport.gloo import GlooTransport
from executor.transport.nccl import NcclTransport
from executor.transport.threads import ThreadTransport, ThreadWorld

__all__ = [
    "Buffer",
    "BufferPool",
    "GlooTransport",
    "Handle",
    "NcclTransport",
    "ThreadTransport",
    "ThreadWorld",
    "Transport",
]
