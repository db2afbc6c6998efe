"""Images of conversations and prompts become placeholders and attachments; texts never do."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from cadenza.errors import ContextLengthError, InvalidRequestError, TextTooLongError
from cadenza.events import PromptLogprobs, TokenLogprobs
from cadenza.frontend.answers import AskedAnswer
from cadenza.frontend.image_prompts import num_image_tokens, with_images
from cadenza.frontend.output_processor import OutputProcessor
from cadenza.frontend.prepared_request import ChatPrompt, Terms
from cadenza.frontend.receipts import with_receipt
from cadenza.frontend.text_frontend import TextFrontend
from cadenza.media.image_input import MAX_ENCODED_BYTES, MAX_IMAGES, ImageInput, OpenedImage
from cadenza.media.opening import PooledPixels
from cadenza.request import Attachment, Request, SamplingParams
from cadenza.vision.processor import ImagePart, image_digest
from tests.faces.seeing import (
    BREAK,
    END,
    IMAGE,
    TEMPLATE,
    GivenSizes,
    GridProcessor,
    TiledProcessor,
    blind_text,
    picture,
    seeing_text,
    text_part,
    user,
)


@pytest.fixture(scope="module")
def face() -> TextFrontend:
    return seeing_text()


def id_of(face: TextFrontend, mark: str) -> int:
    assert face.tokenizer is not None
    found = face.tokenizer.id_of(mark)
    assert found is not None
    return found


def asked(face: TextFrontend, *messages: dict[str, Any], **options: Any) -> Request:
    return face.prepare(ChatPrompt(messages=messages), **options).request


def shown(face: TextFrontend, request: Request) -> str:
    """The prompt's text with `N*` in place of N placeholders in a row."""
    text, count = face.decode(request.prompt_token_ids), 0
    parts = text.split(IMAGE)
    found = parts[0]
    for place, part in enumerate(parts[1:], 1):
        count += 1
        if part or place == len(parts) - 1:
            found += f"{count}*{part}"
            count = 0
    return found


def spans(request: Request) -> list[tuple[int, int]]:
    return [(each.start, each.length) for each in request.attachments]


def test_an_image_is_placeholders_in_its_place_with_its_grid_and_digest(face: TextFrontend):
    request = asked(face, user("Look: ", picture("30x20"), " What is it?"))
    assert shown(face, request) == "<|turn|>user\nLook: 6* What is it?\n<|turn|>assistant"
    (found,) = request.attachments
    first = request.prompt_token_ids.index(id_of(face, IMAGE))
    assert (found.start, found.length) == (first, 6)
    assert (found.width, found.height, found.rows, found.columns) == (30, 20, 2, 3)
    assert found.payload == bytes(30 * 20 * 3)
    part = ImagePart(width=30, height=20, rows=2, columns=3)
    assert found.digest == image_digest(b"grid", part, found.payload)
    assert num_image_tokens(request) == 6


def test_images_keep_the_order_of_the_conversation(face: TextFrontend):
    request = asked(
        face,
        user(picture("10x20"), "one ", picture("30x10")),
        {"role": "assistant", "content": "Two."},
        user("and ", picture("10x10")),
    )
    assert [(each.rows, each.columns) for each in request.attachments] == [(2, 1), (1, 3), (1, 1)]
    image_id = id_of(face, IMAGE)
    held = [at for each in request.attachments for at in range(each.start, each.end)]
    assert held == [at for at, each in enumerate(request.prompt_token_ids) if each == image_id]


def test_a_placeholder_that_somebody_typed_stays_text(face: TextFrontend):
    image_id = id_of(face, IMAGE)
    request = asked(face, user(f"{IMAGE} is ", picture("10x10"), f" and {IMAGE}"))
    assert request.prompt_token_ids.count(image_id) == 1
    assert face.decode(request.prompt_token_ids).count(IMAGE) == 3
    plain = asked(face, {"role": "user", "content": f"{IMAGE}{IMAGE}"})
    assert image_id not in plain.prompt_token_ids
    assert not plain.attachments
    assert image_id not in face.prepare(f"see {IMAGE}").request.prompt_token_ids
    _, ids = face.render_chat(ChatPrompt(messages=[{"role": "assistant", "content": IMAGE}]))
    assert image_id not in ids


