"""Layouts and pixels of each family are those of transformers (references.json; write_references.py says how made)."""

from __future__ import annotations

import hashlib
import io
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from headrace.common.vision.decode import decode
from headrace.common.vision.families.known import FAMILIES, family_of
from headrace.common.vision.families.qwen import Qwen
from headrace.common.vision.family import Detail, FamilyError, ImageFamily, check_not_reduced
from headrace.common.vision.header import ImageError, read_header
from tests.common.vision.models import MODELS, files_of
from tests.common.vision.pictures import PROMPT, picture

REFERENCES: dict[str, dict[str, dict[str, dict[str, str]]]] = json.loads(
    (Path(__file__).parent / "references.json").read_text()
)
# The words of write_references.py's tokenizer: special tokens, runs of line ends, and what lies between them.
WORDS = re.compile(r"<\|[a-z_]+\|?>|<[a-z]+\|>|<[a-z0-9_-]+>|\[[A-Z_]+\]|\n+|[^\n<\[]+")
UNBOUNDED = 10**9


@cache
def family_named(name: str) -> ImageFamily:
    found = family_of(files_of(name), UNBOUNDED)
    assert found is not None
    return found


def expected(part: str, name: str) -> dict[str, set[str]]:
    """The references of a model by case, from the versions of transformers that computed it."""
    found: dict[str, set[str]] = {}
    for version in REFERENCES.values():
        for case, reference in version[part].get(name, {}).items():
            found.setdefault(case, set()).add(reference)
    return found


def hashed(array: Any) -> str:
    return f"{'x'.join(map(str, array.shape))} {hashlib.sha256(array.tobytes()).hexdigest()[:32]}"


@pytest.mark.parametrize("name", MODELS)
def test_pixels_are_bit_for_bit_those_of_transformers(name: str) -> None:
    wanted = expected("pixels", name)
    assert {case: {pixels_of(name, case)} for case in wanted} == wanted


def pixels_of(name: str, case: str) -> str:
    family = family_named(name)
    if case == "alpha":
        file = io.BytesIO()
        Image.fromarray(picture(70, 50, 4)).save(file, "PNG", compress_level=0)
        header = read_header(file.getvalue())
        image = decode(file.getvalue(), header, white_under_alpha=family.white_under_alpha)
    else:
        width, height = map(int, case.removesuffix(" low").split("x"))
        image = Image.fromarray(picture(width, height))
    layout = family.layout(*image.size, Detail.LOW if case.endswith(" low") else Detail.AUTO)
    found = family.pixels(image, layout)
    assert found["pixel_values"].dtype == np.float32
    frames = 2 if "image_grid_thw" in found else 1
    assert found["pixel_values"].size == layout.num_pixels * 3 * frames
    return hashed(found["pixel_values"])


def tokenized(text: str) -> list[str]:
    return WORDS.findall(text)


def as_prompt(family: ImageFamily, width: int, height: int) -> list[str]:
    """The words of a prompt, made as the gateway makes it: tokenized with the placeholder, which is then replaced."""
    around = f"{family.text_around}{family.placeholder}{family.text_around}"
    words = tokenized(PROMPT.format(around))
    place = words.index(family.placeholder)
    # The image token is no text to a family; its id stands for it.
    table: list[str] = ["image token"]

    def token_ids(text: str) -> list[int]:
        table.extend(tokenized(text))
        return list(range(len(table) - len(tokenized(text)), len(table)))

    layout = family.layout(width, height, Detail.AUTO)
    image = [table[i] for i in layout.token_ids(0, token_ids)]
    assert image.count("image token") == layout.num_image_tokens == sum(layout.runs)
    return words[:place] + image + words[place + 1 :]


IMAGE_WORDS = {"gemma3": "<image_soft_token>"}


@pytest.mark.parametrize("name", MODELS)
def test_prompts_are_those_of_transformers(name: str) -> None:
    wanted = expected("layouts", name)
    assert {case: {prompt_of(name, case)} for case in wanted} == wanted


def prompt_of(name: str, case: str) -> str:
    family = family_named(name)
    width, height = map(int, case.split("x"))
    image_word = IMAGE_WORDS.get(name, family.placeholder)
    words = [image_word if word == "image token" else word for word in as_prompt(family, width, height)]
    return f"{words.count(image_word)} {hashlib.sha256(chr(10).join(words).encode()).hexdigest()[:32]}"


