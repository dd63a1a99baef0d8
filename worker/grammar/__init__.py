"""Constraints on what a request may generate: grammars, compiled once and followed token by token."""
