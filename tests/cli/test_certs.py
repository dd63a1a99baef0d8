"""`headrace certs secrets` creates missing secrets and keeps existing ones."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from headrace.cli.main import cli
from headrace.common.transport.channels import read_tokens


def test_secrets_are_made_once_and_for_their_owner_alone(tmp_path: Path) -> None:
    directory = tmp_path / "secrets"
    for _ in range(2):
        done = CliRunner().invoke(cli, ["certs", "secrets", str(directory)])
        assert done.exit_code == 0, done.output
        made = {path.name: path.read_text() for path in directory.iterdir()}
        assert set(made) == {"join-token", "redis-password", "redis.conf"}
        assert made["redis.conf"] == f"requirepass {made['redis-password']}"
        assert len(made["redis-password"].strip()) == 64
        assert made["redis-password"] != made["join-token"]
        assert not any(secret.strip() in done.output for secret in made.values())
        assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
        (token,) = read_tokens(directory / "join-token")
    assert token == made["join-token"].strip()


def test_containers_of_other_users_may_read_them_where_asked(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["certs", "secrets", str(tmp_path), "--readable"])
    assert done.exit_code == 0, done.output
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}