def test_references_cover_all_models_with_both_versions() -> None:
    assert set(REFERENCES) == {"4.57.6", "5.24.0"}
    for name in MODELS:
        assert {"1x1", "3x5", "5x3", "2x9", "2000x30"} <= set(expected("pixels", name)) or name == "smolvlm"
        assert len(expected("layouts", name)) >= 13
    assert {name for name in MODELS if name not in REFERENCES["4.57.6"]["pixels"]} == {"gemma4"}
    assert {MODELS[name][0]["model_type"] for name in MODELS} >= FAMILIES - {"qwen2_5_vl", "qwen3_5", "qwen3_5_moe"}


@pytest.mark.parametrize("name", MODELS)
def test_a_layout_depends_on_the_size_alone_and_low_detail_is_never_more(name: str) -> None:
    family = family_named(name)
    for width, height in ((1, 1), (3, 5), (50, 2000), (640, 480), (4000, 3000)):
        high, auto, low = (family.layout(width, height, detail) for detail in ("high", "auto", "low") if Detail(detail))
        assert high == auto
        assert low.num_image_tokens <= auto.num_image_tokens
        assert low.num_pixels <= auto.num_pixels
        assert (auto.grid is not None) == isinstance(family, Qwen)
        if auto.grid is not None:
            assert auto.grid[0] * auto.grid[1] == auto.num_image_tokens


@pytest.mark.parametrize("detail", [Detail.AUTO, Detail.LOW])
@pytest.mark.parametrize("name", MODELS)
def test_an_image_is_read_whole_up_to_the_size_that_is_named(name: str, detail: Detail) -> None:
    family = family_named(name)
    check_not_reduced(family, 1, 1, detail)
    for width, height in ((9000, 5000), (5001, 5000), (5000, 6000)):
        with pytest.raises(ImageError, match=f"the image has {width} x {height} pixels, and the model reads") as found:
            check_not_reduced(family, width, height, detail)
        most = tuple(map(int, re.findall(r"at most (\d+) x (\d+)", str(found.value))[0]))
        check_not_reduced(family, *most, detail)
        with pytest.raises(ImageError):
            check_not_reduced(family, int(1.1 * most[0]) + 2, int(1.1 * most[1]) + 2, detail)


def test_the_sizes_that_models_read_whole() -> None:
    def most(name: str, width: int, height: int) -> str:
        with pytest.raises(ImageError) as found:
            check_not_reduced(family_named(name), width, height, Detail.AUTO)
        return re.findall(r"at most (\d+ x \d+)", str(found.value))[0]

    assert most("gemma3", 4000, 3000) == "896 x 672"
    assert most("llava", 4000, 3000) == "448 x 336"  # the middle is read
    assert most("llava-next", 4000, 3000) == "672 x 504"
    assert most("smolvlm", 4000, 3000) == "2048 x 1536"
    assert most("gemma4", 4000, 3000) == "927 x 695"
    assert most("pixtral", 4000, 3000) == "1024 x 768"
    assert most("qwen2-vl", 8000, 6000) == "4138 x 3103"


def test_low_detail_of_each_family() -> None:
    found = {name: family_named(name).layout(4000, 3000, Detail.LOW).num_image_tokens for name in MODELS}
    assert found["smolvlm"] == 64
    assert found["llava-next"] == 24 * 24 + 1
    assert found["llava"] == 576
    assert found["gemma3"] == 256
    assert found["gemma4"] == 63  # 9 columns and 7 rows of at most 70
    assert all(200 < found[name] <= 270 for name in ("qwen2-vl", "qwen3-vl", "mistral3", "pixtral"))


def test_llava_next_at_low_detail_is_the_whole_image_alone() -> None:
    family = family_named("llava-next")
    image = Image.fromarray(picture(640, 480))
    whole = family.pixels(image, family.layout(640, 480, Detail.AUTO))["pixel_values"]
    alone = family.pixels(image, family.layout(640, 480, Detail.LOW))["pixel_values"]
    assert alone.shape == (1, 3, 336, 336)
    assert np.array_equal(alone[0], whole[0])