def test_texts_around_the_runs_are_encoded_with_their_neighbours():
    face = seeing_text(GridProcessor(begin="\n\n", end="\n\n"))
    request = asked(face, user("a\n", picture("20x10"), "\nb"))
    assert shown(face, request) == "<|turn|>user\na\n\n\n2*\n\n\nb\n<|turn|>assistant"
    assert face.tokenizer is not None
    before, behind = (
        face.tokenizer.encode(each, add_special_tokens=False) for each in ("a\n\n\n", "\n\n\nb\n")
    )
    text = " ".join(map(str, request.prompt_token_ids))
    assert " ".join(map(str, before)) in text
    assert " ".join(map(str, behind)) in text


def test_marks_between_the_rows_of_an_image_are_in_its_span():
    face = seeing_text(GridProcessor(row_end=BREAK, end=END))
    request = asked(face, user(picture("30x20")))
    (found,) = request.attachments
    ids = request.prompt_token_ids[found.start : found.end]
    image_id, break_id = id_of(face, IMAGE), id_of(face, BREAK)
    assert ids == (image_id,) * 3 + (break_id,) + (image_id,) * 3
    assert request.prompt_token_ids[found.end : found.end + 2] == (break_id, id_of(face, END))
    assert (found.rows, found.columns) == (2, 3)


def test_each_tile_is_an_attachment_of_its_own():
    face = seeing_text(TiledProcessor())
    request = asked(face, user(picture(), "and", picture()))
    assert [each.length for each in request.attachments] == [4] * 6
    digests = [each.digest for each in request.attachments]
    assert len(set(digests)) == 3
    assert digests[:3] == digests[3:]


def test_lengths_follow_from_sizes_and_long_prompts_open_no_image():
    pixels = GivenSizes()
    face = seeing_text(pixels=pixels)
    message = user("see ", picture("500x400"))
    _, ids = face.render_chat(ChatPrompt(messages=[message]))
    assert len(ids) > 2000
    with pytest.raises(TextTooLongError, match="2000 of them of its images; at most 2001"):
        face.prompts.spanned(face.prompts.rendered(ChatPrompt(messages=[message])), 2001)
    assert not pixels.opened
    assert face.prepare(ChatPrompt(messages=[message])).request.prompt_token_ids == ids
    assert pixels.opened == [b"500x400"]


def test_a_prompt_beyond_the_engines_context_is_refused_before_its_images_are_opened():
    pixels = GivenSizes()
    face = seeing_text(pixels=pixels, max_model_len=100)
    with pytest.raises(ContextLengthError, match="maximum context length is 100 tokens"):
        face.prepare(ChatPrompt(messages=[user(picture("500x400"))]))
    assert not pixels.opened


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        (TEMPLATE.replace("'image'", '"image"'), "a 1* b"),
        (TEMPLATE.replace("part.type == 'image'", "part.image_url is defined"), "a 1* b"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "a \n1*\n b"),
        # Images first, as LLaVA's templates have them.
        (
            "{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<image>"
            "{% endif %}{% endfor %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
            "1*a  b",
        ),
    ],
    ids=["quoted", "image_url", "texts alone", "images first"],
)
def test_templates_write_images_in_their_own_ways(template: str, rendered: str):
    face = seeing_text(template=template)
    request = asked(face, user("a ", picture("10x10"), " b"))
    assert rendered in shown(face, request)
    assert len(request.attachments) == 1


def test_a_template_that_drops_an_image_is_told_of():
    template = "{% for m in messages %}{{ 'image' if 0 }}{{ m.content[0].text }}{% endfor %}"
    face = seeing_text(template=template)
    with pytest.raises(InvalidRequestError, match="there are 1 images and 0 placeholders"):
        asked(face, user("a", picture()))


def test_a_template_that_refuses_images_in_a_message_is_heard():
    refusal = (
        "{% if messages[0].content is not string %}{{ raise_exception('no images') }}{% endif %}"
    )
    face = seeing_text(template=refusal + TEMPLATE)
    with pytest.raises(InvalidRequestError, match="no images"):
        asked(face, {"role": "system", "content": [picture()]}, user("a"))


def test_an_image_that_the_model_does_not_take_is_named(face: TextFrontend):
    flat = picture("300x10", where="messages[0].content[1]")
    with pytest.raises(
        InvalidRequestError, match=r"image 2 \(messages\[0\].content\[1\]\): it has"
    ):
        asked(face, user(picture(), flat))


