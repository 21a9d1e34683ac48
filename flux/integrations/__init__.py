"""Flux inside other programs: each module makes one program's own calls run ops of flux."""
