"""Scopes of prefix caches: keys of the same scope share prompts, and different scopes never collide."""

from __future__ import annotations

from headrace.protos.cache_scope import cache_scope, scoped_salt


def test_no_two_scopes_and_salts_have_one_salt_on_the_wire() -> None:
    scopes = [cache_scope("a", None), cache_scope("b", None), cache_scope("a", "a"), cache_scope("b", "b"), "tenant/a1"]
    salts = ["", "1", "11", "a", scoped_salt("tenant/b", "")]
    assert len({scoped_salt(scope, salt) for scope in scopes for salt in salts}) == len(scopes) * len(salts)


def test_a_group_stands_in_for_the_tenants_that_have_it() -> None:
    assert cache_scope("a", "house") == cache_scope("b", "house")
