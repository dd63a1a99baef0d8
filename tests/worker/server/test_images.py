"""Images at the worker's door: the worker computes everything from their bytes, and believes nothing that a caller
says."""

from __future__ import annotations

import io
import json
from array import array
from collections.abc import Sequence

import pytest
from PIL import Image

from headrace.common.transport.wire_request import SharedPart, WireRequest
from headrace.common.vision.families.known import family_of
from headrace.common.vision.family import Detail
from headrace.common.vision.identity import FIRST_PSEUDO_TOKEN, digest, pseudo_tokens
from headrace.protos import inference_pb2
from headrace.protos.inference_pb2 import IMAGE_DETAIL_LOW, GenerateRequest
from headrace.protos.status import Reason, StatusError
from headrace.protos.worker_pb2 import ImageLimits
from headrace.worker.request.request import Request
from headrace.worker.server.admission import DecodedRequest, ModelLimits, SentImage, admit, decode
from headrace.worker.server.images import ImageDesk, Images

VOCAB_SIZE, IMAGE_TOKEN = 100, 32
LIMITS = ModelLimits("m", "f" * 64, VOCAB_SIZE, 40_000, frozenset({2}))
CONFIG = {
    "model_type": "llava",
    "image_token_index": IMAGE_TOKEN,
    "vision_config": {"model_type": "clip_vision_model", "patch_size": 14},
}
PREPROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": 56},
    "crop_size": {"height": 56, "width": 56},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
FILES = {"config.json": json.dumps(CONFIG).encode(), "preprocessor_config.json": json.dumps(PREPROCESSOR).encode()}
FAMILY = family_of(FILES)
assert FAMILY is not None
NUM_TOKENS = 16


def picture(shade: int, size: tuple[int, int] = (8, 8)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, (shade, 0, 0)).save(out, "PNG")
    return out.getvalue()


RED, DARK = picture(200), picture(20)


def desk(refusals: list[str] | None = None, *, max_tokens: int = 1000, **limits: int) -> ImageDesk:
    bounds = {"max_images": 3, "max_pixels": 10_000, "max_bytes": 5_000, **limits}
    assert FAMILY is not None
    on_refusal = (lambda label: None) if refusals is None else refusals.append
    return ImageDesk("m", Images(FAMILY, ImageLimits(**bounds), max_tokens), on_refusal)


def tokens_of(data: bytes, detail: Detail = Detail.AUTO) -> array[int]:
    assert FAMILY is not None
    return pseudo_tokens(digest(data, FAMILY, detail), NUM_TOKENS)


def message(prompt: Sequence[int], *images: bytes, **fields: object) -> GenerateRequest:
    found = GenerateRequest(token_ids=prompt, **fields)  # type: ignore[arg-type]
    for data in images:
        found.images.add(data=data)
    return found


def admitted(request: GenerateRequest) -> Request:
    decoded = DecodedRequest.of(request)
    images = decoded.placed(desk().place)
    return admit(decoded, LIMITS, request_id="r", arrival_s=0.0, images=images)


def test_images_get_the_places_of_their_tokens() -> None:
    prompt = [1, *tokens_of(RED), 5, *tokens_of(DARK), *tokens_of(RED), 6]
    request = admitted(message(prompt, RED, DARK, RED))
    assert request.token_ids == array("I", prompt)
    assert [image.places.tolist() for image in request.images] == [
        list(range(1, 17)),
        list(range(18, 34)),
        list(range(34, 50)),
    ]
    assert [image.data for image in request.images] == [RED, DARK, RED]
    assert request.images[0].digest == request.images[2].digest != request.images[1].digest
    assert not any(image.is_whole for image in request.images)


def test_choices_of_a_chat_share_their_images_and_wait_for_states_by_themselves() -> None:
    prompt = [1, *tokens_of(RED), 5]
    part = SharedPart(message(prompt, RED).SerializeToString())
    placed = []
    calls = []

    def counted(sent: Sequence[SentImage], token_ids: Sequence[int]) -> list:  # type: ignore[type-arg]
        calls.append(sent)
        return desk().place(sent, token_ids)

    for number in range(16):
        own = GenerateRequest(request_id=str(number)).SerializeToString()
        decoded = decode(WireRequest(own, (part,)))
        assert not decoded.message.images
        placed.append(decoded.placed(counted)[0])
        request = admit(decoded, LIMITS, request_id="r", arrival_s=0.0, images=placed[-1:])
        assert request.token_ids == array("I", prompt)
    assert len(calls) == 1
    assert len({id(image) for image in placed}) == 16
    assert len({id(image.data) for image in placed}) == 1


def test_images_apart_from_the_shared_prompt_are_placed_in_it() -> None:
    prompt = [1, *tokens_of(RED), 5, *tokens_of(DARK)]
    parts = (SharedPart(message(prompt).SerializeToString()), SharedPart(message([], RED).SerializeToString()))
    decoded = decode(WireRequest(message([], DARK).SerializeToString(), parts))
    assert [image.first for image in decoded.placed(desk().place)] == [1, 18]


def test_a_bit_of_the_file_or_of_the_detail_changes_what_a_family_says_it_changes() -> None:
    other = bytearray(RED)
    other[-1] ^= 1
    assert tokens_of(RED) != tokens_of(bytes(other))
    assert not set(tokens_of(RED)) & set(tokens_of(DARK))
    low = message([1, *tokens_of(RED)])
    low.images.add(data=RED, detail=IMAGE_DETAIL_LOW)
    assert admitted(low).images[0].detail == "low"


