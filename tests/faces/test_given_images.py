"""The forms in which Python programs give images, down to their pixels."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cadenza.errors import InvalidRequestError
from cadenza.frontend.image_prompts import with_images
from cadenza.frontend.prepared_request import ChatPrompt
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.media.image_input import MAX_ENCODED_BYTES, MAX_IMAGES, ImageInput
from cadenza.media.opening import PooledPixels
from tests.faces.seeing import seeing_text, user

SIZE = (30, 20)


def drawn() -> Image.Image:
    image = Image.new("RGB", SIZE, (10, 20, 30))
    image.putpixel((3, 4), (200, 100, 0))
    return image


def png() -> bytes:
    file = io.BytesIO()
    drawn().save(file, "PNG")
    return file.getvalue()


def data_url() -> str:
    return f"data:image/png;base64,{base64.b64encode(png()).decode()}"


@pytest.fixture(scope="module")
def face() -> Iterator[TextFrontend]:
    face = seeing_text(pixels=PooledPixels())
    yield face
    face.prompts.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "drawn.png"
    file.write_bytes(png())
    return file


def parts(path: Path) -> list[Any]:
    return [
        {"type": "image", "image": drawn()},
        {"type": "image_pil", "image_pil": drawn()},
        {"type": "image", "image": png()},
        {"type": "image", "image": path},
        {"type": "image", "image": str(path)},
        {"type": "image", "path": str(path)},
        {"type": "image", "url": data_url()},
        {"type": "image", "base64": base64.b64encode(png()).decode()},
        {"type": "image_url", "image_url": {"url": data_url()}},
        {"type": "image_url", "image_url": data_url()},
        {"type": "input_image", "image_url": data_url(), "detail": "auto"},
        {"type": "image", "image": ImageInput(data=png())},
    ]


def test_every_form_of_an_image_gives_its_pixels(face: TextFrontend, path: Path):
    for part in parts(path):
        (message,) = with_images([user("see ", part)])
        (found,) = face.prepare(ChatPrompt(messages=[message])).request.attachments
        assert found.payload == drawn().tobytes()
        assert (found.width, found.height) == SIZE


def test_a_raw_prompts_images_have_the_same_forms(face: TextFrontend, path: Path):
    for given in (drawn(), png(), path, [data_url()]):
        prompt = {"prompt": "see <image>", "multi_modal_data": {"image": given}}
        (found,) = face.prepare(prompt).request.attachments
        assert found.payload == drawn().tobytes()


def test_an_upright_picture_has_the_size_that_its_orientation_gives(face: TextFrontend):
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    drawn().save(file, "JPEG", exif=exif)
    turned = Image.open(file)
    for given in (file.getvalue(), turned):
        (message,) = with_images([user({"type": "image", "image": given})])
        (found,) = face.prepare(ChatPrompt(messages=[message])).request.attachments
        assert (found.width, found.height) == (20, 30)


def test_what_is_no_image_stays_as_it_is():
    messages = [
        {"role": "system", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "audio", "audio": 1}]},
    ]
    assert with_images(messages) == messages
    assert with_images("no messages") == "no messages"


@pytest.mark.parametrize(
    ("part", "told"),
    [
        ({"type": "image", "image": 3}, r"messages\[0\].content\[0\] is 3"),
        ({"type": "image"}, r"messages\[0\].content\[0\] is None"),
        ({"type": "image", "image": "/nowhere/a.png"}, "'/nowhere/a.png' cannot be read: No such"),
        ({"type": "image", "image": "a\0b"}, "cannot be read: it is no path"),
        ({"type": "image", "image": b"x", "detail": "fine"}, "detail 'fine'; there are auto, low"),
    ],
)
def test_what_cannot_be_an_image_is_refused_with_its_place(part: Any, told: str):
    with pytest.raises(InvalidRequestError, match=told):
        with_images([user(part)])


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path):
    file = tmp_path / "large.png"
    with file.open("wb") as out:
        out.truncate(MAX_ENCODED_BYTES + 1)
    with pytest.raises(InvalidRequestError, match="has over 20"):
        with_images([user({"type": "image", "image": file})])


def test_a_damaged_image_is_named(face: TextFrontend):
    (message,) = with_images([user({"type": "image", "image": b"GIF"})])
    with pytest.raises(InvalidRequestError, match=r"image 1 \(messages\[0\].content\[0\]\)"):
        face.prepare(ChatPrompt(messages=[message]))


def test_there_are_at_most_so_many_images(face: TextFrontend):
    part = {"type": "image", "image": drawn()}
    (message,) = with_images([user(*[part] * (MAX_IMAGES + 1))])
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_IMAGES} images"):
        face.prepare(ChatPrompt(messages=[message]))


def test_a_remote_url_is_not_fetched(face: TextFrontend):
    part = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    (message,) = with_images([user(part)])
    with pytest.raises(InvalidRequestError, match="image 1"):
        face.prepare(ChatPrompt(messages=[message]))
