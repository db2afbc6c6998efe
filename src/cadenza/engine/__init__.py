"""The engines: EngineCore and its loops, the plain reference, and the faces over them."""
