"""Images from outside: bytes that a client sent, or a URL, to upright RGB pixels.

Owns every limit between a client's bytes and pixels. Knows no models, tokens or HTTP bodies.
Invariant: importing this package does not import Pillow.

Modules:

- `image_input`: an image of a request, and what it becomes
"""
