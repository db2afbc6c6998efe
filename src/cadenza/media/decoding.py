"""From an image's file to upright RGB pixels: `upright_rgb`, and `prepared`, as a processor asks.
Runs in a child process of a server (`decode_worker`), in the caller's process in a library. The
header is checked before Pillow reads a byte, and Pillow reads only the header's format."""

import io
from typing import TYPE_CHECKING, Any

from cadenza.media.headers import ImageHeader, cut_off, read_image_header
from cadenza.media.image_input import MAX_PIXELS, Detail, ImageFault, OpenedImage

if TYPE_CHECKING:
    from PIL.Image import Image

    from cadenza.vision.processor import ImageProcessor

_WIDE = ("I", "I;16", "I;16B", "I;16L")  # Pillow's modes of 16-bit grey
_TURNED = range(5, 9)  # EXIF orientations that exchange the sides
_TO_BYTE = [(value + 128) // 257 for value in range(1 << 16)]


def prepared(data: bytes, processor: "ImageProcessor", detail: Detail) -> OpenedImage:
    """The parts that a processor makes of a file. Raises ImageFault."""
    return _parts(upright_rgb(data), processor, detail)


def prepared_picture(picture: Any, processor: "ImageProcessor", detail: Detail) -> OpenedImage:
    return _parts(upright_picture(picture), processor, detail)


def _parts(image: "Image", processor: "ImageProcessor", detail: Detail) -> OpenedImage:
    parts = processor.prepare(image, detail)
    return OpenedImage(width=image.width, height=image.height, parts=parts)


def upright_rgb(data: bytes) -> "Image":
    """Decodes a file. Transparent pixels are white, 16-bit grey is divided by 257, colour profiles
    are ignored. Raises ImageFault."""
    header = read_image_header(data)
    try:
        with _open(data, header) as image:
            if image.size != (header.stored_width, header.stored_height):
                raise cut_off()
            image.load()
            rgb = _rgb(image)
    except (OSError, SyntaxError, ValueError, EOFError, TypeError, KeyError, IndexError):
        # Pillow's plugins raise any of these for damaged files.
        raise cut_off() from None
    return _upright(rgb, header.orientation)


def picture_size(picture: Any) -> tuple[int, int]:
    """The upright width and height of the caller's PIL image."""
    from PIL.ExifTags import Base

    width, height = picture.size
    is_turned = picture.getexif().get(Base.Orientation) in _TURNED
    return (height, width) if is_turned else (width, height)


def upright_picture(picture: Any) -> "Image":
    """The caller's PIL image, upright in RGB. Raises ImageFault."""
    from PIL import ImageOps

    width, height = picture.size
    if not width or not height or width * height > MAX_PIXELS:
        raise ImageFault(
            f"it has {width} x {height} pixels; from 1 to {MAX_PIXELS:,} pixels are allowed"
        )
    return _rgb(ImageOps.exif_transpose(picture))


def _open(data: bytes, header: ImageHeader) -> "Image":
    """With the plugin of the header's format, without Pillow's search of all of them."""
    from PIL import GifImagePlugin, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

    plugins = {
        "JPEG": JpegImagePlugin.JpegImageFile,
        "PNG": PngImagePlugin.PngImageFile,
        "WebP": WebPImagePlugin.WebPImageFile,
        "GIF": GifImagePlugin.GifImageFile,
    }
    return plugins[header.format](io.BytesIO(data))


def _rgb(image: "Image") -> "Image":
    from PIL import Image

    if image.mode in _WIDE:
        return _rgb_of_wide(image)
    if image.mode == "RGB" and isinstance(image.info.get("transparency"), tuple):
        key: tuple[int, ...] = image.info["transparency"]
        if max(key) > 255:  # of 16 bits, of which Pillow keeps the upper ones of each pixel
            image.info["transparency"] = tuple(value >> 8 for value in key)
    if not image.has_transparency_data:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _rgb_of_wide(image: "Image") -> "Image":
    """16-bit grey: Pillow's own conversion makes nearly all of it white."""
    wide = image.convert("I")
    grey = wide.point(_TO_BYTE, "L")
    key = image.info.get("transparency")
    if isinstance(key, int):
        is_key = [255 * (value == key) for value in range(1 << 16)]
        grey.paste(255, mask=wide.point(is_key, "L"))
    return grey.convert("RGB")


def _upright(image: "Image", orientation: int) -> "Image":
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image if orientation == 1 else image.transpose(turns[orientation])
