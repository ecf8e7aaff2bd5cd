"""Who may ask for what."""

from __future__ import annotations

from pathlib import Path

import pytest

from deeplink.errors import ConfigError
from deeplink.router.keys import Keys, load

from .rig import check, pair, rig

USER, ADMIN = "user-key-0123456789", "admin-key-0123456789"
ASK = {"prompt": "x"}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "keys").write_text(f"# clients\n\nanother-key-0123456789\n{USER}\n")
    (tmp_path / "admin").write_text(ADMIN)
    return {"keys_file": str(tmp_path / "keys"), "admin_keys_file": str(tmp_path / "admin")}


def test_each_key_opens_its_own(files: dict[str, str]) -> None:
    async def test() -> None:
        producer, consumer = pair()
        async with rig(producer, consumer, **files) as route:
            for key, inference, operators in ((USER, 200, 401), (ADMIN, 401, 200), ("", 401, 401), ("x", 401, 401)):
                bearer = {"Authorization": f"Bearer {key}"}
                got = await route.complete(ASK, headers=bearer)
                assert got.status == inference
                if inference == 401:
                    assert got.error["code"] == "unauthorized"
                    assert got.headers["WWW-Authenticate"] == "Bearer"
                for path in ("/metrics", "/deeplink/v1/engines"):
                    assert (await route.get(path, headers=bearer)).status == operators
                assert (await route.get("/v1/models", headers=bearer)).status == inference
                assert (await route.complete({"input": "x"}, "/v1/embeddings", headers=bearer)).status != 401 or (
                    inference == 401
                )
            assert (await route.get("/health")).status == 200
            assert len(producer.calls) == 1
            # What opens the router is nobody else's.
            assert not [call for call in producer.calls + consumer.calls if "Authorization" in call.headers]
            assert consumer.listings
            assert not [headers for headers in consumer.listings if "Authorization" in headers]

    check(test)


def test_without_files_inference_is_open_and_there_is_no_operators_api() -> None:
    async def test() -> None:
        async with rig(*pair()) as route:
            assert (await route.complete(ASK)).status == 200
            assert (await route.get("/metrics")).status == 200
            assert (await route.get("/deeplink/v1/engines")).status == 404
            assert (await route.complete({}, "/deeplink/v1/engines/p/drain")).status == 404

    check(test)


def test_a_key_is_all_of_it_and_a_bearer_token() -> None:
    keys = Keys([USER])
    assert keys.open_with(f"Bearer {USER}")
    assert keys.open_with(f"bearer  {USER} ")
    for wrong in ("", USER, f"Basic {USER}", f"Bearer {USER[:-1]}", f"Bearer {USER}x", "Bearer \udcff"):
        assert not keys.open_with(wrong)


@pytest.mark.parametrize("text", ["", "# only a comment\n", "short\n"])
def test_a_file_that_is_no_use(tmp_path: Path, text: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "keys", "router.keys_file")
    assert caught.value.field == "router.keys_file"
    assert "short\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load(tmp_path / "keys", "router.keys_file")
