"""Operations by name: what a decoder is made of, and the implementations of each."""
