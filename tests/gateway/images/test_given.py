"""The forms in which callers give images."""

from __future__ import annotations

import pytest

from headrace.common.vision.family import Detail
from headrace.gateway.images.given import detail_of, image_of_base64, image_of_url
from headrace.protos.status import Reason, StatusError


@pytest.mark.parametrize(
    "url",
    ["data:image/png;base64,QUJD", "DATA:;base64,QUJD", "data:image/jpeg;charset=x;BASE64,QUJD", "data:;base64,QUJD"],
)
def test_data_urls_have_base64(url: str) -> None:
    for image in (image_of_url("u", url), image_of_base64("u", url)):
        assert (image.base64, image.data, image.url) == ("QUJD", None, None)


@pytest.mark.parametrize("url", ["https://a.example/x.png", "HTTP://a.example/", "file:///tmp/x.png"])
def test_other_urls_are_kept_as_they_are(url: str) -> None:
    assert image_of_url("u", url, Detail.LOW).url == url
    with pytest.raises(StatusError, match="u must be the file of an image as base64, not a URL"):
        image_of_base64("u", url)


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (None, "u must be a text: a URL"),
        ("", "u must be a text: a URL"),
        (7, "u must be a text: a URL"),
        ("data:image/png,QUJD", "u is a data URL without base64"),
        ("data:" + "x" * 10_000 + ";base64,QUJD", "u is a data URL without base64"),
        ("data:image/png;base64", "u is a data URL without base64"),
        ("data:application/pdf;base64,QUJD", "u: a file of the type application/pdf is no image: the server reads no"),
        ("data:audio/wav;base64,QUJD", "u: a file of the type audio/wav is no image: the model hears no audio; send"),
        ("data:text/plain;base64,QUJD", "u: a file of the type text/plain is no image: send the text as text"),
        ("ftp://a.example/x.png", "u has the scheme ftp; send"),
        ("javascript:alert(1)", "u has the scheme javascript; send"),
        ("//a.example/x.png", "u has no scheme; send"),
        ("/etc/passwd", "u has no scheme; send"),
        ("iVBORw0KGgo=", "u has no scheme; send"),
        ("\\\\server\\share", "u has no scheme; send"),
    ],
)
def test_what_is_no_image_is_refused_by_name(url: object, problem: str) -> None:
    with pytest.raises(StatusError) as refused:
        image_of_url("u", url)
    assert refused.value.message.startswith(problem)
    assert refused.value.field == "u"


@pytest.mark.parametrize("value", ["medium", 1, True, ["low"]])
def test_an_unknown_detail_is_refused(value: object) -> None:
    with pytest.raises(StatusError, match="d must be one of low, high, auto, original") as refused:
        detail_of("d", value)
    assert refused.value.reason is Reason.INVALID_FIELD
