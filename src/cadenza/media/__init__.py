"""Images from outside: bytes that a client sent, or a URL, to upright RGB pixels.

Owns every limit between a client's bytes and pixels. Invariant: importing this package does not
import Pillow.

Modules:

- `image_input`: an image of a request, and what it becomes
- `headers`: format, size and orientation out of a file's header
- `decoding`: from a file to upright RGB pixels
- `decode_worker`, `decode_pool`: the same in processes that can be killed
- `fetching`: images by https, and which URLs and addresses may be fetched from
- `opening`: all images of a request; the bytes in data URLs
"""