@pytest.mark.parametrize(
    ("size", "grid", "borders"),
    [
        ((1000, 100), [1, 3], [8, 0]),  # 24 rows of patches, of which 7.2 are of the image
        ((100, 1000), [3, 1], [0, 8]),
        ((600, 600), [2, 2], [0, 0]),
        ((336, 330), [1, 2], [0, 12]),
    ],
)
def test_llava_next_chooses_the_size_that_keeps_most_and_tells_what_is_outside(
    size: tuple[int, int], grid: list[int], borders: list[int]
) -> None:
    family = family_named("llava-next")
    found = family.pixels(Image.fromarray(picture(*size)), family.layout(*size, Detail.AUTO))
    assert found["tile_grid"].tolist() == grid
    assert found["borders"].tolist() == borders


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl", "mistral3", "pixtral"])
def test_a_bound_on_pixels_holds_and_is_a_part_of_the_settings(name: str) -> None:
    bounded = family_of(files_of(name), 200_000)
    assert bounded is not None
    assert bounded.settings(Detail.AUTO) != family_named(name).settings(Detail.AUTO)
    for width, height in ((4000, 3000), (300, 1000), (447, 447)):
        layout = bounded.layout(width, height, Detail.AUTO)
        # Pixtral's scale the image within the bound, and then to whole patches.
        assert layout.num_pixels <= (200_000 if name.startswith("qwen") else 200_000 * 1.2)
        assert layout.num_pixels > 150_000
        small = bounded.layout(100, 90, Detail.AUTO)
        assert small == family_named(name).layout(100, 90, Detail.AUTO)


def test_a_bound_below_the_least_of_a_model_wins() -> None:
    family = family_of(files_of("qwen3-vl"), 40_000)
    assert family is not None
    assert family.layout(8, 8, Detail.AUTO).num_pixels < family_named("qwen3-vl").layout(8, 8, Detail.AUTO).num_pixels


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("bound", [1, 1000, UNBOUNDED])
def test_every_image_within_the_bounds_has_tokens(name: str, bound: int) -> None:
    family = family_of(files_of(name), bound)
    assert family is not None
    for width, height in ((1, 1), (1, 200), (200, 1), (50_000, 250), (250, 50_000), (7000, 7000)):
        for detail in Detail:
            layout = family.layout(width, height, detail)
            assert min(layout.runs) > 0
            assert layout.num_pixels > 0


def test_qwen_refuses_ratios_as_its_own_processor_does() -> None:
    with pytest.raises(ImageError, match="one side may be at most 200 times the other"):
        family_named("qwen2-vl").layout(201, 1, Detail.AUTO)
    assert family_named("qwen2-vl").layout(200, 1, Detail.AUTO).num_image_tokens


def test_details_that_read_an_image_differently_have_other_settings() -> None:
    for name in MODELS:
        family = family_named(name)
        low, auto = family.settings(Detail.LOW), family.settings(Detail.AUTO)
        assert auto == family.settings(Detail.HIGH)
        same = family.layout(999, 998, Detail.LOW) == family.layout(999, 998, Detail.AUTO)
        assert (low == auto) == same, name


def test_settings_of_all_models_differ() -> None:
    assert len({family_named(name).settings(Detail.AUTO) for name in MODELS}) == len(MODELS)


def test_reserved_tokens_are_those_of_the_config() -> None:
    assert family_named("qwen2-vl").reserved_token_ids == {151652, 151653, 151655, 151656}
    assert family_named("gemma3").reserved_token_ids == {255999, 256000, 262144}
    assert family_named("gemma3").placeholder_token_id == 255999
    for name in MODELS:
        family = family_named(name)
        assert {family.image_token_id, family.placeholder_token_id} <= family.reserved_token_ids


def test_only_gemma_keeps_images_whole() -> None:
    assert [name for name in MODELS if family_named(name).keeps_images_whole] == ["gemma3", "gemma4"]
    small = family_of(changed("gemma4", lambda config, _: config["text_config"].pop("use_bidirectional_attention")))
    assert small is not None
    assert not small.keeps_images_whole


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"pad_token_id": 5}, "config.json: text_config: pad_token_id is not 0"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is all, which is not supported"),
        ({"sliding_window": 100}, "sliding_window is less than the 280 tokens of an image"),
    ],
)
def test_attention_of_gemma_4_that_is_not_supported_is_refused_by_name(edit: dict[str, Any], message: str) -> None:
    with pytest.raises(FamilyError, match=re.escape(message)):
        family_of(changed("gemma4", lambda config, _: config["text_config"].update(edit)))


def test_patches_of_gemma_4_come_with_their_column_and_row() -> None:
    family = family_named("gemma4")
    layout = family.layout(3, 2, Detail.LOW)
    found = family.pixels(Image.fromarray(picture(3, 2)), layout)
    places = found["image_position_ids"]
    assert places.shape == (1, 9 * layout.num_image_tokens, 2)
    assert places[0, :2].tolist() == [[0, 0], [1, 0]]
    assert (places.max(1) + 1).prod() == places.shape[1]


def files(config: dict[str, Any], preprocessor: dict[str, Any] | None = None) -> dict[str, bytes]:
    found = {"config.json": json.dumps(config).encode()}
    if preprocessor is not None:
        found["preprocessor_config.json"] = json.dumps(preprocessor).encode()
    return found


