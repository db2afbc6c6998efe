"""All images of a request: counts, order, errors that name the image."""

import asyncio
import base64
from collections.abc import Generator
from typing import Any

import pytest

from cadenza.errors import InvalidRequestError
from cadenza.media.decode_pool import DecodePool
from cadenza.media.decoding import prepared, prepared_picture
from cadenza.media.fetching import AllowedHosts, BudgetFullError, MediaFetcher
from cadenza.media.image_input import ImageFault, ImageInput, image_part, images_of
from cadenza.media.opening import (
    MAX_BASE64_CHARS,
    ImageOpener,
    data_of_base64,
    data_of_url,
    measure_images,
)
from tests.media.corpus import data_url, header_bomb, quarters, saved
from tests.media.processors import WholeImages

PNG = saved(quarters(), "PNG")
WHOLE = WholeImages()


@pytest.fixture(scope="module")
def pool() -> Generator[DecodePool]:
    pool = DecodePool(num_processes=1)
    yield pool
    pool.close()


class FakeFetcher(MediaFetcher):
    def __init__(self) -> None:
        super().__init__(AllowedHosts(["images.test"]))
        self.fetched: list[str] = []

    async def fetch(self, url: str, try_add: Any) -> bytes:
        self.fetched.append(url)
        if not try_add(len(PNG)):
            raise BudgetFullError
        return PNG


def file(data: bytes = PNG, where: str = "") -> ImageInput:
    return ImageInput(data=data, where=where)


def opened(images: list[ImageInput], pool: DecodePool, most: int = 1 << 30) -> FakeFetcher:
    fetcher = FakeFetcher()
    asyncio.run(ImageOpener(fetcher, pool).open(images, WHOLE, lambda n: n <= most))
    return fetcher


def test_a_conversations_images_are_found_in_their_order():
    first, second = file(), file()
    messages = [
        {"role": "user", "content": "text"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, image_part(first)]},
        {"role": "tool", "content": [image_part(second), "b"]},
    ]
    assert images_of(messages) == [first, second]


def test_a_process_makes_of_an_image_what_this_one_would(pool: DecodePool):
    there = [file(), ImageInput(url=data_url(PNG), detail="low")]
    opened(there, pool)
    assert [each.opened for each in there] == [
        prepared(PNG, WHOLE, "auto"),
        prepared(PNG, WHOLE, "low"),
    ]
    assert there[1].opened is not None
    assert there[1].opened.parts == (quarters().tobytes(), b"low")
    assert [each.data for each in there] == [None, None]


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_pil_image_is_measured_upright(orientation: int):
    picture = quarters()
    picture.getexif()[0x0112] = orientation
    image = ImageInput(picture=picture)
    measure_images([image], WHOLE)
    assert image.opened is not None
    made = prepared_picture(picture, WHOLE, "auto")
    assert (image.opened.width, image.opened.height) == (made.width, made.height)
    assert (made.width == 32) == (orientation == 1)
    assert image.opened.parts is None


def test_counting_reads_headers_only():
    image = file(PNG[:60] + PNG[60:])
    measure_images([image], WHOLE)
    assert image.opened is not None
    assert image.opened.parts is None


def test_a_url_is_fetched_by_a_server_alone(pool: DecodePool):
    image = ImageInput(url="https://images.test/a", where="messages[0].content[0]")
    assert opened([image], pool).fetched == ["https://images.test/a"]
    assert image.opened is not None
    assert image.opened.width == 32
    with pytest.raises(InvalidRequestError, match=r"image 1: its URL is remote; only a server"):
        measure_images([ImageInput(url="https://images.test/a")], WHOLE)


def test_no_url_is_fetched_where_another_one_is_refused(pool: DecodePool):
    images = [ImageInput(url="https://images.test/a"), ImageInput(url="https://b.test/a")]
    fetcher = FakeFetcher()
    with pytest.raises(InvalidRequestError, match=r"^image 2: its URL is at 'b\.test', which"):
        asyncio.run(ImageOpener(fetcher, pool).open(images, WHOLE, lambda _: True))
    assert fetcher.fetched == []


