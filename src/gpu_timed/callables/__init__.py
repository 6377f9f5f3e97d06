"""How each kind of callable is taken hold of, so that its call becomes a span and it stays what it was."""