def changed(name: str, edit: Callable[[dict[str, Any], dict[str, Any]], None]) -> dict[str, bytes]:
    config, preprocessor = (json.loads(json.dumps(part)) for part in MODELS[name][:2])
    edit(config, preprocessor)
    return files(config, preprocessor)


def test_a_text_model_has_no_family() -> None:
    assert family_of(files({"model_type": "llama"})) is None


def test_an_unknown_family_is_refused_by_name_and_the_known_ones_are_named() -> None:
    with pytest.raises(
        FamilyError, match="'internvl' are not supported; those of gemma3, gemma4, idefics3, .*smolvlm are"
    ):
        family_of(files({"model_type": "internvl", "vision_config": {"image_size": 448}}))
    assert len(FAMILIES) == 12


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("llava", {"do_resize": False}, "preprocessor_config.json: do_resize is false, which is not supported"),
        ("llava", {"image_processor_type": "ViTImageProcessor"}, "ViTImageProcessor, which is not supported"),
        ("llava", {"crop_size": {"height": 400, "width": 400}}, "crop_size is larger than the shortest edge"),
        ("llava", {"image_std": [0, 1, 1]}, "image_std contains 0"),
        ("llava", {"image_mean": "a"}, "image_mean is not three numbers"),
        ("llava", {"size": {"shortest_edge": -1}}, "shortest_edge is -1, not a whole number of at least 1"),
        ("llava", {"size": {"shortest_edge": 10**9}}, "shortest_edge is 1000000000, more than 8192"),
        ("llava-next", {"image_grid_pinpoints": [[336, 672]]}, "differs from that of config.json"),
        ("gemma3", {"do_pan_and_scan": True}, "do_pan_and_scan is true, which is not supported"),
        ("gemma4", {"pooling_kernel_size": 2}, "pooling_kernel_size is not 3, as in the model's vision_config"),
        ("gemma4", {"max_soft_tokens": 300}, "max_soft_tokens is 300, and is one of (70, 140, 280, 560, 1120)"),
        ("qwen2-vl", {"patch_size": 16}, "patch_size is not 14, as in the model's vision_config"),
        ("smolvlm", {"max_image_size": {"longest_edge": 500}}, "max_image_size does not fit the model's patch_size"),
        ("pixtral", {"resample": 9}, "resample is 9"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(name: str, edit: dict[str, Any], message: str) -> None:
    with pytest.raises(FamilyError, match=re.escape(message)):
        family_of(changed(name, lambda config, preprocessor: preprocessor.update(edit)))


@pytest.mark.parametrize("raw", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_broken_files_are_refused_by_name(raw: bytes) -> None:
    with pytest.raises(FamilyError, match="preprocessor_config.json is no"):
        family_of({**files_of("llava"), "preprocessor_config.json": raw})


def test_defaults_are_those_of_the_classes() -> None:
    """Files leave out what equals the default of their class."""
    qwen = family_of(files({"model_type": "qwen2_vl", "vision_config": {}}, {}))
    assert qwen is not None
    assert qwen.layout(5000, 5000, Detail.AUTO).num_image_tokens == 35 * 35  # 1,280 tokens at most
    assert qwen.image_token_id == 151655
    next_one = family_of(files({"model_type": "qwen3_5", "vision_config": {}}, {}))
    assert next_one is not None
    assert next_one.reserved_token_ids == {248053, 248054, 248056, 248057}
    mistral = family_of(files({"model_type": "mistral3", "vision_config": {}}, {}), UNBOUNDED)
    assert mistral is not None
    assert mistral.layout(2000, 2000, Detail.AUTO).runs == (37,) * 37  # 1024 / 28


def test_settings_in_processor_config_are_read_where_there_is_no_file_of_their_own() -> None:
    config, preprocessor, processor = MODELS["smolvlm"]
    nested = {"config.json": config, "processor_config.json": {**processor, "image_processor": preprocessor}}
    found = family_of({name: json.dumps(content).encode() for name, content in nested.items()})
    assert found == family_named("smolvlm")


@pytest.mark.parametrize("name", MODELS)
def test_the_image_token_has_either_name(name: str) -> None:
    config, preprocessor, _ = MODELS[name]
    kept = {key: value for key, value in config.items() if not key.startswith("image_token")}
    found = [family_of(files({**kept, key: 7}, preprocessor)) for key in ("image_token_id", "image_token_index")]
    assert [family.image_token_id for family in found if family] == ([7, 151655] if name.startswith("qwen") else [7, 7])