def test_a_used_up_budget_of_bytes_ends_the_request(pool: DecodePool):
    with pytest.raises(BudgetFullError):
        opened([ImageInput(url="https://images.test/a")], pool, most=3)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_first_image_at_fault_is_named_with_its_place(pool: DecodePool, place: int):
    images = [file(where=f"messages[{number}].content[1]") for number in range(3)]
    for number in range(place, 3):
        images[number].data = header_bomb()
    for open_all in (lambda: opened(images, pool), lambda: measure_images(images, WHOLE)):
        with pytest.raises(InvalidRequestError) as raised:
            open_all()
        where = f"messages[{place}].content[1]"
        said = f"image {place + 1} ({where}): it has 20000 x 20000 pixels"
        assert str(raised.value).startswith(said)
        assert raised.value.param == where
        assert images[2].opened is None


def test_a_fault_that_only_its_pixels_show_names_the_image(pool: DecodePool):
    data = saved(quarters(), "JPEG")
    images = [file(), file(data[: len(data) - 30])]
    with pytest.raises(InvalidRequestError, match=r"^image 2: the file is cut off or damaged"):
        opened(images, pool)


def test_sides_that_the_model_does_not_take_are_refused_by_the_header(pool: DecodePool):
    narrow = WholeImages(most_aspect=1.5)
    with pytest.raises(InvalidRequestError, match=r"^image 1: its sides are 2 to 1; at most 1\.5"):
        measure_images([file()], narrow)


def test_nine_images_are_refused(pool: DecodePool):
    images = [file(where="x") for _ in range(9)]
    with pytest.raises(InvalidRequestError, match=r"^image 9 \(x\): a request may have at most 8"):
        opened(images, pool)
    measure_images(images[:8], WHOLE)


@pytest.mark.parametrize("head", ["data:image/png;base64,", "DATA:Image/PNG;Base64,"])
def test_a_data_url_has_one_media_type_and_base64(head: str):
    assert data_of_url(head + base64.b64encode(PNG).decode()) == PNG


@pytest.mark.parametrize(
    "url",
    [
        "data:,hello",
        "data:image/png,hello",
        "data:image/png;charset=utf-8;base64,AAAA",
        "data:;base64,AAAA",
        "data:image/png;base64;base64,AAAA",
        "data:image;base64,AAAA",
        "data:image/png ;base64,AAAA",
        "file:///etc/passwd",
        "data:" + "x" * 1000 + "/png;base64,AAAA",
    ],
)
def test_data_urls_of_another_form_are_refused(url: str):
    with pytest.raises(ImageFault, match="a data URL has the form data:image/png;base64"):
        data_of_url(url)


def test_a_data_url_of_another_kind_of_media_is_refused():
    with pytest.raises(ImageFault, match="says 'video/mp4'; JPEG, PNG, WebP and GIF"):
        data_of_url("data:video/mp4;base64,AAAA")


def test_the_media_type_of_an_image_does_not_decide_its_format(pool: DecodePool):
    image = ImageInput(url=data_url(PNG, "image/jpeg"))
    opened([image], pool)
    assert image.opened is not None
    assert image.opened.width == 32


@pytest.mark.parametrize(
    "text", ["A", "AAA", "AAAA\n", " AAAA", "AA-_", "AA==AA==", "A===", "AAAA====", "ä", "AAAA,"]
)
def test_base64_is_strict(text: str):
    with pytest.raises(ImageFault, match="its base64 is damaged"):
        data_of_base64(text)


def test_base64_of_several_slices_is_decoded_whole_and_as_strictly():
    data = bytes(range(256)) * 3072 + b"x"
    text = base64.b64encode(data).decode()
    assert len(text) > 1 << 20
    assert data_of_base64(text) == data
    for place in (1 << 18, (1 << 19) - 4):
        with pytest.raises(ImageFault, match="its base64 is damaged"):
            data_of_base64(text[:place] + "QQ==" + text[place + 4 :])


def test_base64_of_too_many_bytes_is_refused_undecoded():
    with pytest.raises(ImageFault, match=r"over the 20\.0 MiB that are allowed"):
        data_of_base64("A" * (MAX_BASE64_CHARS + 4))
