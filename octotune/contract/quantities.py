"""The bounded integers and texts that every file of the contract is made of."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_QUANTITY = 2**63 - 1

Amount = Annotated[int, Meta(ge=0, le=MAX_QUANTITY)]  # ns or bytes
Index = Annotated[int, Meta(ge=0, le=2**24 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**24)]
Rate = Annotated[int, Meta(ge=1, le=MAX_QUANTITY)]  # bytes per second
RateOrNone = Annotated[int, Meta(ge=0, le=MAX_QUANTITY)]  # 0: there is none
Name = Annotated[str, Meta(min_length=1)]
