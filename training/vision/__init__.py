"""Draws, trains, exports and measures the bundled model that sees (`models/bundled-vision`)."""
