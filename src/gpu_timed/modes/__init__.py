"""How the work of a call is launched: which mode a call is to run in, and what runs it so."""
