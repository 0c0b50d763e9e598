from __future__ import annotations

import pytest

from helpers.chat_vectors import TINY
from ultraflash.server.protocol import ChatProtocol


@pytest.fixture(scope="session")
def protocol() -> ChatProtocol:
    return ChatProtocol.from_checkpoint(TINY / "ckpt")
