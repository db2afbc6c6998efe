"""Files to pixels: what is refused and by what words, and which pixels the others have."""

import io

import pytest
from PIL import Image

from cadenza.media.decoding import prepared, prepared_picture, upright_rgb
from cadenza.media.headers import image_size, read_image_header
from cadenza.media.image_input import ImageFault
from tests.media import corpus
from tests.media.corpus import FORMATS, OTHER_FORMATS, quarters, saved
from tests.media.processors import WholeImages


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_of_each_format_gives_its_pixels_and_its_header_their_size(format: str):
    data = saved(quarters(), format)
    assert image_size(data) == (32, 16)
    found = upright_rgb(data)
    assert found.mode == "RGB"
    corners = [found.getpixel(place) for place in ((2, 2), (29, 2), (2, 13), (29, 13))]
    for corner, wanted in zip(corners, [*"rgb", "w"], strict=True):
        colour = {"r": corpus.RED, "g": corpus.GREEN, "b": corpus.BLUE, "w": corpus.WHITE}[wanted]
        assert isinstance(corner, tuple)
        assert max(abs(a - b) for a, b in zip(corner, colour, strict=True)) <= 2


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9, 0.999])
def test_a_cut_file_is_refused(format: str, share: float):
    data = saved(Image.effect_noise((64, 64), 60).convert("RGB"), format)
    with pytest.raises(ImageFault, match=r"cut off or damaged|no known format"):
        upright_rgb(data[: int(len(data) * share)])


@pytest.mark.parametrize(
    "data",
    [
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xd8\xff",
        b"\xff\xd8\xff\xff\xff",
        b"GIF89a",
        b"RIFF\0\0\0\0WEBP",
    ],
)
def test_a_magic_number_alone_is_refused(data: bytes):
    with pytest.raises(ImageFault, match="cut off or damaged"):
        upright_rgb(data)


def test_png_data_that_ends_early_is_refused():
    with pytest.raises(ImageFault, match="cut off or damaged"):
        upright_rgb(corpus.png(4, 4, b"\0" * 20))


@pytest.mark.parametrize("format", ["PNG", "WEBP", "GIF"])
def test_an_animation_is_refused_by_its_header(format: str):
    data = corpus.animated(format)
    named = "WebP" if format == "WEBP" else format
    with pytest.raises(ImageFault, match=f"animated {named}; send one frame"):
        read_image_header(data)


@pytest.mark.parametrize(("name", "data"), OTHER_FORMATS.items())
def test_other_formats_are_named(name: str, data: bytes):
    with pytest.raises(ImageFault, match=f"its bytes are {name}; JPEG, PNG, WebP and GIF are"):
        read_image_header(data)


def test_bytes_decide_the_format_and_not_pillow_which_knows_more():
    for data in OTHER_FORMATS.values():
        with pytest.raises(ImageFault):
            upright_rgb(data)
    with pytest.raises(ImageFault, match="has no bytes"):
        read_image_header(b"")


def test_a_header_of_400_megapixels_is_refused_before_any_pixel():
    with pytest.raises(ImageFault, match=r"20000 x 20000 pixels, over the 25,000,000"):
        read_image_header(corpus.header_bomb())


@pytest.mark.parametrize("side", [0xFFFF_FFFF, 1 << 31])
def test_a_header_of_the_largest_numbers_is_refused(side: int):
    with pytest.raises(ImageFault, match="over the 25,000,000"):
        read_image_header(corpus.header_bomb(side))


def test_data_beyond_the_picture_is_not_expanded():
    bomb = corpus.data_bomb()
    assert len(bomb) < 100_000
    assert upright_rgb(bomb).size == (4, 4)


def test_a_compressed_text_that_expands_is_refused():
    bomb = corpus.text_bomb()
    assert len(bomb) < 100_000
    with pytest.raises(ImageFault, match="cut off or damaged"):
        upright_rgb(bomb)


@pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1)])
@pytest.mark.parametrize("format", FORMATS)
def test_thin_images_have_their_size(size: tuple[int, int], format: str):
    data = saved(Image.new("RGB", size, corpus.RED), format)
    assert image_size(data) == size
    assert upright_rgb(data).size == size


@pytest.mark.parametrize("place", [16, 20])
def test_a_side_of_zero_is_refused(place: int):
    data = bytearray(saved(quarters(), "PNG"))
    data[place : place + 4] = bytes(4)
    with pytest.raises(ImageFault, match="it is empty"):
        read_image_header(bytes(data))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_exif_turns_an_image_upright_as_pillow_does(format: str, orientation: int):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(quarters(), format, exif=exif)
    found = upright_rgb(data)
    from PIL import ImageOps

    wanted = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert (found.size, found.tobytes()) == (wanted.size, wanted.tobytes())
    assert image_size(data) == ((16, 32) if orientation >= 5 else (32, 16))


@pytest.mark.parametrize("value", [0, 9, 65535])
def test_an_orientation_that_does_not_exist_turns_nothing(value: int):
    exif = Image.Exif()
    exif[0x0112] = value
    assert image_size(saved(quarters(), "JPEG", exif=exif)) == (32, 16)