def test_a_model_that_does_not_see_says_its_name():
    face = blind_text()
    assert not face.prompts.takes_images
    with pytest.raises(InvalidRequestError, match="the model bundled takes no images"):
        asked(face, user("a", picture()))


def test_detail_reaches_the_processor(face: TextFrontend):
    request = asked(face, user(picture("30x20", detail="low")))
    assert [each.length for each in request.attachments] == [3]


def test_pixels_of_another_size_than_the_header_says_are_refused():
    class Lying(GivenSizes):
        def open(self, images: Any, processor: Any) -> None:
            for image in images:
                image.opened = OpenedImage(width=1, height=1, parts=(b"123",))

    face = seeing_text(pixels=Lying())
    with pytest.raises(InvalidRequestError, match=r"image 1.*others than its file's header says"):
        asked(face, user(picture()))


def test_raw_prompts_have_images_for_their_placeholders(face: TextFrontend):
    data = {"image": [b"20x10", b"10x10"]}
    given = {"prompt": f"<|turn|>a {IMAGE} b {IMAGE}", "multi_modal_data": data}
    request = face.prepare(given).request
    assert [each.length for each in request.attachments] == [2, 1]
    assert id_of(face, "<|turn|>") not in request.prompt_token_ids
    one = face.prepare({"prompt": IMAGE, "multi_modal_data": {"image": b"20x10"}}).request
    assert spans(one) == [(0, 2)]
    with pytest.raises(InvalidRequestError, match="there are 1 images and 2 placeholders"):
        face.prepare({"prompt": IMAGE * 2, "multi_modal_data": {"image": b"20x10"}})
    with pytest.raises(InvalidRequestError, match="multi_modal_data goes with a text"):
        face.prepare({"prompt_token_ids": [1], "multi_modal_data": {"image": b"20x10"}})
    with pytest.raises(InvalidRequestError, match="no other kind"):
        face.prepare({"prompt": "a", "multi_modal_data": {"video": b"20x10"}})


def test_a_raw_prompts_placeholder_has_the_marks_that_the_template_writes_around_it():
    template = TEMPLATE.replace("<image>", "<row_end><image><image_end>")
    face = seeing_text(template=template)
    prompt = f"{END}{BREAK}{IMAGE}{END} {BREAK}"
    request = face.prepare({"prompt": prompt, "multi_modal_data": {"image": b"10x10"}}).request
    (found,) = request.attachments
    ids = request.prompt_token_ids
    assert ids[found.start - 1 : found.end + 1] == tuple(
        id_of(face, mark) for mark in (BREAK, IMAGE, END)
    )
    assert (ids.count(id_of(face, BREAK)), ids.count(id_of(face, END))) == (1, 1)


def test_samples_share_their_prompt_with_its_images(face: TextFrontend):
    request = asked(face, user(picture()), params=SamplingParams(n=3))
    assert (request.params.n, len(request.attachments)) == (3, 1)


def test_a_cut_prompt_keeps_the_images_behind_the_cut(face: TextFrontend):
    whole = asked(face, user(picture("20x10"), "and then ", picture("30x10"), "?"))
    first, second = whole.attachments
    num_kept = len(whole.prompt_token_ids) - first.end
    params = SamplingParams(truncate_prompt_tokens=num_kept)
    cut = asked(face, user(picture("20x10"), "and then ", picture("30x10"), "?"), params=params)
    assert cut.prompt_token_ids == whole.prompt_token_ids[first.end :]
    assert cut.attachments == (
        Attachment(
            start=second.start - first.end,
            length=3,
            digest=second.digest,
            payload=second.payload,
            width=30,
            height=10,
            rows=1,
            columns=3,
        ),
    )
    with pytest.raises(InvalidRequestError, match="cuts the prompt within an image"):
        asked(
            face,
            user(picture("20x10"), "and then ", picture("30x10"), "?"),
            params=SamplingParams(truncate_prompt_tokens=num_kept + 1),
        )