@pytest.mark.parametrize(
    ("prompt", "images", "field", "problem"),
    [
        ([1, *tokens_of(RED)], [], "token_ids", "no images; send them too"),
        ([1, 2], [RED], "token_ids", "has 0 tokens of images, and the images have 16"),
        ([1, *tokens_of(RED), 7], [RED, DARK], "token_ids", "has 16 tokens of images, and the images have 32"),
        ([1, *tokens_of(DARK)], [RED], "token_ids", "other tokens than those of images\\[0\\]"),
        ([*tokens_of(DARK), *tokens_of(RED)], [RED, DARK], "token_ids", "other tokens than those of images\\[0\\]"),
        ([*tokens_of(RED)[:8], 4, *tokens_of(RED)[8:]], [RED], "token_ids", "in other rows"),
        ([*tokens_of(RED)[::-1]], [RED], "token_ids", "other tokens"),
        ([*[FIRST_PSEUDO_TOKEN] * 16], [RED], "token_ids", "other tokens"),
        ([VOCAB_SIZE, *tokens_of(RED)], [RED], "token_ids", "has token 100; the vocabulary has 100"),
        ([*tokens_of(RED)] * 4, [RED] * 4, "images", "a request may have at most 3: remove some"),
        ([1], [RED, b"GIF8"], "images\\[1\\]", "is neither PNG, JPEG, WebP nor GIF"),
        ([1], [b""], "images\\[0\\]", "the image is empty"),
        ([1], [picture(1, (200, 100))], "images\\[0\\]", "has 200 x 100 pixels; at most 10,000"),
        ([1], [RED + b"x" * 5000], "images\\[0\\]", "bytes; at most 5,000 are accepted. Make it smaller"),
    ],
)
def test_what_is_wrong_is_refused_by_name(prompt: list[int], images: list[bytes], field: str, problem: str) -> None:
    with pytest.raises(StatusError, match=problem) as caught:
        admitted(message(prompt, *images))
    assert caught.value.reason is Reason.INVALID_FIELD
    assert caught.value.field == field.replace("\\", "")


def test_tokens_of_images_are_refused_wherever_tokens_of_the_vocabulary_belong() -> None:
    token = FIRST_PSEUDO_TOKEN + 7
    sampling = inference_pb2.SamplingParams
    for fields in (
        {"prediction_token_ids": [token]},
        {"resume_token_ids": [token]},
        {"sampling": sampling(stop_token_ids=[token])},
        {"sampling": sampling(logit_bias={token: 1.0})},
        {"sampling": sampling(allowed_token_ids=[token])},
    ):
        with pytest.raises(StatusError, match="vocabulary has 100"):
            admitted(message([1, *tokens_of(RED)], RED, **fields))


def test_a_model_of_text_refuses_images_by_its_name() -> None:
    refusals: list[str] = []
    with pytest.raises(StatusError, match="'m' takes text only; remove the images") as caught:
        ImageDesk("m", None, refusals.append).place([SentImage(RED, 0)], [1])
    assert (caught.value.reason, caught.value.field, refusals) == (Reason.UNSUPPORTED, "images", ["unsupported"])


def test_tokens_within_another_bound_of_pixels_are_told_from_wrong_ones() -> None:
    refusals: list[str] = []
    bounded = desk(refusals, max_view_pixels=200)
    for view_pixels in (0, 200):
        bounded.check_bound(view_pixels)
    with pytest.raises(StatusError, match="this worker's --max-image-pixels is 200; start again") as caught:
        bounded.check_bound(201)
    assert (caught.value.reason, caught.value.field) == (Reason.MODEL_CHANGED, "image_view_pixels")
    assert refusals == ["tokens"]
    ImageDesk("m", None).check_bound(7)  # `place` says that it takes text only


def test_refusals_are_counted_by_reason() -> None:
    refusals: list[str] = []
    one = SentImage(RED, 0)
    for sent, tokens in (([one] * 4, [1]), ([SentImage(b"no", 0)], [1]), ([one], [1]), ([SentImage(RED, 9)], [1])):
        with pytest.raises(StatusError):
            desk(refusals).place(sent, tokens)
    assert refusals == ["count", "file", "tokens", "detail"]


def test_images_with_more_tokens_than_there_is_memory_for_their_states_are_refused_by_the_first_of_them() -> None:
    refusals: list[str] = []
    sent, tokens = [SentImage(RED, 0), SentImage(DARK, 0)], [1, *tokens_of(RED), *tokens_of(DARK)]
    assert len(desk(refusals, max_tokens=2 * NUM_TOKENS).place(sent, tokens)) == 2
    with pytest.raises(StatusError, match="up to this one have more than 31 tokens.*ask for a detail of low") as caught:
        desk(refusals, max_tokens=2 * NUM_TOKENS - 1).place(sent, tokens)
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_FIELD, "images[1]")
    assert refusals == ["states"]


def test_log_probabilities_of_a_prompt_are_refused_with_images_that_one_step_computes() -> None:
    decoded = DecodedRequest.of(message([1, *tokens_of(RED)], RED))
    decoded.message.sampling.prompt_logprobs = 1
    (image,) = decoded.placed(desk().place)
    assert admit(decoded, LIMITS, request_id="r", arrival_s=0.0, images=[image])
    image.is_whole = True
    with pytest.raises(StatusError, match="leave them out"):
        admit(decoded, LIMITS, request_id="r", arrival_s=0.0, images=[image])