@pytest.mark.parametrize(
    "exif", [b"", b"II*\0", b"II*\0\xff\xff\xff\xff", b"MM\0*\0\0\0\x08\xff\xff", b"junk"]
)
def test_damaged_exif_turns_nothing(exif: bytes):
    data = saved(quarters(), "JPEG")
    segment = b"\xff\xe1" + (len(exif) + 8).to_bytes(2, "big") + b"Exif\0\0" + exif
    assert image_size(data[:2] + segment + data[2:]) == (32, 16)


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_transparent_pixels_lie_on_white(format: str):
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 128))
    found = upright_rgb(
        saved(image, format, exact=True) if format == "WEBP" else saved(image, format)
    )
    assert found.getpixel((0, 0)) == corpus.WHITE
    assert found.getpixel((1, 0)) == (127, 127, 127)


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_a_transparent_colour_of_a_palette_is_white(format: str):
    image = quarters().quantize(4)
    at = image.getpixel((0, 0))
    found = upright_rgb(saved(image, format, transparency=at))
    assert found.getpixel((0, 0)) == corpus.WHITE
    assert found.getpixel((20, 2)) == corpus.GREEN


def test_a_transparent_colour_of_rgb_is_white():
    found = upright_rgb(saved(quarters(), "PNG", transparency=corpus.RED))
    assert found.getpixel((0, 0)) == corpus.WHITE
    assert found.getpixel((20, 2)) == corpus.GREEN


def test_grey_with_alpha_lies_on_white():
    assert (
        upright_rgb(saved(Image.new("LA", (1, 1), (0, 0)), "PNG")).getpixel((0, 0)) == corpus.WHITE
    )


def test_sixteen_bits_of_grey_are_divided_by_257():
    values = [0, 128, 129, 257, 32896, 65406, 65407, 65535]
    found = upright_rgb(corpus.wide_grey(values))
    assert [*found.convert("L").tobytes()] == [0, 0, 1, 1, 128, 254, 255, 255]


def test_sixteen_bits_of_grey_with_a_transparent_value():
    found = upright_rgb(corpus.wide_grey([300, 301, 0], key=300))
    assert [*found.convert("L").tobytes()] == [255, 1, 0]


def test_sixteen_bits_of_colour_with_a_transparent_one():
    found = upright_rgb(corpus.wide_rgb([(65535, 0, 0), (0, 65535, 0)], key=(65535, 0, 0)))
    assert [found.getpixel((x, 0)) for x in (0, 1)] == [corpus.WHITE, corpus.GREEN]


def test_cmyk_becomes_rgb():
    data = saved(quarters().convert("CMYK"), "JPEG")
    found = upright_rgb(data).getpixel((2, 2))
    assert isinstance(found, tuple)
    assert found[0] > 240
    assert max(found[1:]) < 16


def test_a_profile_of_colours_changes_nothing():
    data = saved(quarters(), "PNG", icc_profile=b"not a profile" * 100)
    assert upright_rgb(data).tobytes() == quarters().tobytes()


def test_a_gif_larger_than_its_screen_counts_as_it_is_decoded():
    data = bytearray(saved(quarters(), "GIF"))
    data[6:10] = (1).to_bytes(2, "little") * 2
    assert image_size(bytes(data)) == (32, 16)
    assert upright_rgb(bytes(data)).size == (32, 16)


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xd8" + b"\xff" * (1 << 20),
        b"\xff\xd8" + b"\xff\xfe\0\x02" * (1 << 19),
        b"GIF89a" + bytes(7) + b"\x21\xfe" + b"\x01x" * (1 << 20),
        corpus.png(1, 1, b"", before=[(b"teSt", b"")] * (1 << 18)),
    ],
    ids=["JPEG fill", "JPEG segments", "GIF blocks", "PNG chunks"],
)
def test_a_walk_through_a_file_has_a_bound(data: bytes):
    with pytest.raises(ImageFault, match="over 262,144 blocks"):
        read_image_header(data)


def test_a_file_of_over_20_mb_is_refused_unread():
    with pytest.raises(ImageFault, match=r"20\.0 MiB, over the 20\.0 MiB"):
        read_image_header(bytes((20 << 20) + 1))


def test_a_processor_gets_the_image_upright_and_the_detail():
    found = prepared(saved(quarters(), "PNG"), WholeImages(), "low")
    assert (found.width, found.height) == (32, 16)
    assert found.parts == (quarters().tobytes(), b"low")


def test_a_pil_image_is_taken_likewise():
    image = quarters()
    image.getexif()[0x0112] = 6
    found = prepared_picture(image, WholeImages(), "auto")
    assert (found.width, found.height) == (16, 32)
    with pytest.raises(ImageFault, match="from 1 to 25,000,000 pixels"):
        prepared_picture(Image.new("1", (20_000, 2_000)), WholeImages(), "auto")
