"""Pixels of CLIP and SigLIP towers: every image is scaled to one size."""

from __future__ import annotations

from dataclasses import dataclass

from PIL import Image

from headrace.common.vision.files import Fields
from headrace.common.vision.normalising import CLIP_MEAN, CLIP_STD, HALF, Normalising, Pixels


@dataclass(frozen=True)
class OneSize:
    """Scales every image to one size."""

    height: int
    width: int
    shortest_edge: int | None
    """The image's shorter side is scaled to it, and the middle of the image is kept. None: the image is scaled to the
    size, whatever its ratio."""
    resample: Image.Resampling
    normalising: Normalising

    @classmethod
    def read(cls, fields: Fields, kind: str) -> OneSize:
        """Read the settings of an image processor. `kind` is its class if the file names none."""
        kind = processor_kind(fields, kind)
        fields.demand("do_resize", True, True)
        resample = fields.resample(Image.Resampling.BICUBIC)
        if kind == "SiglipImageProcessor":
            size = fields.size("size", {"height": 224, "width": 224}, of_whole=("height", "width"))
            normalising = Normalising.read(fields, HALF, HALF)
            return cls(size.side("height"), size.side("width"), None, resample, normalising)
        if kind != "CLIPImageProcessor":
            raise fields.error("image_processor_type", f"is {kind}, which is not supported for this model")
        normalising = Normalising.read(fields, CLIP_MEAN, CLIP_STD)
        size = fields.size("size", {"shortest_edge": 224}, of_whole=("shortest_edge",))
        edge = None if "height" in size else size.side("shortest_edge")
        if not fields.flag("do_center_crop", True):
            if edge is not None:
                raise fields.error("do_center_crop", "is false beside a shortest edge, which is not supported")
            return cls(size.side("height"), size.side("width"), None, resample, normalising)
        crop = fields.size("crop_size", {"height": 224, "width": 224}, of_whole=("height", "width"))
        height, width = crop.side("height"), crop.side("width")
        if edge is None:
            if (height, width) != (size.side("height"), size.side("width")):
                raise fields.error("crop_size", "differs from size, which is not supported")
        elif edge < max(height, width):
            raise fields.error("crop_size", "is larger than the shortest edge, which is not supported")
        return cls(height, width, edge, resample, normalising)

    def scale(self, width: int, height: int) -> float:
        """See `ImageLayout.scale`."""
        if self.shortest_edge is not None:
            return min(1.0, self.shortest_edge / min(width, height))
        return min(1.0, self.width / width, self.height / height)

    def of(self, image: Image.Image) -> Pixels:
        """The pixels [3, height, width] of an image in mode RGB."""
        if self.shortest_edge is None:
            return self.normalising.of(image.resize((self.width, self.height), self.resample))
        short, long = sorted(image.size)
        scaled = int(self.shortest_edge * long / short)
        wide = image.width > image.height
        image = image.resize((scaled, self.shortest_edge) if wide else (self.shortest_edge, scaled), self.resample)
        left, top = (image.width - self.width) // 2, (image.height - self.height) // 2
        return self.normalising.of(image.crop((left, top, left + self.width, top + self.height)))


def processor_kind(fields: Fields, default: str) -> str:
    """The class of an image processor. Its fast variants have the same settings."""
    kind = fields.text("image_processor_type", default)
    for end in ("Fast", "Pil"):
        kind = kind.removesuffix(end)
    return kind
