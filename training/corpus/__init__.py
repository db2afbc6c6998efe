"""Generates every text that the bundled model is trained and measured on."""
