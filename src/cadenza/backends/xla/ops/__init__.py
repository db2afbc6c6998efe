"""The operations of a decoder: the op table's interface and its implementations."""
