"""How much memory a session, a cache or a bank of states holds."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


def tensor_bytes(thing: Any) -> int:
    """Bytes of all tensors reachable from an object through its attributes and containers; modules don't count.

    Tensors that share storage are counted once, since a view holds no memory of its own.
    """
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        at = waiting.pop()
        if id(at) in seen or isinstance(at, (nn.Module, type, str, bytes, int, float)):
            continue
        seen.add(id(at))
        if isinstance(at, Tensor):
            storage = at.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(at, Mapping):
            waiting.extend(at.values())
        elif isinstance(at, (list, tuple, set)):
            waiting.extend(at)
        else:
            waiting.extend(getattr(at, "__dict__", {}).values())
    return sum(storages.values())