def test_the_servers_requests_wait_for_their_pixels():
    pixels = GivenSizes()
    face = seeing_text(pixels=pixels)
    message = user(picture(), "?")
    params = SamplingParams(truncate_prompt_tokens=9)
    prompt, terms = ChatPrompt(messages=[message], asked=AskedAnswer()), Terms(opens_images=False)
    prepared = face.prepare(prompt, params, terms=terms)
    assert not pixels.opened
    assert (len(prepared.request.prompt_token_ids), prepared.request.attachments) == (9, ())
    whole = face.completed(prepared, terms)
    assert pixels.opened == [b"30x20"]
    assert whole.pending is None
    assert spans(whole.request) == [(whole.request.prompt_token_ids.index(id_of(face, IMAGE)), 6)]
    assert whole.request == face.prepare(ChatPrompt(messages=[message]), params).request
    again = face.prepare(prompt, params, terms=terms)
    assert again.pending is None
    assert again.request == whole.request


def test_placeholders_have_no_log_probabilities(face: TextFrontend):
    prepared = face.prepare(
        ChatPrompt(messages=[user(picture(), "a")]), SamplingParams(prompt_logprobs=0)
    )
    ids = prepared.request.prompt_token_ids
    processor = OutputProcessor(7, prepared, face)
    found = TokenLogprobs(logprob=-1.0, rank=1, top_ids=(), top_logprobs=())
    for start, stop in ((1, 5), (5, len(ids))):
        entries = (found,) * (stop - start)
        processor.push(PromptLogprobs(request_id=7, start=start, entries=entries))
    shown = processor.prompt_logprobs
    assert shown is not None
    image_id = id_of(face, IMAGE)
    assert [each is None for each in shown] == [
        place == 0 or token_id == image_id for place, token_id in enumerate(ids)
    ]


def test_an_answer_to_images_has_no_receipt(face: TextFrontend):
    for prepared in (
        face.prepare(ChatPrompt(messages=[user(picture())])),
        face.prepare(ChatPrompt(messages=[user(picture())], asked=AskedAnswer()), SamplingParams()),
    ):
        with pytest.raises(InvalidRequestError, match="to images has no receipt"):
            with_receipt(prepared)


def test_images_in_results_of_calls_stay_where_tools_are_described(face: TextFrontend):
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": {}}}
    messages = [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [text_part("seen"), picture("10x10")]},
    ]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    request = face.prepare(ChatPrompt(messages=messages, tools=tools)).request
    assert "1*Result of look {}: seen" in shown(face, request)
    assert len(request.attachments) == 1


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
def seeing_face() -> Iterator[TextFrontend]:
    seeing_face = seeing_text(pixels=PooledPixels())
    yield seeing_face
    seeing_face.prompts.close()


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


def test_every_form_of_an_image_gives_its_pixels(seeing_face: TextFrontend, path: Path):
    for part in parts(path):
        (message,) = with_images([user("see ", part)])
        (found,) = seeing_face.prepare(ChatPrompt(messages=[message])).request.attachments
        assert found.payload == drawn().tobytes()
        assert (found.width, found.height) == SIZE


def test_a_raw_prompts_images_have_the_same_forms(seeing_face: TextFrontend, path: Path):
    for given in (drawn(), png(), path, [data_url()]):
        prompt = {"prompt": "see <image>", "multi_modal_data": {"image": given}}
        (found,) = seeing_face.prepare(prompt).request.attachments
        assert found.payload == drawn().tobytes()


def test_an_upright_picture_has_the_size_that_its_orientation_gives(
    seeing_face: TextFrontend,
):
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    drawn().save(file, "JPEG", exif=exif)
    turned = Image.open(file)
    for given in (file.getvalue(), turned):
        (message,) = with_images([user({"type": "image", "image": given})])
        (found,) = seeing_face.prepare(ChatPrompt(messages=[message])).request.attachments
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


def test_a_damaged_image_is_named(seeing_face: TextFrontend):
    (message,) = with_images([user({"type": "image", "image": b"GIF"})])
    with pytest.raises(InvalidRequestError, match=r"image 1 \(messages\[0\].content\[0\]\)"):
        seeing_face.prepare(ChatPrompt(messages=[message]))


def test_there_are_at_most_so_many_images(seeing_face: TextFrontend):
    part = {"type": "image", "image": drawn()}
    (message,) = with_images([user(*[part] * (MAX_IMAGES + 1))])
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_IMAGES} images"):
        seeing_face.prepare(ChatPrompt(messages=[message]))


def test_a_remote_url_is_not_fetched(seeing_face: TextFrontend):
    part = {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}
    (message,) = with_images([user(part)])
    with pytest.raises(InvalidRequestError, match="image 1"):
        seeing_face.prepare(ChatPrompt(messages=[message]))
