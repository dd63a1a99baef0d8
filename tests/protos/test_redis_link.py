"""URLs of Redis, as flags give them."""

from __future__ import annotations

import pytest

from headrace.protos.redis_link import connect


@pytest.mark.parametrize("url", ["nonsense", "redis+sentinel://", "redis+sentinel://h:1", "redis+sentinel://h/s/db"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="redis"):
        connect(url, 1.0)


async def test_a_url_with_several_sentinels_is_read() -> None:
    client = connect("redis+sentinel://me:p%40ss@h1:1,h2/service/3", 1.0)
    kwargs = client.connection_pool.connection_kwargs
    assert (kwargs["username"], kwargs["password"], kwargs["db"]) == ("me", "p@ss", 3)
    await client.aclose()
