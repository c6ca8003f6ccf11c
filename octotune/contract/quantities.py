"""The bounded integers and texts that every file of the contract is made of."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from simulator.actions import MAX_MICROBATCHES

MAX_QUANTITY = 2**63 - 1

Amount = Annotated[int, Meta(ge=0, le=MAX_QUANTITY)]  # ns or bytes
Index = Annotated[int, Meta(ge=0, le=MAX_QUANTITY)]  # of a layer, a device or a host
Count = Annotated[int, Meta(ge=1, le=MAX_QUANTITY)]
Microbatches = Annotated[int, Meta(ge=1, le=MAX_MICROBATCHES)]
Rate = Annotated[int, Meta(ge=1, le=MAX_QUANTITY)]  # bytes per second
RateOrNone = Annotated[int, Meta(ge=0, le=MAX_QUANTITY)]  # 0: there is none
Name = Annotated[str, Meta(min_length=1)]


def short(text: str, length: int = 60) -> str:
    """Return a text as one line that is fit for a message: quoted, no longer than `length`."""
    if len(text) > length:
        text = text[: length - 1] + "…"
    return ascii(text) if not text.isprintable() else repr(text)
